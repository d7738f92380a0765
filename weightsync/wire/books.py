"""What the coordinator knows, shared by the two sides that act on it, and the messages that wait to be sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from weightsync.errors import FencedError
from weightsync.wire import messages as m
from weightsync.wire.arrangement import Arrangement
from weightsync.wire.ballots import Ballots
from weightsync.wire.members import Members
from weightsync.wire.ranks import Ranks
from weightsync.wire.versions import SlotState, Versions

UNSETTLED = 1
"""The epoch of a coordinator that waits for ranks to tell it theirs; lower than any other."""


RunAside = Callable[[int, Callable[[], bool], Callable[[bool], None]], None]
"""(size, work, done): work that takes longer the larger `size`, then what to do with its result, under the owner's lock."""


class Books:
    """`is_open`: all ranks have said where their slots are, so members may be welcomed. `must_arrange`: a member wants what
    was not planned yet; `is_planning`: something is, by `run_aside`. `refused`: messages that could not be. `is_external`:
    the coordinator is not a part of a publisher, so the epoch is that of the ranks that come; `new_epoch` is for those that
    have none. `epochs`: those by whose version numbers the slots go.
    """

    def __init__(self, *, address: str, publisher: str, epoch: int, is_external: bool = False) -> None:
        self.address, self.publisher, self.is_external = address, publisher, is_external
        self.epoch, self.new_epoch = UNSETTLED if is_external else epoch, epoch
        self.epochs = {self.epoch}
        self.ranks = Ranks()
        self.members = Members()
        self.versions = Versions()
        self.ballots = Ballots(self.epoch)
        self.arrangement: Arrangement | None = None
        self.is_open = False
        self.must_arrange = self.is_planning = False
        self.run_aside: RunAside = lambda size, work, done: done(work())
        self.fenced_by: str | None = None
        self.refused = 0
        self._out: list[tuple[bytes, m.ToMember]] = []

    def send(self, route: bytes, message: m.ToMember) -> None:
        self._out.append((route, message))

    def refuse(self, route: bytes, reason: str) -> None:
        """Answer bytes that are not a message of ours, or one that makes no sense."""
        self.refused += 1
        self.send(route, m.Refused(self.epoch, reason))

    def drain(self) -> Iterator[tuple[bytes, m.ToMember]]:
        """Messages to send, oldest first; each is yielded once."""
        out, self._out = self._out, []
        yield from out

    def newest_good(self) -> SlotState | None:
        """The slot of the newest version that was not rolled back."""
        good = [
            slot for slot in self.versions.slots if slot.version and not self.ballots.is_bad(slot.version)
        ]
        return max(good, key=lambda slot: slot.version, default=None)

    def follow(self, epoch: int) -> None:
        """Go on in this newer epoch; version numbers do not start again."""
        self.epoch = epoch
        self.epochs.add(epoch)
        self.ballots.follow(epoch)
        for rank in self.ranks.present():
            self.send(rank.route, m.Enlisted(epoch, self.versions.begun))

    def fence(self, reason: str) -> None:
        """This publisher is over: nobody is served any more."""
        if self.fenced_by is None:
            self.fenced_by = reason
            self.farewell(reason)

    def farewell(self, reason: str) -> None:
        """The coordinator ends: say so to everybody."""
        for route in (*self.members, *(rank.route for rank in self.ranks.present())):
            self.send(route, m.Farewell(self.epoch, reason))

    def raise_if_fenced(self) -> None:
        if self.fenced_by is not None:
            raise FencedError(
                f"{self.address}: this publisher (epoch {self.epoch}) is fenced: {self.fenced_by}"
            )
