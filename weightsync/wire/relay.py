"""Members that want the same read from each other: who reads which share of a version from whom. Decisions only.

The wanted boxes are cut into shares. Each share leaves the publisher once; whoever has verified it serves it to the others
(a broadcast by scatter and exchange). A member reads a few shares at once: fresh ones from the publisher, the rarest first
from the nearest peers. What a peer can't give, or takes too long, is asked of another, at last of the publisher, whose slot
stays leased until the member holds all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from weightsync.errors import ConfigError
from weightsync.moves import Int64s
from weightsync.wire import messages as m
from weightsync.wire.layout import Boxes
from weightsync.wire.members import Member

MODES = ("auto", "always", "never")
_SHARES_EACH, _MAX_SHARES, _MIN_SHARE_BYTES = 4, 256, 1 << 20
_ASKS_OF_PEERS, _ASKS_OF_PUBLISHER, _MOST_SERVED = 3, 2, 4
_NOBODY, _PUBLISHER = -1, -2
_PATIENCE_S, _LEAST_PATIENCE_S, _TIMES_LONGEST = 5.0, 1.0, 4.0
"""A share that another member is fetching counts as late after so many times the longest that took so far."""
_COMPLAINTS = 2


def check_mode(mode: str) -> str:
    """Raises ConfigError unless it is one."""
    if mode not in MODES:
        raise ConfigError(f"relay={mode!r}: choose {', '.join(MODES)}")
    return mode


def cut_shares(sizes: Int64s, members: int) -> list[tuple[int, int]]:
    """Runs of wants, [first, stop), of about equal bytes: several for each of so many members."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    count = max(1, min(_SHARES_EACH * members, _MAX_SHARES, len(sizes), total // _MIN_SHARE_BYTES))
    cuts = np.searchsorted(ends, np.arange(1, count) * total / count, side="left") + 1
    borders = np.unique(np.concatenate([[0], np.minimum(cuts, len(sizes)), [len(sizes)]]))
    return [(int(a), int(b)) for a, b in pairwise(borders)]


@dataclass(slots=True)
class _Row:
    """A member's part in a run. `slot`, `generation`: where others can read it."""

    member: Member
    route: bytes
    slot: int = -1
    generation: int = 0
    is_reading: bool = False
    complaints: int = 0

    @property
    def can_serve(self) -> bool:
        return self.slot >= 0 and self.member.serves is not None and self.complaints < _COMPLAINTS


class _Run:
    """One version, and members that want the same of it. Rows are members, columns shares."""

    def __init__(self, version: int, shares: list[tuple[int, int]]) -> None:
        self.version, self.shares = version, shares
        self.rows: list[_Row] = []
        self._held = np.zeros((0, len(shares)), bool)
        self._asked = np.zeros((0, len(shares)), np.int64)
        self._since = np.zeros((0, len(shares)))
        self._refused: set[tuple[int, int]] = set()
        self._longest: float | None = None
        self._column = {share: number for number, share in enumerate(shares)}

    def row_of(self, instance: str) -> int | None:
        return next((n for n, row in enumerate(self.rows) if row.member.instance == instance), None)

    def enter(self, member: Member, route: bytes, *, is_reading: bool) -> int:
        """The member's row, with nothing held yet."""
        self.leave(member.instance)
        number = len(self.rows)
        self.rows.append(_Row(member, route, is_reading=is_reading))
        self._held = np.vstack([self._held, np.zeros((1, len(self.shares)), bool)])
        self._asked = np.vstack([self._asked, np.full((1, len(self.shares)), _NOBODY)])
        self._since = np.vstack([self._since, np.zeros((1, len(self.shares)))])
        return number

    def leave(self, instance: str) -> None:
        """The member is gone, or starts again; what was asked of it is asked of others."""
        number = self.row_of(instance)
        if number is None:
            return
        del self.rows[number]
        self._held = np.delete(self._held, number, axis=0)
        self._asked = np.delete(self._asked, number, axis=0)
        self._since = np.delete(self._since, number, axis=0)
        self._asked[self._asked == number] = _NOBODY
        self._asked[self._asked > number] -= 1
        self._refused = {
            (a - (a > number), b - (b > number)) for a, b in self._refused if number not in (a, b)
        }

    def stop(self, instance: str) -> None:
        """The member reads this version no more; what it holds of it stays."""
        number = self.row_of(instance)
        if number is not None:
            self.rows[number].is_reading = False
            self._asked[number] = _NOBODY

    def holds_all(self, number: int, slot: int, generation: int) -> None:
        row = self.rows[number]
        row.slot, row.generation, row.is_reading = slot, generation, False
        self._held[number], self._asked[number] = True, _NOBODY

    def fetched(self, number: int, message: m.Fetched, now: float) -> None:
        column = self._column.get((message.first, message.stop))
        if column is None:
            return
        if self._asked[number, column] == _PUBLISHER:
            self._longest = max(self._longest or 0.0, now - float(self._since[number, column]))
        row = self.rows[number]
        row.slot, row.generation = message.slot if message.generation else -1, message.generation
        self._held[number, column], self._asked[number, column] = True, _NOBODY

    def unfetched(self, number: int, message: m.Unfetched) -> None:
        column = self._column.get((message.first, message.stop))
        source = next((n for n, row in enumerate(self.rows) if row.member.number == message.source), None)
        if column is not None and self._asked[number, column] == (_NOBODY if source is None else source):
            self._asked[number, column] = _NOBODY
        if source is not None and (number, source) not in self._refused:
            self._refused.add((number, source))
            self.rows[source].complaints += 1

    def is_served(self) -> bool:
        """Whether somebody holds a part that others can read."""
        return any(row.can_serve and self._held[number].any() for number, row in enumerate(self.rows))

    def decide(self, now: float) -> Iterator[tuple[_Row, int, int]]:
        """New asks: reader, share, and the row of its source (or _PUBLISHER). Those with the least go first."""
        reading = [number for number, row in enumerate(self.rows) if row.is_reading]
        serving = [number for number, row in enumerate(self.rows) if row.can_serve]
        offered = self._had(serving)
        refusing = {number for number, _ in self._refused}
        counts = self._held.sum(axis=1)
        for number in sorted(reading, key=lambda n: int(counts[n])):
            usable, had = serving, offered
            if number in refusing:
                usable = [n for n in serving if (number, n) not in self._refused]
                had = self._had(usable)
            while (ask := self._next(number, usable, had, now)) is not None:
                column, source = ask
                self._asked[number, column], self._since[number, column] = source, now
                yield self.rows[number], column, source

    def _had(self, members: list[int]) -> npt.NDArray[np.bool_]:
        """Shares that one of them holds."""
        found: npt.NDArray[np.bool_] = np.any(self._held[members], axis=0)
        return found

    def _next(
        self, number: int, usable: list[int], had: npt.NDArray[np.bool_], now: float
    ) -> tuple[int, int] | None:
        asked = self._asked[number]
        missing = ~self._held[number] & (asked == _NOBODY)
        asks_peers = int(np.count_nonzero(asked >= 0)) < _ASKS_OF_PEERS
        asks_publisher = int(np.count_nonzero(asked == _PUBLISHER)) < _ASKS_OF_PUBLISHER
        if not (asks_peers or asks_publisher) or not missing.any():
            return None
        if asks_peers and (missing & had).any():
            found = self._from_peer(number, missing, usable)
            if found is not None:
                return found
        fresh = missing & ~had
        if not asks_publisher or not fresh.any():
            return None
        left = np.flatnonzero(fresh & ~self._coming(number, now))
        return (int(left[0]), _PUBLISHER) if len(left) else None

    def _from_peer(
        self, number: int, missing: npt.NDArray[np.bool_], usable: list[int]
    ) -> tuple[int, int] | None:
        """The rarest missing share of the nearest peer that is least busy."""
        loads = np.bincount(self._asked[self._asked >= 0], minlength=len(self.rows))
        served = loads[usable].tolist()
        host = self.rows[number].member.hello.host
        order = sorted(
            zip(usable, served, strict=True),
            key=lambda one: (self.rows[one[0]].member.hello.host != host, one[1]),
        )
        for source, load in order:
            columns = np.flatnonzero(missing & self._held[source])
            if load < _MOST_SERVED and len(columns):
                rarity = self._held[:, columns].sum(axis=0)
                return int(columns[np.argmin(rarity)]), source
        return None

    def _coming(self, number: int, now: float) -> npt.NDArray[np.bool_]:
        """Shares that another member, which will serve them, is fetching from the publisher and is not late with; or will
        fetch, if this one can't serve them itself."""
        patience = _PATIENCE_S
        if self._longest is not None:
            patience = max(_LEAST_PATIENCE_S, _TIMES_LONGEST * self._longest)
        others = [
            n for n, row in enumerate(self.rows)
            if n != number and row.is_reading and row.member.serves is not None and row.complaints < _COMPLAINTS
        ]  # fmt: skip
        if not others:
            return np.zeros(len(self.shares), bool)
        on_time = (self._asked[others] == _PUBLISHER) & (now - self._since[others] < patience)
        if self.rows[number].member.serves is None:
            on_time |= ~self._held[others] & (self._asked[others] == _NOBODY)
        coming: npt.NDArray[np.bool_] = on_time.any(axis=0)
        return coming


class Relay:
    """All runs. `mode`: as the publisher said; `auto` is for members on other hosts than the publisher's ranks."""

    def __init__(self) -> None:
        self.mode = "auto"
        self._runs: dict[tuple[int, Boxes], _Run] = {}
        self._numbers = 0

    def may_serve(self, member: Member, hosts: set[str]) -> bool:
        """Whether a member could read from others, and others from it; `hosts` are those of the publisher's ranks."""
        is_reader = member.hello.holds is None  # a slot that serves itself can't be filled by anybody else
        return is_reader and (
            self.mode == "always" or (self.mode == "auto" and member.hello.host not in hosts)
        )

    def serve(self, member: Member, message: m.Serve) -> None:
        """The member's slots can be read."""
        self._numbers += 1
        member.serves, member.number = message, self._numbers

    def enroll(
        self, version: int, wants: Boxes, sizes: Int64s, member: Member, route: bytes, company: int
    ) -> bool:
        """Whether the member shall read a version in shares. `sizes`: bytes of each want; `company`: other members that want
        the same and serve it, or will."""
        run = self._runs.get((version, wants))
        if not member.may_serve or (not company and (run is None or not run.is_served())):
            return False
        if run is None:
            run = self._runs[version, wants] = _Run(version, cut_shares(sizes, company + 1))
        run.enter(member, route, is_reading=True)
        return True

    def is_reading(self, version: int, wants: Boxes | None, member: Member) -> bool:
        """Whether the member has been told to read the version in shares."""
        run, number = self._find(version, wants, member)
        return run is not None and number is not None and run.rows[number].is_reading

    def fetched(self, wants: Boxes | None, member: Member, message: m.Fetched, now: float) -> None:
        """The member holds one more share."""
        run, number = self._find(message.version, wants, member)
        if run is not None and number is not None:
            run.fetched(number, message, now)

    def unfetched(self, wants: Boxes | None, member: Member, message: m.Unfetched) -> None:
        """The member could not get a share where it was sent."""
        run, number = self._find(message.version, wants, member)
        if run is not None and number is not None:
            run.unfetched(number, message)

    def verified(
        self, wants: Boxes, sizes: Int64s, member: Member, route: bytes, message: m.Verified, company: int
    ) -> None:
        """The member holds the whole version."""
        if message.slot < 0 or member.serves is None:
            self.stop(member, message.version)
            return
        run, number = self._find(message.version, wants, member)
        if run is None:
            run = self._runs[message.version, wants] = _Run(message.version, cut_shares(sizes, company + 1))
        if number is None:
            number = run.enter(member, route, is_reading=False)
        run.holds_all(number, message.slot, message.generation)

    def stop(self, member: Member, version: int) -> None:
        """The member reads this version no more."""
        for run in self._runs.values():
            if run.version == version:
                run.stop(member.instance)

    def leave(self, instance: str) -> None:
        """The member is gone, or starts again."""
        for run in self._runs.values():
            run.leave(instance)

    def keep(self, versions: set[int]) -> None:
        """Only these can be read any more."""
        self._runs = {key: run for key, run in self._runs.items() if run.version in versions}

    def decide(self, epoch: int, now: float) -> Iterator[tuple[bytes, m.Peer | m.Fetch]]:
        """What to tell whom."""
        for run in self._runs.values():
            for row, column, source in list(run.decide(now)):
                first, stop = run.shares[column]
                if source == _PUBLISHER:
                    yield row.route, m.Fetch(epoch, run.version, first, stop, -1, -1, 0)
                    continue
                peer = run.rows[source]
                serves, number = peer.member.serves, peer.member.number
                if serves is not None and number not in row.member.introduced:
                    row.member.introduced.add(number)
                    yield row.route, m.Peer(epoch, number, peer.member.label, serves.offers, serves.offsets)
                yield row.route, m.Fetch(epoch, run.version, first, stop, number, peer.slot, peer.generation)

    def _find(self, version: int, wants: Boxes | None, member: Member) -> tuple[_Run | None, int | None]:
        run = None if wants is None else self._runs.get((version, wants))
        return run, None if run is None else run.row_of(member.instance)
