"""The coordinator's state machine: ranks of the publisher on one side, members on the other. No sockets, no threads:
messages in, messages out."""

from __future__ import annotations

from collections.abc import Iterator

from weightsync.config import HEARTBEAT_S, MEMBER_TIMEOUT_S
from weightsync.types import FleetStatus
from weightsync.wire import messages as m
from weightsync.wire.books import UNSETTLED, Books
from weightsync.wire.publishing import Publishing
from weightsync.wire.ranks import Ranks
from weightsync.wire.serving import Serving


class Fleet:
    """Feed it messages and ticks under one lock; call `settle` after each turn; send what `drain()` yields."""

    def __init__(self, *, address: str, publisher: str, epoch: int, is_external: bool = False) -> None:
        self.books = Books(address=address, publisher=publisher, epoch=epoch, is_external=is_external)
        self._serving = Serving(self.books)
        self._publishing = Publishing(self.books, self._serving)
        self._last_tick = 0.0

    @property
    def address(self) -> str:
        return self.books.address

    @property
    def epoch(self) -> int:
        return self.books.epoch

    @property
    def ranks(self) -> Ranks:
        return self.books.ranks

    @property
    def fenced_by(self) -> str | None:
        """Why this publisher is over."""
        return self.books.fenced_by

    # ---- messages

    def receive(self, route: bytes, message: m.FromMember, now: float) -> None:
        """One message of a member, or of a rank of the publisher."""
        books = self.books
        match message:
            case m.AskStatus():
                books.send(route, m.Status(self.status(now)))
            case m.AskLayout():
                if books.arrangement is not None and books.is_open:
                    books.send(
                        route, m.Welcome(books.epoch, books.publisher, books.arrangement.catalogue, [])
                    )
            case m.Hello():
                self._hear_of(message.last_epoch, message.name)
                self._serving.hello(route, message, now)
            case m.Enlist():
                if not books.is_external:
                    self._hear_of(message.last_epoch, f"rank {message.rank}")
                self._publishing.enlist(route, message, now)
            case m.Promote() | m.Rollback() if message.epoch == books.epoch:
                self._publishing.obey(
                    route, message
                )  # a rank's or an operator's: the coordinator has checked the key
            case m.TakeOver():
                pass  # decided by the coordinator, which knows the peer's key
            case _:
                rank, member = books.ranks.find(route), books.members.get(route)
                if (rank is None and member is None) or message.epoch != books.epoch:
                    self._answer_stranger(route, message)
                elif rank is not None:
                    rank.last_seen = now
                    self._publishing.receive(rank, message, now)
                elif member is not None:
                    member.last_seen = now
                    self._serving.receive(route, member, message, now)

    def _answer_stranger(self, route: bytes, message: m.Known) -> None:
        if not self.books.is_external:
            self._hear_of(message.epoch, "a member")
        if not isinstance(message, m.Bye):
            self.books.send(route, m.Unknown(self.books.epoch))

    def _hear_of(self, epoch: int, who: str) -> None:
        """Somebody follows this epoch. If it is newer, a publisher's own coordinator has been replaced; one of its own
        process leads everybody on."""
        books = self.books
        if epoch <= books.epoch:
            return
        if not books.is_external:
            books.fence(f"{who} follows epoch {epoch}, newer than {books.epoch}")
        elif books.epoch == UNSETTLED:
            books.new_epoch = max(books.new_epoch, epoch + 1)
        else:
            self._publishing.follow(epoch + 1)

    def refuse(self, route: bytes, reason: str) -> None:
        """Answer bytes that are not a message of ours."""
        self.books.refuse(route, reason)

    def fence(self, reason: str) -> None:
        """This publisher is over: nobody is served any more."""
        self.books.fence(reason)

    def farewell(self, reason: str) -> None:
        """The coordinator ends: say so to everybody."""
        self.books.farewell(reason)

    def drain(self) -> Iterator[tuple[bytes, m.ToMember]]:
        """Messages to send, oldest first; each is yielded once."""
        return self.books.drain()

    # ---- time

    def settle(self, now: float) -> None:
        """Do what the messages of this turn made possible."""
        self._serving.welcome_waiting()
        self._publishing.settle()
        self._serving.obey(self.books.ballots.decide())
        self._serving.grant_all()
        self._publishing.requests.settle(now)
        self._serving.pair_up(now)

    def next_deadline(self) -> float | None:
        """When somebody's wait ends."""
        return self._publishing.requests.next_deadline()

    def tick(self, now: float) -> None:
        """Drop members that have been silent too long. A pinned slot stays theirs: the process may only be stopped."""
        stalled = now - self._last_tick - HEARTBEAT_S if self._last_tick else 0.0
        self._last_tick = now
        if stalled > HEARTBEAT_S:  # this process was stopped, so nobody could be heard
            for present in self.books.ranks.present():
                present.last_seen += stalled
            for member in self.books.members.values():
                member.last_seen += stalled
        for rank in self.books.ranks.silent(now):
            self._publishing.lost(rank, f"was silent for {now - rank.last_seen:.1f} s")
        for route, member in list(self.books.members.items()):
            silent = now - member.last_seen
            if silent > MEMBER_TIMEOUT_S:
                self._serving.remove(route, f"silent for {silent:.1f} s", keep_pinned=True)

    # ---- what it knows

    def status(self, now: float) -> FleetStatus:
        books = self.books
        catalogue = books.arrangement.catalogue if books.arrangement else None
        newest = books.versions.newest
        return FleetStatus(
            books.address, books.epoch, books.publisher, newest, len(books.versions.slots),
            catalogue.size_bytes if catalogue else 0, len(catalogue.tensors) if catalogue else 0,
            [member.status(newest, now) for member in books.members.values()],
            len(books.ranks.seats), books.ranks.missing(),
        )  # fmt: skip

    def report(self, version: int) -> m.Report | None:
        """What is known of a version."""
        return self.books.versions.report(version)
