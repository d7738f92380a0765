"""The coordinator's side towards members: who they are, what they want, what they may read, where they vote."""

from __future__ import annotations

from collections.abc import Callable

from weightsync.config import MAX_MEMBERS
from weightsync.errors import ConfigError, ProtocolError
from weightsync.wire import messages as m
from weightsync.wire.arrangement import Arrangement
from weightsync.wire.ballots import ballot_to_wire
from weightsync.wire.books import Books
from weightsync.wire.layout import Boxes
from weightsync.wire.members import Member
from weightsync.wire.relay import Relay
from weightsync.wire.replicas import Admit, Cancel, Commit, Grant, Order
from weightsync.wire.versions import SlotState


class Serving:
    """Acts on the books; what it has to say is sent through them."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.relay = Relay()

    # ---- coming and going

    def hello(self, route: bytes, hello: m.Hello, now: float) -> None:
        """A member presents itself, for the first time or again."""
        books = self._books
        if books.fenced_by is not None:
            self._refuse(route, "this publisher is older than the one you followed")
            return
        label, live, seat, is_counted = "", None, None, False
        since = now if hello.last_epoch == books.epoch else 0.0
        for other, member in list(books.members.items()):
            if member.instance == hello.instance:  # a reconnect: not lost, but no longer reading
                label, live, seat, is_counted = (
                    member.label,
                    member.live_version,
                    member.seat,
                    member.is_counted,
                )
                since = since if member.welcomed else member.since
                del books.members[other]  # its seat is taken again with the welcome
                books.versions.end_leases(hello.instance, keep_pinned=True)
                self._retire(member)
            elif other == route:
                self.remove(other, "another member took over its connection", keep_pinned=False)
        if not 0 <= hello.rank < hello.ranks or (hello.ranks > 1 and hello.replica is None):
            self._refuse(route, f"rank {hello.rank} of {hello.ranks} of replica {hello.replica}")
            return
        self.keep_only_held(hello)
        if len(books.members) >= MAX_MEMBERS:
            self._refuse(route, f"{MAX_MEMBERS} members are connected already")
            return
        label = label or books.members.new_label(hello)
        books.members[route] = Member(
            hello, label, now, since, seat=seat, is_counted=is_counted, live_version=live
        )

    def keep_only_held(self, hello: m.Hello) -> None:
        """The leases of a member that has said what it holds are those and no others."""
        held = hello.holds if hello.holds and hello.last_epoch in self._books.epochs else []
        self._books.versions.keep_only(hello.instance, held)

    def welcome_waiting(self) -> None:
        """Those who came, or came back, since."""
        books = self._books
        if not books.is_open or books.ranks.missing():
            return
        heard = min(rank.last_seen for rank in books.ranks.present())
        for route, member in list(books.members.items()):
            if not member.welcomed and member.since <= heard:
                self._welcome(route, member)

    def welcome_all(self) -> None:
        """The publisher's ranks are all there, perhaps others than before."""
        for route, member in list(self._books.members.items()):
            self._welcome(route, member)

    def _welcome(self, route: bytes, member: Member) -> None:
        books = self._books
        if books.arrangement is None:
            return
        member.welcomed, member.state = True, "welcomed"
        member.target, member.plan, member.newer_than = None, None, None
        self._retire(member)
        member.introduced = set()
        hosts = {rank.enlist.host for rank in books.ranks.present()}
        member.may_serve = self.relay.may_serve(member, hosts)
        books.versions.end_leases(member.instance, keep_pinned=True)
        offers = [rank.offers or {} for rank in books.ranks.present()]
        session = self._take_seat(route, member)
        if session is None:
            return
        books.send(route, m.Welcome(
            books.epoch, books.publisher, books.arrangement.catalogue, offers, session, member.may_serve
        ))  # fmt: skip
        for version in books.ballots.bad if member.seat is None else ():
            books.send(route, m.Undo(books.epoch, version))  # it may have been away

    def remove(self, route: bytes, why: str, *, keep_pinned: bool) -> None:
        """A member is gone. `keep_pinned`: its process may only be stopped, and still serve from our slots."""
        books = self._books
        member = books.members.pop(route)
        self._retire(member)
        books.versions.end_leases(member.instance, keep_pinned=keep_pinned)
        if member.seat is not None:
            name = member.seat[0]
            is_empty = not any(other.seat and other.seat[0] == name for other in books.members.values())
            self._obey_in(name, books.ballots.leave(member.seat, is_empty))
        books.versions.lost(member.label, why)

    def gone(self, instance: str) -> None:
        """The process behind `instance` has ended: every lease it held is over."""
        for route, member in list(self._books.members.items()):
            if member.instance == instance:
                self.remove(route, "its process ended", keep_pinned=False)
        self._books.versions.end_leases(instance, keep_pinned=False)

    # ---- what members say

    def receive(self, route: bytes, member: Member, message: m.FromMember, now: float) -> None:
        """One message of a member that said Hello."""
        books = self._books
        match message:
            case m.Heartbeat():
                member.state, member.transport = message.state, message.transport
                member.live_version = message.live_version
                books.send(route, m.Pong(books.epoch, books.versions.newest))
            case m.Stand():
                if member.seat is not None:
                    self._obey_in(member.seat[0], books.ballots.reported(member.seat, message))
            case m.Wants():
                self._wants(route, member, message)
            case m.Pull():
                member.newer_than = message.newer_than
            case m.Serve():
                self._serve(route, member, message)
            case m.Fetched():
                self.relay.fetched(self._wanted(member), member, message, now)
            case m.Unfetched():
                self.relay.unfetched(self._wanted(member), member, message)
            case m.Verified():
                self._verified(route, member, message, now)
            case m.Live():
                member.live_version = message.version
                books.versions.live(member.label, member.transport, message, now)
            case m.Release():
                self._let_go(member, message.version)
            case m.Failed():
                self._let_go(member, message.version)
                books.versions.failed(member.label, message)
                member.error = message.error
            case m.Bye():
                self.remove(route, "left", keep_pinned=False)

    def _let_go(self, member: Member, version: int) -> None:
        self._books.versions.release(member.instance, version)
        self.relay.stop(member, version)

    def _verified(self, route: bytes, member: Member, message: m.Verified, now: float) -> None:
        arrangement = self._books.arrangement
        if arrangement is not None and member.target is not None:
            boxes, sizes = arrangement.boxes(member.target), arrangement.want_bytes(member.target)
            self.relay.verified(boxes, sizes, member, route, message, self._company(member))
        if message.holds_lease:
            self._books.versions.keep_lease(member.instance, message.version)
        else:
            self._books.versions.release(member.instance, message.version)
        member.error = None
        self._books.versions.verified(member.label, message, now)

    def _wants(self, route: bytes, member: Member, message: m.Wants) -> None:
        books = self._books
        if books.arrangement is None or not member.welcomed:
            return
        try:
            member.target = books.arrangement.want(message.boxes, member.hello.host)
        except ProtocolError as error:
            books.refuse(route, str(error))
            return
        member.plan = None
        books.must_arrange = True

    def arrange(self, on_change: Callable[[], None]) -> None:
        """Make cells for what new members want, and tell them; `on_change`: what the ranks stage is another thing now. Large
        ones are planned aside, while versions go on; a plan that the fleet has run away from is made again."""
        books = self._books
        before = books.arrangement
        if books.is_planning:
            return
        books.must_arrange = False
        if before is None:
            return
        keep, planned = self._are_cells_in_use(), before.clone()

        def done(has_changed: bool) -> None:
            books.is_planning = False
            if books.arrangement is not before or (not keep and self._are_cells_in_use()):
                books.must_arrange = True
                return
            planned.take_targets(before)
            books.arrangement = planned
            self._tell_plans(planned)
            if has_changed:
                on_change()

        books.is_planning = True
        books.run_aside(planned.size, lambda: planned.arrange(keep=keep), done)

    def _are_cells_in_use(self) -> bool:
        members = self._books.members.values()
        is_mapped = any(member.plan and member.hello.holds is not None for member in members)
        return is_mapped or bool(self._books.versions.held())

    def _tell_plans(self, arrangement: Arrangement) -> None:
        books = self._books
        for route, member in books.members.items():
            if member.target is None:
                continue
            refusal = arrangement.refusal(member.target)
            if refusal is not None:
                member.target, member.state, member.error = None, "refused", refusal
                member.is_counted = False
                books.send(route, m.NoPlan(books.epoch, refusal))
            elif arrangement.reads(member.target) is None:
                books.must_arrange = True  # came while this was planned
            elif (plan := arrangement.plan(books.epoch, member.target)) != member.plan:
                member.plan, member.is_counted = plan, True
                books.send(route, plan)

    def forget_plans(self) -> None:
        """The layout is another one: everybody is planned anew."""
        for member in self._books.members.values():
            member.target, member.plan, member.is_counted = None, None, False

    # ---- what they read from each other

    def _serve(self, route: bytes, member: Member, message: m.Serve) -> None:
        wants = self._wanted(member)
        if (
            member.may_serve
            and member.serves is None
            and wants is not None
            and len(message.offsets) == 2 * len(wants.tensor)
        ):
            self.relay.serve(member, message)

    def _retire(self, member: Member) -> None:
        """The member takes no part any more, until it serves anew: those that read from it can let go of it."""
        self.relay.leave(member.instance)
        if member.serves is None:
            return
        member.serves = None
        for route, other in self._books.members.items():
            if member.number in other.introduced:
                other.introduced.discard(member.number)
                self._books.send(route, m.PeerGone(self._books.epoch, member.number))

    def _wanted(self, member: Member) -> Boxes | None:
        arrangement = self._books.arrangement
        return None if arrangement is None or member.target is None else arrangement.boxes(member.target)

    def _company(self, member: Member) -> int:
        """How many other members want the same, and serve it."""
        wants = self._wanted(member)
        return sum(
            other is not member and other.serves is not None and self._wanted(other) == wants
            for other in self._books.members.values()
        )

    def pair_up(self, now: float) -> None:
        """Tell members what to read from whom."""
        self.relay.keep(set(self._books.versions.held()))
        for route, message in self.relay.decide(self._books.epoch, now):
            self._books.send(route, message)

    # ---- what they may read

    def grant_all(self) -> None:
        """Give every member with a standing pull the newest version that is newer."""
        books = self._books
        if not any(member.newer_than is not None for member in books.members.values()):
            return
        newest = books.newest_good()
        if newest is None or books.ranks.missing():
            return
        for route, member in books.members.items():
            if (
                member.newer_than is not None
                and member.seat is None
                and newest.version > member.newer_than
                and self._covers(newest, member)
            ):
                self._grant(route, member, newest)

    def _covers(self, slot: SlotState, member: Member) -> bool:
        arrangement = self._books.arrangement
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
        books = self._books
        member.newer_than = None
        is_again = member.instance in slot.leases  # its standing and the announce before crossed
        # what may go live there is not taken away any more
        slot.leases.setdefault(member.instance, "reading" if member.hello.holds is None else "pinned")
        number = books.versions.number_of(slot)
        in_shares = (
            self.relay.is_reading(slot.version, self._wanted(member), member)
            if is_again
            else self._enroll(route, member, slot)
        )
        books.send(route, m.Announce(books.epoch, slot.version, number, slot.generation, ballot, in_shares))
        if slot.is_sealed:
            self._send_seal(route, member, slot)

    def _enroll(self, route: bytes, member: Member, slot: SlotState) -> bool:
        arrangement = self._books.arrangement
        if not member.may_serve or arrangement is None or member.target is None:
            return False
        boxes, sizes = arrangement.boxes(member.target), arrangement.want_bytes(member.target)
        return self.relay.enroll(slot.version, boxes, sizes, member, route, self._company(member))

    def seal(self, slot: SlotState) -> None:
        """The version is complete: those who read it get its digests."""
        for route, member in self._books.members.items():
            if member.instance in slot.leases:
                self._send_seal(route, member, slot)

    def _send_seal(self, route: bytes, member: Member, slot: SlotState) -> None:
        books = self._books
        if books.arrangement is not None and member.target is not None:
            found = [digests for digests in slot.digests if digests is not None]
            digests = books.arrangement.digests(member.target, found)
            books.send(route, m.Seal(books.epoch, slot.version, digests))

    def break_leases(self, slot: SlotState, reason: str) -> None:
        """Nobody may read the slot any more."""
        for route, member in self._books.members.items():
            if slot.leases.pop(member.instance, None) is not None:
                self._books.send(route, m.Abort(self._books.epoch, slot.version, reason))
        slot.leases.clear()

    # ---- replicas

    def offer_newest(self) -> None:
        """Replicas may read the newest good version, if there is one."""
        newest = self._books.newest_good()
        if newest is not None:
            self.obey(self._books.ballots.offer(newest.version))

    def roll_back(self, version: int) -> None:
        """The version is bad, everywhere and for good."""
        self.obey(self._books.ballots.rollback(version))
        self.offer_newest()
        slot = self._books.versions.slot_of(version)
        for route, member in self._books.members.items():
            if member.seat is not None:
                continue
            self._books.send(route, m.Undo(self._books.epoch, version))
            if slot is not None and slot.leases.get(member.instance) == "reading":
                del slot.leases[member.instance]
                self._books.send(route, m.Abort(self._books.epoch, version, "rolled back"))

    def obey(self, orders: list[tuple[str, Order]]) -> None:
        """Send what the replicas' states ask for."""
        for name, order in orders:
            self._obey_in(name, [order])

    def _take_seat(self, route: bytes, member: Member) -> int | None:
        """The member's session; 0: it need not vote. None: it was refused."""
        books = self._books
        seat = member.seat = books.ballots.seat_of(member.hello, member.label)
        if seat is None:
            return 0
        try:
            orders = books.ballots.join(seat, member.hello)
        except ConfigError as error:
            member.seat, member.state, member.error = None, "refused", str(error)
            self._refuse(route, str(error))
            return None
        for other, rival in list(books.members.items()):
            if rival is not member and rival.seat == seat:
                rival.seat = None
                self.remove(other, f"{member.label} took its place in replica {seat[0]}", keep_pinned=True)
        admitted = [order for order in orders if isinstance(order, Admit) and order.rank == seat[1]]
        self._obey_in(seat[0], [order for order in orders if order not in admitted])
        return admitted[-1].session

    def _obey_in(self, name: str, orders: list[Order]) -> None:
        books = self._books
        routes = {
            member.seat: (route, member) for route, member in books.members.items() if member.seat is not None
        }
        for order in orders:
            found = routes.get((name, order.rank))
            if found is None:
                continue
            route, member = found
            match order:
                case Admit():
                    books.send(route, m.Admit(books.epoch, order.session))
                case Grant() if order.is_held:
                    books.send(route, m.Grant(books.epoch, order.session, ballot_to_wire(order.ballot)))
                case Grant():
                    self._grant_ballot(route, member, order)
                case Commit():
                    books.send(route, m.Commit(books.epoch, order.session, ballot_to_wire(order.ballot)))
                case Cancel():
                    books.send(route, m.Cancel(books.epoch, order.session, ballot_to_wire(order.ballot)))

    def _grant_ballot(self, route: bytes, member: Member, order: Grant) -> None:
        """Let a rank read what it may vote for; if that is not possible yet, its next standing asks again."""
        books = self._books
        number, epoch, version = ballot_to_wire(order.ballot)
        slot = books.versions.slot_of(version)
        if (
            epoch == books.epoch
            and slot is not None
            and self._covers(slot, member)
            and not books.ranks.missing()
        ):
            self._grant(route, member, slot, number)

    def _refuse(self, route: bytes, reason: str) -> None:
        self._books.send(route, m.Refused(self._books.epoch, reason))
