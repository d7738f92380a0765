"""The coordinator's side towards the publisher's ranks: seats, what they stage, and the life of each version."""

from __future__ import annotations

from collections.abc import Callable

from weightsync.errors import ConfigError, LayoutError, ProtocolError, UsageError, VersionError
from weightsync.wire import messages as m
from weightsync.wire.arrangement import Arrangement
from weightsync.wire.books import UNSETTLED, Books
from weightsync.wire.ranks import Rank
from weightsync.wire.relay import check_mode
from weightsync.wire.requests import Request, Requests
from weightsync.wire.serving import Serving
from weightsync.wire.versions import SlotState


class Publishing:
    """Acts on the books, and through `serving` on the members."""

    def __init__(self, books: Books, serving: Serving) -> None:
        self._books, self._serving = books, serving
        self.requests = Requests(books.epoch, books.send)

    # ---- seats

    def enlist(self, route: bytes, enlist: m.Enlist, now: float) -> None:
        """A rank presents itself, for the first time or again."""
        books = self._books
        refusal = books.ranks.refusal(enlist, now)
        try:
            if refusal is None:
                books.ballots.set_policy(enlist.policy)
                self._serving.relay.mode = check_mode(enlist.relay)
        except ConfigError as error:
            refusal = str(error)
        if refusal is not None:
            books.send(route, m.Refused(books.epoch, refusal))
            return
        if books.ranks.must_wait(enlist, now):
            return  # it asks again
        if enlist.rank == 0:
            books.publisher = enlist.name
        if books.is_external and enlist.last_epoch > books.epoch:
            self.follow(enlist.last_epoch)
        is_new, follows_another = not books.ranks.knows(enlist), books.ranks.follows_another(enlist)
        pushed_out = books.ranks.seat(route, enlist, now)
        if pushed_out is not None:
            reason = f"{pushed_out.label} was replaced by another process"
            books.send(pushed_out.route, m.Refused(books.epoch, reason))
        versions = books.versions
        if is_new and (follows_another or versions.held()):
            self._lose_slots(f"rank {enlist.rank} of the publisher started again")
        if is_new and (follows_another or versions.held() or len(versions.slots) != enlist.slots):
            versions.slots = [SlotState() for _ in range(enlist.slots)]
        if is_new and enlist.last_epoch and books.is_external:
            versions.inherit(enlist)
            books.epochs.add(enlist.last_epoch)
            for member in books.members.values():
                self._serving.keep_only_held(member.hello)
        books.send(route, m.Enlisted(books.epoch, versions.begun))
        if not any(seat is None for seat in books.ranks.seats):
            self._settle(route, is_new)

    def follow(self, epoch: int) -> None:
        """Ranks or members know a newer epoch."""
        self.requests.epoch = epoch
        self._books.follow(epoch)
        if self._books.is_open:
            self._serving.welcome_all()

    def _settle(self, route: bytes, is_new: bool) -> None:
        """All ranks are there: settle the epoch and how far it is, and what each stages."""
        books = self._books
        if books.epoch == UNSETTLED:
            self.follow(books.new_epoch)
        elif is_new:
            for rank in books.ranks.present():
                if rank.route != route:
                    books.send(rank.route, m.Enlisted(books.epoch, books.versions.begun))
        self._settle_layout(route, is_new)

    def _settle_layout(self, route: bytes, is_new: bool) -> None:
        books = self._books
        enlisted = [rank.enlist for rank in books.ranks.present()]
        layouts, hosts = [enlist.layout for enlist in enlisted], [enlist.host for enlist in enlisted]
        known = books.arrangement
        if known is None or known.layouts != layouts or known.hosts != hosts:
            try:
                books.arrangement = Arrangement(layouts, hosts)
            except (LayoutError, ProtocolError) as error:
                for rank in books.ranks.present():
                    books.send(rank.route, m.NoPlan(books.epoch, str(error)))
                newcomer = books.ranks.find(route)
                if newcomer is not None:
                    books.ranks.remove(newcomer)
                return
            self._serving.forget_plans()
            books.is_open = False
            self._stage_all()
            return
        for rank in books.ranks.present():
            if rank.route == route:
                books.send(route, known.stage(books.epoch, rank.enlist.rank))
        books.is_open = books.is_open and not is_new

    def _stage_all(self) -> None:
        books = self._books
        if books.arrangement is not None:
            for rank in books.ranks.present():
                books.send(rank.route, books.arrangement.stage(books.epoch, rank.enlist.rank))

    def _offers(self, rank: Rank, offers: dict[str, dict[str, str]]) -> None:
        """A rank's slots are there. With the last one the publisher opens: members that waited are welcomed."""
        books = self._books
        if books.is_open and rank.offers == offers:
            return
        rank.offers = offers
        if not books.ranks.missing():
            books.is_open = True
            self._serving.welcome_all()

    def lost(self, rank: Rank, why: str) -> None:
        """The version being staged is lost, no other; the seat waits for its process, or another one."""
        self._books.ranks.remove(rank)
        self.requests.forget(rank.route)
        staging = self._books.versions.staging()
        if staging is not None:
            self._abort(staging.version, f"{rank.label} {why}")

    def _lose_slots(self, reason: str) -> None:
        for slot in self._books.versions.slots:
            if slot.version and not slot.is_sealed:
                self._abort(slot.version, reason)
            self._serving.break_leases(slot, reason)

    # ---- what ranks say

    def receive(self, rank: Rank, message: m.FromMember, now: float) -> None:
        """One message of a rank that has a seat."""
        books = self._books
        match message:
            case m.Beat():
                books.send(rank.route, m.Pong(books.epoch, books.versions.newest))
            case m.Offers():
                self._offers(rank, message.offers)
            case m.Begin():
                self._ask_begin(rank, message, now)
            case m.Sealed():
                self._sealed(rank, message, now)
            case m.Extended():
                self._extended(rank, message)
            case m.Aborted():
                self._abort(message.version, message.reason)
            case m.MemberGone():
                self._serving.gone(message.instance)
            case m.AwaitMembers():
                self._await_members(rank, message, now)
            case m.AwaitStage():
                self._await_stage(rank, message, now)
            case m.AskReport():
                report = books.versions.report(message.version)
                books.send(rank.route, m.Answer(books.epoch, message.request, report=report))
            case m.Bye():
                self.lost(rank, "left")

    def obey(self, route: bytes, order: m.Promote | m.Rollback) -> None:
        """An order about a version, of a rank or of an operator."""
        books = self._books
        if isinstance(order, m.Promote):
            problem = books.ballots.promote(order.version, books.versions.held())
        else:
            problem = self._roll_back(order.version)
        error = None if problem is None else ("UsageError", problem)
        books.send(route, m.Answer(books.epoch, order.request, error=error))

    def _roll_back(self, version: int) -> str | None:
        versions = self._books.versions
        if versions.record(version) is None and version != versions.newest:
            return f"version {version} is unknown, or too long ago"
        self._serving.roll_back(version)
        return None

    # ---- a version begins

    def _ask_begin(self, rank: Rank, ask: m.Begin, now: float) -> None:
        def attempt(at: float) -> m.Answer | None:
            return self._try_begin(rank, ask, now)

        def why() -> str:
            return self._why_not_begun(ask)

        self._request(rank.route, ask.request, now + ask.timeout_s, attempt, why)

    def _try_begin(self, rank: Rank, ask: m.Begin, started: float) -> m.Answer | None:
        books, versions = self._books, self._books.versions
        number, version, is_alone = rank.enlist.rank, ask.version, len(books.ranks.seats) == 1
        if books.ranks.missing():
            return None
        staging = versions.staging()
        if (
            staging is not None
            and staging.version < version
            and number in staging.begun & set(staging.late_ranks())
        ):
            self._abort(staging.version, f"{rank.label} went on to version {version}")
            staging = None
        if staging is not None and staging.version == version and number in staging.late_ranks():
            staging.begun.add(number)
            return m.Answer(books.epoch, ask.request, versions.number_of(staging), staging.generation)
        if version == versions.skipped and not is_alone:
            return m.Answer(books.epoch, ask.request)
        record = versions.record(version)
        if record is not None and record.aborted and not is_alone:
            raise VersionError(f"version {version} was aborted: {record.aborted}")
        if record is None and version <= versions.inherited and not is_alone:
            raise VersionError(
                f"version {version} was lost: the coordinator started again while it was staged"
            )
        if version <= versions.newest or (staging is not None and version <= staging.version):
            newest = max(versions.newest, versions.begun)
            raise UsageError(f"version {version} is not newer than {newest}; versions only grow")
        if staging is not None or self._laggards(ask):
            return None
        slot = self._take_slot(ask.when_full == "evict")
        if slot is None and ask.when_full == "skip":
            versions.skipped = version
            return m.Answer(books.epoch, ask.request)
        if slot is None:
            return None
        self._begin(version, slot, started)
        versions.slots[slot].begun.add(number)
        return m.Answer(books.epoch, ask.request, slot, versions.slots[slot].generation)

    def _laggards(self, ask: m.Begin) -> list[str]:
        """Whom `max_lag` waits for; nobody can be further on than the newest version that there is."""
        newest = self._books.newest_good()
        if ask.max_lag is None or newest is None:
            return []
        return self._books.members.laggards(min(ask.version - ask.max_lag, newest.version))

    def _why_not_begun(self, ask: m.Begin) -> str:
        books, versions = self._books, self._books.versions
        waited = f"version {ask.version} waited {ask.timeout_s:g} s"
        missing, staging = books.ranks.missing(), versions.staging()
        if missing:
            return f"{waited} for {', '.join(missing)} of the publisher"
        if staging is not None:
            late = [f"rank {rank}" for rank in staging.late_ranks()]
            return f"{waited} for version {staging.version}, which {', '.join(late)} has not staged"
        if laggards := self._laggards(ask):
            return f"max_lag={ask.max_lag}: {waited} for {', '.join(laggards)}"
        holders = versions.holders(books.members.labels())
        return (
            f"no slot was free within {ask.timeout_s:g} s; held by {', '.join(holders)}; "
            'raise slots=, or choose when_full="skip" or "evict"'
        )

    def _take_slot(self, may_evict: bool) -> int | None:
        """An empty slot; what was in it is not offered to anybody from here on. `may_evict`: members that only read the
        oldest one restart on the newest version."""
        versions = self._books.versions
        number = versions.free_slot()
        if number is None and may_evict:
            number = versions.evictable()
        if number is not None:
            self._serving.obey(self._books.ballots.withdraw(versions.slots[number].version))
            self._serving.break_leases(versions.slots[number], "evicted: the publisher reused the slot")
            versions.slots[number] = SlotState()
        return number

    def _begin(self, version: int, slot: int, now: float) -> None:
        """Staging of `version` starts; members with a standing pull are told, and hold a lease from here on."""
        books = self._books
        if books.arrangement is None:
            raise UsageError("there is no layout yet")
        books.versions.begin(
            version, slot, books.arrangement.counts(), books.arrangement.edition, books.members.counted(), now
        )
        self._serving.obey(books.ballots.offer(version))
        self._serving.grant_all()

    # ---- it is complete, or fails

    def _sealed(self, rank: Rank, message: m.Sealed, now: float) -> None:
        slot = self._books.versions.slot_of(message.version)
        if slot is None or slot.is_sealed:
            return
        if rank.enlist.rank in slot.begun:
            problem = slot.seal_part(rank.enlist.rank, message.digests)
        else:
            problem = "staged it before the coordinator started again"
        if problem is not None:
            self._abort(slot.version, f"{rank.label} {problem}")
        elif not slot.late_ranks():
            self._books.versions.seal(slot, now)
            self._serving.seal(slot)

    def _extended(self, rank: Rank, message: m.Extended) -> None:
        slot = self._books.versions.slot_of(message.version)
        if slot is not None and slot.is_sealed:
            slot.extending.discard(rank.enlist.rank)
            slot.seal_part(rank.enlist.rank, message.digests)

    def extend_newest(self) -> None:
        """Cells that were added since the newest version was sealed are made out of its own slot, for late joiners."""
        books, arrangement = self._books, self._books.arrangement
        slot = books.versions.slot_of(books.versions.newest)
        if slot is None or arrangement is None or not slot.is_sealed or slot.edition != arrangement.edition:
            return
        for rank, count in zip(books.ranks.present(), arrangement.counts(), strict=False):
            number = rank.enlist.rank
            if slot.cells[number] < count and number not in slot.extending:
                slot.extending.add(number)
                books.send(rank.route, arrangement.extend(
                    books.epoch, number, version=slot.version, slot=books.versions.number_of(slot),
                    generation=slot.generation, first=slot.cells[number],
                ))  # fmt: skip

    def _abort(self, version: int, reason: str) -> None:
        """The version will not exist (staging failed); its slot is empty again."""
        versions = self._books.versions
        slot, record = versions.slot_of(version), versions.record(version)
        if record is not None:
            record.aborted = reason
        if slot is not None:
            self._serving.break_leases(slot, reason)
            slot.version, slot.is_sealed = 0, False
        self._serving.obey(self._books.ballots.withdraw(version))
        self._serving.offer_newest()

    def settle(self) -> None:
        """Do what the messages of this turn made possible."""
        if self._books.must_arrange:
            self._serving.arrange(self._stage_all)
        self.extend_newest()

    # ---- questions that wait

    def _await_members(self, rank: Rank, ask: m.AwaitMembers, now: float) -> None:
        books = self._books

        def attempt(at: float) -> m.Answer | None:
            return m.Answer(books.epoch, ask.request) if len(books.members.joined()) >= ask.count else None

        def why() -> str:
            joined = ", ".join(books.members.joined()) or "none"
            return f"{ask.count} members were wanted within {ask.timeout_s:g} s; joined: {joined}"

        self._request(rank.route, ask.request, now + ask.timeout_s, attempt, why)

    def _await_stage(self, rank: Rank, ask: m.AwaitStage, now: float) -> None:
        books, version, stage = self._books, ask.version, ask.stage

        def attempt(at: float) -> m.Answer | None:
            record = books.versions.record(version)
            if record is None and books.versions.is_older(version):
                raise UsageError(f"version {version} is too old to wait for")
            if record is None:
                raise VersionError(
                    f"version {version}: the coordinator started again since, and does not know what became of it"
                )
            if record.aborted or stage != "staged":  # who has gone since does not unmake what is sealed
                record.raise_if_refused()
            is_there = record.sealed is not None and (stage == "staged" or not record.missing(stage))
            return m.Answer(books.epoch, ask.request) if is_there else None

        def why() -> str:
            record, slot = books.versions.record(version), books.versions.slot_of(version)
            names = record.missing(stage) if record is not None and stage != "staged" else []
            if slot is not None and not slot.is_sealed:
                names = [f"rank {number} of the publisher" for number in slot.late_ranks()]
            return f"version {version} is not {stage} everywhere after {ask.timeout_s:g} s; still missing: {', '.join(names)}"

        self._request(rank.route, ask.request, now + ask.timeout_s, attempt, why)

    def _request(
        self, route: bytes, number: int, deadline: float, attempt: Callable[[float], m.Answer | None],
        why: Callable[[], str],
    ) -> None:  # fmt: skip
        def unless_fenced(at: float) -> m.Answer | None:
            self._books.raise_if_fenced()
            return attempt(at)

        self.requests.add(Request(route, number, deadline, unless_fenced, why))
