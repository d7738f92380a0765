"""The coordinator's state: ranks of the publisher, members, slots, leases and versions. No sockets, no threads: messages
in, messages out.

A slot with leases is never overwritten. A lease is *reading* (ends when the member verified, refused, or died; can be
evicted) or *pinned* (the slot itself serves on that member; ends only when it says so or its process is gone).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from weightsync.config import HEARTBEAT_S, MAX_MEMBERS, MEMBER_TIMEOUT_S
from weightsync.errors import ConfigError, FencedError, LayoutError, ProtocolError, UsageError, VersionError
from weightsync.moves import Int64s
from weightsync.types import FleetStatus, MemberReport, MemberStatus
from weightsync.wire import messages as m
from weightsync.wire.arrangement import Arrangement
from weightsync.wire.ballots import Ballots, Seat, ballot_to_wire
from weightsync.wire.ranks import Rank, Ranks
from weightsync.wire.replicas import Admit, Cancel, Commit, Grant, Order
from weightsync.wire.requests import Request, Requests

_RECORDS = 64
READING = "reading"
PINNED = "pinned"


@dataclass(slots=True)
class Member:
    """A subscriber that said Hello. `target`: its number in the arrangement, once it said what it wants. `seat`: where it
    votes, if it does. `is_counted`: versions wait for it, since it had a plan for this layout; a reconnect keeps that."""

    hello: m.Hello
    label: str
    last_seen: float
    welcomed: bool = False
    target: int | None = None
    plan: m.Plan | None = None
    seat: Seat | None = None
    is_counted: bool = False
    newer_than: int | None = None
    live_version: int | None = None
    state: str = "joining"
    transport: str = ""
    error: str | None = None


@dataclass(slots=True)
class SlotState:
    """One staging slot, on all ranks: `version` 0 is empty. `digests`: of all cells of each rank, None until it has sealed
    its part. `cells`: how many cells of each rank are (or will be) there. `edition`: of the arrangement they are of."""

    version: int = 0
    generation: int = 0
    is_sealed: bool = False
    digests: list[Int64s | None] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    edition: int = -1
    begun: set[int] = field(default_factory=set)
    extending: set[int] = field(default_factory=set)
    leases: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class VersionRecord:
    """What became of one version; `members` holds those that were there when it began, and of those that came `late` the
    ones that it went live on (nobody waits for them)."""

    version: int
    started: float
    members: dict[str, MemberReport]
    sealed: float | None = None
    aborted: str | None = None
    lost: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)

    def raise_if_refused(self) -> None:
        """Raise VersionError if the version was aborted, a member refused it, or every member was lost."""
        if self.aborted:
            raise VersionError(f"version {self.version} was aborted: {self.aborted}")
        errors = [
            f"{name}: {report.error}"
            for name, report in self.members.items()
            if report.error and name not in self.lost
        ]
        if errors:
            raise VersionError(
                f"version {self.version} was refused, the previous one still serves there. {'; '.join(errors)}"
            )
        if self.members and len(self.lost) == len(self.members):
            raise VersionError(
                f"version {self.version}: every member was lost: {', '.join(sorted(self.lost))}"
            )

    def missing(self, stage: str) -> list[str]:
        """Members that have not reached `stage` ("ready" or "live") and still may."""
        return [
            label
            for label, report in self.members.items()
            if label not in self.lost and (report.ready_s if stage == "ready" else report.live_s) is None
        ]

    def reached(self, stage: str) -> float | None:
        """Seconds from publish() until the last member reached `stage`; None if one has not."""
        times = [
            report.ready_s if stage == "ready" else report.live_s
            for label, report in self.members.items()
            if label not in self.lost and label not in self.late
        ]
        return None if not times or None in times else max(t for t in times if t is not None)


class Fleet:
    """Feed it messages and ticks under one lock; call `settle` after each turn; send what `drain()` yields."""

    def __init__(self, *, address: str, publisher: str, epoch: int) -> None:
        self.address = address
        self.publisher = publisher
        self.epoch = epoch
        self.ranks = Ranks()
        self.arrangement: Arrangement | None = None
        self.slots: list[SlotState] = []
        self.members: dict[bytes, Member] = {}
        self.records: deque[VersionRecord] = deque(maxlen=_RECORDS)
        self.newest = 0
        self.fenced_by: str | None = None
        self.refused = 0
        self.requests = Requests(epoch, self._send)
        self.ballots = Ballots(epoch)
        self._begun = 0  # the newest version that any rank began
        self._skipped = 0
        self._generation = 0
        self._must_arrange = False
        self._is_open = False
        self._last_tick = 0.0
        self._out: list[tuple[bytes, m.ToMember]] = []

    # ---- ranks

    def _enlist(self, route: bytes, enlist: m.Enlist, now: float) -> None:
        refusal = self.ranks.refusal(enlist, now)
        if refusal is not None:
            self._send(route, m.Refused(self.epoch, refusal))
            return
        try:
            self.ballots.set_policy(enlist.policy)
        except ConfigError as error:
            self._send(route, m.Refused(self.epoch, str(error)))
            return
        is_new = not self.ranks.knows(enlist)
        pushed_out = self.ranks.seat(route, enlist, now)
        if pushed_out is not None:
            self._send(
                pushed_out.route, m.Refused(self.epoch, f"{pushed_out.label} was replaced by another process")
            )
        self.newest = max(self.newest, enlist.version)
        self._begun = max(self._begun, enlist.version)
        if is_new:
            self._lose_slots(f"rank {enlist.rank} of the publisher started again")
            self.slots = [SlotState() for _ in range(enlist.slots)]
        self._send(route, m.Enlisted(self.epoch, self._begun))
        if not any(seat is None for seat in self.ranks.seats):
            self._settle_layout(route, is_new)

    def _settle_layout(self, route: bytes, is_new: bool) -> None:
        """All ranks are there: say what each stages."""
        enlisted = [rank.enlist for rank in self.ranks.present()]
        layouts, hosts = [enlist.layout for enlist in enlisted], [enlist.host for enlist in enlisted]
        known = self.arrangement
        if known is None or known.layouts != layouts or known.hosts != hosts:
            try:
                self.arrangement = Arrangement(layouts, hosts)
            except (LayoutError, ProtocolError) as error:
                for rank in self.ranks.present():
                    self._send(rank.route, m.NoPlan(self.epoch, str(error)))
                newcomer = self.ranks.find(route)
                if newcomer is not None:
                    self.ranks.remove(newcomer)
                return
            for member in self.members.values():
                member.target, member.plan, member.is_counted = None, None, False
            self._is_open = False
            self._stage_all()
            return
        for rank in self.ranks.present():
            if rank.route == route:
                self._send(route, known.stage(self.epoch, rank.enlist.rank))
        self._is_open = self._is_open and not is_new

    def _offers(self, rank: Rank, offers: dict[str, dict[str, str]]) -> None:
        """A rank's slots are there. With the last one the publisher opens: members that waited are welcomed."""
        if self._is_open and rank.offers == offers:
            return
        rank.offers = offers
        if not self.ranks.missing():
            self._is_open = True
            for route, member in self.members.items():
                self._welcome(route, member)

    def _rank_lost(self, rank: Rank, why: str) -> None:
        """The version being staged is lost, no other; the seat waits for its process, or another one."""
        self.ranks.remove(rank)
        self.requests.forget(rank.route)
        staging = self._staging()
        if staging is not None:
            self._abort(staging.version, f"{rank.label} {why}")

    def _lose_slots(self, reason: str) -> None:
        for slot in self.slots:
            if slot.version and not slot.is_sealed:
                self._abort(slot.version, reason)
            self._break_leases(slot, reason)

    def _stage_all(self) -> None:
        if self.arrangement is not None:
            for rank in self.ranks.present():
                self._send(rank.route, self.arrangement.stage(self.epoch, rank.enlist.rank))

    def _staging(self) -> SlotState | None:
        return next((slot for slot in self.slots if slot.version and not slot.is_sealed), None)

    # ---- versions

    def _ask_begin(self, rank: Rank, ask: m.Begin, now: float) -> None:
        def attempt(at: float) -> m.Answer | None:
            return self._try_begin(rank, ask, now)

        def why() -> str:
            return self._why_not_begun(ask)

        self._request(rank.route, ask.request, now + ask.timeout_s, attempt, why)

    def _try_begin(self, rank: Rank, ask: m.Begin, started: float) -> m.Answer | None:
        number, version = rank.enlist.rank, ask.version
        if self.ranks.missing():
            return None
        staging = self._staging()
        if staging is not None and staging.version == version and number not in staging.begun:
            staging.begun.add(number)
            return m.Answer(self.epoch, ask.request, self.slots.index(staging), staging.generation)
        if version == self._skipped and len(self.ranks.seats) > 1:
            return m.Answer(self.epoch, ask.request)
        record = self.record(version)
        if record is not None and record.aborted and len(self.ranks.seats) > 1:
            raise VersionError(f"version {version} was aborted: {record.aborted}")
        if version <= self.newest or (staging is not None and version <= staging.version):
            raise UsageError(
                f"version {version} is not newer than {max(self.newest, self._begun)}; versions only grow"
            )
        if staging is not None or (ask.max_lag is not None and self.laggards(version - ask.max_lag)):
            return None
        slot = self.take_slot()
        if slot is None and ask.when_full == "evict":
            slot = self.evict()
        if slot is None and ask.when_full == "skip":
            self._skipped = version
            return m.Answer(self.epoch, ask.request)
        if slot is None:
            return None
        self._begin(version, slot, started)
        self.slots[slot].begun.add(number)
        return m.Answer(self.epoch, ask.request, slot, self.slots[slot].generation)

    def _why_not_begun(self, ask: m.Begin) -> str:
        waited = f"version {ask.version} waited {ask.timeout_s:g} s"
        missing, staging = self.ranks.missing(), self._staging()
        if missing:
            return f"{waited} for {', '.join(missing)} of the publisher"
        if staging is not None:
            late = [f"rank {r}" for r, digests in enumerate(staging.digests) if digests is None]
            return f"{waited} for version {staging.version}, which {', '.join(late)} has not staged"
        if ask.max_lag is not None and (laggards := self.laggards(ask.version - ask.max_lag)):
            return f"max_lag={ask.max_lag}: {waited} for {', '.join(laggards)}"
        return (
            f"no slot was free within {ask.timeout_s:g} s; held by {', '.join(self.holders())}; "
            'raise slots=, or choose when_full="skip" or "evict"'
        )

    def _begin(self, version: int, slot: int, now: float) -> None:
        """Staging of `version` starts; members with a standing pull are told, and hold a lease from here on."""
        if self.arrangement is None:
            raise UsageError("there is no layout yet")
        self._generation += 1
        counts = self.arrangement.counts()
        self.slots[slot] = SlotState(
            version, self._generation, False, [None] * len(counts), counts, self.arrangement.edition
        )
        self._begun = version
        reports = {member.label: MemberReport() for member in self.members.values() if member.is_counted}
        self.records.append(VersionRecord(version, now, reports))
        self._obey(self.ballots.offer(version))
        self._grant_all()

    def _sealed(self, rank: Rank, message: m.Sealed, now: float) -> None:
        slot = self._slot_of(message.version)
        if slot is None or slot.is_sealed:
            return
        number = rank.enlist.rank
        digests = np.frombuffer(message.digests[: len(message.digests) // 8 * 8], "<u8").astype(np.int64)
        if len(digests) < slot.cells[number]:
            self._abort(slot.version, f"{rank.label} sealed {len(digests)} cells of {slot.cells[number]}")
            return
        slot.digests[number], slot.cells[number] = digests, len(digests)
        if all(found is not None for found in slot.digests):
            self._seal(slot, now)

    def _seal(self, slot: SlotState, now: float) -> None:
        """The version is complete and immutable."""
        slot.is_sealed, self.newest = True, slot.version
        record = self.record(slot.version)
        if record is not None:
            record.sealed = now
        for route, member in self.members.items():
            if member.hello.instance in slot.leases:
                self._send_seal(route, member, slot)

    def _extended(self, rank: Rank, message: m.Extended) -> None:
        slot = self._slot_of(message.version)
        if slot is None or not slot.is_sealed:
            return
        number = rank.enlist.rank
        slot.extending.discard(number)
        digests = np.frombuffer(message.digests[: len(message.digests) // 8 * 8], "<u8").astype(np.int64)
        if len(digests) > slot.cells[number]:
            slot.digests[number], slot.cells[number] = digests, len(digests)

    def _extend_newest(self) -> None:
        """Cells that were added since the newest version was sealed are made out of its own slot, for late joiners."""
        slot, arrangement = self._slot_of(self.newest), self.arrangement
        if slot is None or arrangement is None or not slot.is_sealed or slot.edition != arrangement.edition:
            return
        for rank, count in zip(self.ranks.present(), arrangement.counts(), strict=False):
            number = rank.enlist.rank
            if slot.cells[number] < count and number not in slot.extending:
                slot.extending.add(number)
                self._send(rank.route, arrangement.extend(
                    self.epoch, number, version=slot.version, slot=self.slots.index(slot), generation=slot.generation,
                    first=slot.cells[number],
                ))  # fmt: skip

    def _abort(self, version: int, reason: str) -> None:
        """The version will not exist (staging failed); its slot is empty again."""
        slot, record = self._slot_of(version), self.record(version)
        if record is not None:
            record.aborted = reason
        if slot is not None:
            self._break_leases(slot, reason)
            slot.version, slot.is_sealed = 0, False
        self._obey(self.ballots.withdraw(version))
        newest = self._newest_good()
        if newest is not None:
            self._obey(self.ballots.offer(newest.version))

    def free_slot(self) -> int | None:
        """A slot that may be overwritten: no leases, not the newest sealed version. Empty ones first, then the oldest.

        The newest goes if nobody reads it and all others serve at members: they do so until there is something newer.
        """
        free = [
            s
            for s, slot in enumerate(self.slots)
            if not slot.leases and (slot.version != self.newest or not slot.version)
        ]
        if not free:
            serving = [s for s, slot in enumerate(self.slots) if PINNED in slot.leases.values()]
            idle = [s for s, slot in enumerate(self.slots) if not slot.leases]
            free = idle if len(serving) + len(idle) == len(self.slots) else []
        return min(free, key=lambda s: self.slots[s].version, default=None)

    def take_slot(self) -> int | None:
        """As `free_slot`; what was in it is not offered to anybody from here on."""
        number = self.free_slot()
        if number is not None:
            self._obey(self.ballots.withdraw(self.slots[number].version))
            self.slots[number] = SlotState()
        return number

    def evict(self) -> int | None:
        """Take the oldest slot that is only being read away from its readers; they restart on the newest version."""
        readable = [
            s
            for s, slot in enumerate(self.slots)
            if slot.version != self.newest and all(kind == READING for kind in slot.leases.values())
        ]
        victim = min(readable, key=lambda s: self.slots[s].version, default=None)
        if victim is not None:
            self._obey(self.ballots.withdraw(self.slots[victim].version))
            self._break_leases(self.slots[victim], "evicted: the publisher reused the slot")
        return victim

    def fence(self, reason: str) -> None:
        """This publisher is over: nobody is served any more."""
        if self.fenced_by is None:
            self.fenced_by = reason
            self.farewell(reason)

    def farewell(self, reason: str) -> None:
        """The coordinator ends: say so to everybody."""
        for route in (*self.members, *(rank.route for rank in self.ranks.present())):
            self._send(route, m.Farewell(self.epoch, reason))

    def _await_members(self, rank: Rank, ask: m.AwaitMembers, now: float) -> None:
        def joined() -> list[str]:
            return [member.label for member in self.members.values() if member.plan is not None]

        def attempt(at: float) -> m.Answer | None:
            return m.Answer(self.epoch, ask.request) if len(joined()) >= ask.count else None

        def why() -> str:
            return f"{ask.count} members were wanted within {ask.timeout_s:g} s; joined: " + (
                ", ".join(joined()) or "none"
            )

        self._request(rank.route, ask.request, now + ask.timeout_s, attempt, why)

    def _await_stage(self, rank: Rank, ask: m.AwaitStage, now: float) -> None:
        version, stage = ask.version, ask.stage

        def attempt(at: float) -> m.Answer | None:
            record = self.record(version)
            if record is None:
                raise UsageError(f"version {version} is too old to wait for, or was never published")
            record.raise_if_refused()
            is_there = record.sealed is not None and (stage == "staged" or not record.missing(stage))
            return m.Answer(self.epoch, ask.request) if is_there else None

        def why() -> str:
            record, slot = self.record(version), self._slot_of(version)
            names = record.missing(stage) if record is not None and stage != "staged" else []
            if slot is not None and not slot.is_sealed:
                names = [f"rank {r} of the publisher" for r, d in enumerate(slot.digests) if d is None]
            return f"version {version} is not {stage} everywhere after {ask.timeout_s:g} s; still missing: {', '.join(names)}"

        self._request(rank.route, ask.request, now + ask.timeout_s, attempt, why)

    def _request(
        self, route: bytes, number: int, deadline: float, attempt: Callable[[float], m.Answer | None],
        why: Callable[[], str],
    ) -> None:  # fmt: skip
        def unless_fenced(at: float) -> m.Answer | None:
            if self.fenced_by is not None:
                raise FencedError(
                    f"{self.address}: this publisher (epoch {self.epoch}) is fenced: {self.fenced_by}"
                )
            return attempt(at)

        self.requests.add(Request(route, number, deadline, unless_fenced, why))

    # ---- from ranks and members

    def receive(self, route: bytes, message: m.FromMember, now: float) -> None:
        """One message of a member, or of a rank of the publisher."""
        match message:
            case m.AskStatus():
                self._send(route, m.Status(self.status(now)))
            case m.AskLayout():
                if self.arrangement is not None and self._is_open:
                    self._send(route, m.Welcome(self.epoch, self.publisher, self.arrangement.catalogue, []))
            case m.Hello():
                self._hello(route, message, now)
            case m.Enlist():
                self._enlist(route, message, now)
            case m.TakeOver():
                pass  # decided by the coordinator, which knows the peer's key
            case _:
                rank, member = self.ranks.find(route), self.members.get(route)
                if (rank is None and member is None) or message.epoch != self.epoch:
                    self._answer_stranger(route, message)
                elif rank is not None:
                    rank.last_seen = now
                    self._from_rank(rank, message, now)
                elif member is not None:
                    member.last_seen = now
                    self._from_member(route, member, message, now)

    def _answer_stranger(self, route: bytes, message: m.Known) -> None:
        if message.epoch > self.epoch:
            self.fence(f"a member follows epoch {message.epoch}, newer than {self.epoch}")
        elif not isinstance(message, m.Bye):
            self._send(route, m.Unknown(self.epoch))

    def _from_rank(self, rank: Rank, message: m.FromMember, now: float) -> None:
        match message:
            case m.Beat():
                self._send(rank.route, m.Pong(self.epoch, self.newest))
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
                self.gone(message.instance)
            case m.AwaitMembers():
                self._await_members(rank, message, now)
            case m.AwaitStage():
                self._await_stage(rank, message, now)
            case m.Promote():
                self._promote(rank, message)
            case m.Rollback():
                self._roll_back(rank, message)
            case m.AskReport():
                self._send(
                    rank.route, m.Answer(self.epoch, message.request, report=self.report(message.version))
                )
            case m.Bye():
                self._rank_lost(rank, "left")

    def _from_member(self, route: bytes, member: Member, message: m.FromMember, now: float) -> None:
        match message:
            case m.Heartbeat():
                member.state, member.transport = message.state, message.transport
                member.live_version = message.live_version
                self._send(route, m.Pong(self.epoch, self.newest))
            case m.Stand():
                if member.seat is not None:
                    self._obey_in(member.seat[0], self.ballots.reported(member.seat, message))
            case m.Wants():
                self._wants(route, member, message)
            case m.Pull():
                member.newer_than = message.newer_than
            case m.Verified():
                self._verified(member, message, now)
            case m.Live():
                self._live(member, message, now)
            case m.Release():
                self._release(member.hello.instance, message.version)
            case m.Failed():
                self._failed(member, message)
            case m.Bye():
                self._remove(route, "left", keep_pinned=False)

    def settle(self, now: float) -> None:
        """Do what the messages of this turn made possible."""
        if self._must_arrange:
            self._arrange()
        self._extend_newest()
        self._obey(self.ballots.decide())
        self._grant_all()
        self.requests.settle(now)

    def next_deadline(self) -> float | None:
        """When somebody's wait ends."""
        return self.requests.next_deadline()

    def refuse(self, route: bytes, reason: str) -> None:
        """Answer bytes that are not a message of ours."""
        self.refused += 1
        self._send(route, m.Refused(self.epoch, reason))

    def gone(self, instance: str) -> None:
        """The process behind `instance` has ended: every lease it held is over."""
        for route, member in list(self.members.items()):
            if member.hello.instance == instance:
                self._remove(route, "its process ended", keep_pinned=False)
        for slot in self.slots:
            slot.leases.pop(instance, None)

    def tick(self, now: float) -> None:
        """Drop members that have been silent too long. A pinned slot stays theirs: the process may only be stopped."""
        stalled = now - self._last_tick - HEARTBEAT_S if self._last_tick else 0.0
        self._last_tick = now
        if stalled > HEARTBEAT_S:  # this process was stopped, so nobody could be heard
            for present in self.ranks.present():
                present.last_seen += stalled
            for member in self.members.values():
                member.last_seen += stalled
        for rank in self.ranks.silent(now):
            self._rank_lost(rank, f"was silent for {now - rank.last_seen:.1f} s")
        for route, member in list(self.members.items()):
            silent = now - member.last_seen
            if silent > MEMBER_TIMEOUT_S:
                self._remove(route, f"silent for {silent:.1f} s", keep_pinned=True)

    # ---- what it knows

    def record(self, version: int) -> VersionRecord | None:
        return next((r for r in reversed(self.records) if r.version == version), None)

    def holders(self) -> list[str]:
        """Who keeps slots from being overwritten, in words."""
        labels = {member.hello.instance: member.label for member in self.members.values()}
        return [
            f"{labels.get(instance, 'a silent member')} ({kind} version {slot.version})"
            for slot in self.slots
            for instance, kind in slot.leases.items()
        ]

    def laggards(self, version: int) -> list[str]:
        """Servers whose live version is below `version`, idle ones too."""
        return [
            f"{member.label} (live {member.live_version})"
            for member in self.members.values()
            if member.is_counted and member.hello.role == "server" and (member.live_version or 0) < version
        ]

    def status(self, now: float) -> FleetStatus:
        rows = [
            MemberStatus(
                name=member.label, host=member.hello.host, pid=member.hello.pid, role=member.hello.role,
                transport=member.transport, swap=member.hello.swap, state=member.state,
                live_version=member.live_version,
                lag=None if member.live_version is None else max(0, self.newest - member.live_version),
                last_seen_s=round(now - member.last_seen, 3), error=member.error,
            )
            for member in self.members.values()
        ]  # fmt: skip
        catalogue = self.arrangement.catalogue if self.arrangement else None
        return FleetStatus(
            self.address, self.epoch, self.publisher, self.newest, len(self.slots),
            catalogue.size_bytes if catalogue else 0, len(catalogue.tensors) if catalogue else 0, rows,
            len(self.ranks.seats), self.ranks.missing(),
        )  # fmt: skip

    def report(self, version: int) -> m.Report | None:
        """What is known of a version."""
        record = self.record(version)
        if record is None:
            return None
        staged = None if record.sealed is None else record.sealed - record.started
        members = {name: msgspec.structs.replace(report) for name, report in record.members.items()}
        return m.Report(staged, record.reached("ready"), record.reached("live"), members)

    def drain(self) -> Iterator[tuple[bytes, m.ToMember]]:
        """Messages to send, oldest first; each is yielded once."""
        out, self._out = self._out, []
        yield from out

    # ---- steps

    def _send(self, route: bytes, message: m.ToMember) -> None:
        self._out.append((route, message))

    def _slot_of(self, version: int) -> SlotState | None:
        return next((slot for slot in self.slots if slot.version == version and version), None)

    def _hello(self, route: bytes, hello: m.Hello, now: float) -> None:
        if hello.last_epoch > self.epoch:
            self.fence(f"{hello.name} follows epoch {hello.last_epoch}, newer than {self.epoch}")
            self._send(route, m.Refused(self.epoch, "this publisher is older than the one you followed"))
            return
        label, is_counted = "", False
        for other, member in list(self.members.items()):
            if member.hello.instance == hello.instance:  # a reconnect: not lost, but no longer reading
                label, is_counted = member.label, member.is_counted
                del self.members[other]  # its seat is taken again with the welcome
                self._end_leases(hello.instance, keep_pinned=True)
            elif other == route:
                self._remove(other, "another member took over its connection", keep_pinned=False)
        if not 0 <= hello.rank < hello.ranks or (hello.ranks > 1 and hello.replica is None):
            self._send(
                route, m.Refused(self.epoch, f"rank {hello.rank} of {hello.ranks} of replica {hello.replica}")
            )
            return
        held = hello.holds if hello.holds and hello.last_epoch == self.epoch else []
        for slot in self.slots:
            if slot.version not in held:
                slot.leases.pop(hello.instance, None)
        if len(self.members) >= MAX_MEMBERS:
            self._send(route, m.Refused(self.epoch, f"{MAX_MEMBERS} members are connected already"))
            return
        if not label:
            labels = {member.label for member in self.members.values()}
            label = hello.name if hello.name not in labels else f"{hello.name}@{hello.pid}"
            label = label if label not in labels else f"{label}.{hello.instance[:6]}"
        member = self.members[route] = Member(hello, label, now, is_counted=is_counted)
        if self._is_open and not self.ranks.missing():  # else with the rank that comes back
            self._welcome(route, member)

    def _welcome(self, route: bytes, member: Member) -> None:
        if self.arrangement is not None:
            member.welcomed, member.state = True, "welcomed"
            member.target, member.plan, member.newer_than = None, None, None
            self._end_leases(member.hello.instance, keep_pinned=True)
            offers = [rank.offers or {} for rank in self.ranks.present()]
            session = self._take_seat(route, member)
            if session is not None:
                self._send(
                    route, m.Welcome(self.epoch, self.publisher, self.arrangement.catalogue, offers, session)
                )

    # ---- replicas

    def _take_seat(self, route: bytes, member: Member) -> int | None:
        """The member's session; 0: it need not vote. None: it was refused."""
        seat = member.seat = self.ballots.seat_of(member.hello, member.label)
        if seat is None:
            return 0
        for other, rival in list(self.members.items()):
            if rival is not member and rival.seat == seat:
                self._remove(other, f"{member.label} took its place in replica {seat[0]}", keep_pinned=True)
        try:
            orders = self.ballots.join(seat, member.hello)
        except ConfigError as error:
            member.seat, member.state, member.error = None, "refused", str(error)
            self._send(route, m.Refused(self.epoch, str(error)))
            return None
        admitted = [order for order in orders if isinstance(order, Admit) and order.rank == seat[1]]
        self._obey_in(seat[0], [order for order in orders if order not in admitted])
        return admitted[-1].session

    def _obey(self, orders: list[tuple[str, Order]]) -> None:
        for name, order in orders:
            self._obey_in(name, [order])

    def _obey_in(self, name: str, orders: list[Order]) -> None:
        """Send what a replica's state asks for."""
        routes = {
            member.seat: (route, member) for route, member in self.members.items() if member.seat is not None
        }
        for order in orders:
            found = routes.get((name, order.rank))
            if found is None:
                continue
            route, member = found
            match order:
                case Admit():
                    self._send(route, m.Admit(self.epoch, order.session))
                case Grant() if order.is_held:
                    self._send(route, m.Grant(self.epoch, order.session, ballot_to_wire(order.ballot)))
                case Grant():
                    self._grant_ballot(route, member, order)
                case Commit():
                    self._send(route, m.Commit(self.epoch, order.session, ballot_to_wire(order.ballot)))
                case Cancel():
                    self._send(route, m.Cancel(self.epoch, order.session, ballot_to_wire(order.ballot)))

    def _grant_ballot(self, route: bytes, member: Member, order: Grant) -> None:
        """Let a rank read what it may vote for; if that is not possible yet, its next standing asks again."""
        number, epoch, version = ballot_to_wire(order.ballot)
        slot = self._slot_of(version)
        if (
            epoch == self.epoch
            and slot is not None
            and self._covers(slot, member)
            and not self.ranks.missing()
        ):
            self._grant(route, member, slot, number)

    def _promote(self, rank: Rank, ask: m.Promote) -> None:
        known = [slot.version for slot in self.slots if slot.version]
        self._answer_now(rank, ask.request, self.ballots.promote(ask.version, known))

    def _roll_back(self, rank: Rank, ask: m.Rollback) -> None:
        if self.record(ask.version) is None:
            self._answer_now(rank, ask.request, f"version {ask.version} is unknown, or too long ago")
            return
        self._obey(self.ballots.rollback(ask.version))
        newest = self._newest_good()
        if newest is not None:
            self._obey(self.ballots.offer(newest.version))
        for route, member in self.members.items():
            if member.seat is None:
                self._send(route, m.Undo(self.epoch, ask.version))
        self._answer_now(rank, ask.request, None)

    def _answer_now(self, rank: Rank, request: int, problem: str | None) -> None:
        error = None if problem is None else ("UsageError", problem)
        self._send(rank.route, m.Answer(self.epoch, request, error=error))

    def _newest_good(self) -> SlotState | None:
        """The slot of the newest version that was not rolled back."""
        good = [slot for slot in self.slots if slot.version and not self.ballots.is_bad(slot.version)]
        return max(good, key=lambda slot: slot.version, default=None)

    # ---- what members want

    def _wants(self, route: bytes, member: Member, message: m.Wants) -> None:
        if self.arrangement is None or not member.welcomed:
            return
        try:
            member.target = self.arrangement.want(message.boxes, member.hello.host)
        except ProtocolError as error:
            self.refuse(route, str(error))
            return
        member.plan = None
        self._must_arrange = True

    def _arrange(self) -> None:
        """Make cells for what new members want, and tell whom it concerns."""
        arrangement = self.arrangement
        self._must_arrange = False
        if arrangement is None:
            return
        is_mapped = any(member.plan and member.hello.holds is not None for member in self.members.values())
        if arrangement.arrange(keep=is_mapped or any(slot.version for slot in self.slots)):
            self._stage_all()
        for route, member in self.members.items():
            if member.target is None:
                continue
            refusal = arrangement.refusal(member.target)
            if refusal is not None:
                member.target, member.state, member.error = None, "refused", refusal
                member.is_counted = False
                self._send(route, m.NoPlan(self.epoch, refusal))
            elif (plan := arrangement.plan(self.epoch, member.target)) != member.plan:
                member.plan, member.is_counted = plan, True
                self._send(route, plan)

    def _grant_all(self) -> None:
        """Give every member with a standing pull the newest version that is newer."""
        if not any(member.newer_than is not None for member in self.members.values()):
            return
        newest = self._newest_good()
        if newest is None or self.ranks.missing():
            return
        for route, member in self.members.items():
            if (
                member.newer_than is not None
                and member.seat is None
                and newest.version > member.newer_than
                and self._covers(newest, member)
            ):
                self._grant(route, member, newest)

    def _covers(self, slot: SlotState, member: Member) -> bool:
        arrangement = self.arrangement
        if (
            arrangement is None
            or member.plan is None
            or member.target is None
            or slot.edition != arrangement.edition
        ):
            return False
        needs = arrangement.needs(member.target)
        return all(need <= there for need, there in zip(needs, slot.cells, strict=True))

    def _grant(self, route: bytes, member: Member, slot: SlotState, ballot: int = 0) -> None:
        member.newer_than = None
        kind = (
            READING if member.hello.holds is None else PINNED
        )  # what may go live there is not taken away any more
        slot.leases.setdefault(member.hello.instance, kind)
        number = self.slots.index(slot)
        self._send(route, m.Announce(self.epoch, slot.version, number, slot.generation, ballot))
        if slot.is_sealed:
            self._send_seal(route, member, slot)

    def _send_seal(self, route: bytes, member: Member, slot: SlotState) -> None:
        if self.arrangement is not None and member.target is not None:
            found = [digests for digests in slot.digests if digests is not None]
            digests = self.arrangement.digests(member.target, found)
            self._send(route, m.Seal(self.epoch, slot.version, digests))

    def _verified(self, member: Member, message: m.Verified, now: float) -> None:
        slot = self._slot_of(message.version)
        if slot is not None and member.hello.instance in slot.leases:
            if message.holds_lease:
                slot.leases[member.hello.instance] = PINNED
            else:
                del slot.leases[member.hello.instance]
        member.error = None
        for record in self.records:
            report = record.members.get(member.label)
            if report is not None and record.version <= message.version and report.ready_s is None:
                report.transport, report.ready_s, report.error = message.transport, now - record.started, None
                if record.version == message.version:
                    report.read_s = message.read_s

    def _live(self, member: Member, message: m.Live, now: float) -> None:
        member.live_version = message.version
        for record in self.records:
            if record.version == message.version and member.label not in record.members:
                record.late.add(member.label)
                record.members[member.label] = MemberReport(member.transport)
            report = record.members.get(member.label)
            if report is not None and record.version <= message.version and report.live_s is None:
                report.live_s, report.error = now - record.started, None
                report.ready_s = report.live_s if report.ready_s is None else report.ready_s
                if record.version == message.version:
                    report.swap_pause_s = message.pause_s

    def _release(self, instance: str, version: int) -> None:
        slot = self._slot_of(version)
        if slot is not None:
            slot.leases.pop(instance, None)

    def _failed(self, member: Member, message: m.Failed) -> None:
        self._release(member.hello.instance, message.version)
        member.error = message.error
        record = self.record(message.version)
        if record is not None and member.label in record.members:
            record.members[member.label].error = message.error

    def _break_leases(self, slot: SlotState, reason: str) -> None:
        for route, member in self.members.items():
            if slot.leases.pop(member.hello.instance, None) is not None:
                self._send(route, m.Abort(self.epoch, slot.version, reason))
        slot.leases.clear()

    def _remove(self, route: bytes, why: str, *, keep_pinned: bool) -> None:
        member = self.members.pop(route)
        self._end_leases(member.hello.instance, keep_pinned=keep_pinned)
        if member.seat is not None:
            name = member.seat[0]
            is_empty = not any(other.seat and other.seat[0] == name for other in self.members.values())
            self._obey_in(name, self.ballots.leave(member.seat, is_empty))
        for record in self.records:
            report = record.members.get(member.label)
            if report is not None and report.live_s is None:
                record.lost.add(member.label)
                report.error = report.error or why

    def _end_leases(self, instance: str, *, keep_pinned: bool) -> None:
        for slot in self.slots:
            if not keep_pinned or slot.leases.get(instance) == READING:
                slot.leases.pop(instance, None)
