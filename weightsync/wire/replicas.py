"""The coordinator's side of a replica commit: one replica's ranks go to one version together. Events in, orders out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weightsync.errors import ConfigError
from weightsync.standing import Ballot, Standing
from weightsync.wire.rollout import ReplicaView


@dataclass(frozen=True, slots=True)
class Admit:
    """The rank is known under `session`; it sends its standing at once."""

    rank: int
    session: int


@dataclass(frozen=True, slots=True)
class Grant:
    """The rank may vote for the ballot once it holds the version. `is_held`: it does already, no lease is needed."""

    rank: int
    session: int
    ballot: Ballot
    is_held: bool


@dataclass(frozen=True, slots=True)
class Commit:
    """Every rank voted for the ballot."""

    rank: int
    session: int
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Cancel:
    """The ballot will never be committed."""

    rank: int
    session: int
    ballot: Ballot


Order = Admit | Grant | Commit | Cancel


@dataclass(frozen=True, slots=True)
class _Rank:
    instance: str
    session: int
    standing: Standing | None = None


class Replica:
    """Decides for the ranks `0 <= rank < size` of one replica; every event returns orders to send, each rank's in order.

    Its state is soft: a new one learns all it needs from the ranks' standings, and decides nothing until it has heard all
    of them; the publisher repeats what is available and what was rolled back. A committed ballot is never taken back; only
    a later ballot follows it, for a lower version after `rollback`. `first_number`: higher than any number used for this
    replica before (a clock in nanoseconds will do).
    """

    def __init__(self, name: str, size: int, *, first_number: int) -> None:
        if size < 1:
            raise ConfigError(f"replica {name}: {size} ranks; expected 1 at least")
        self.name = name
        self.size = size
        self.target: Ballot | None = None
        self.decided: Ballot | None = None
        self._next = first_number
        self._ranks: dict[int, _Rank] = {}
        self._arrivals: dict[tuple[int, str], int] = {}
        self._available: set[int] = set()
        self._refused: set[int] = set()
        self._bad: set[int] = set()

    # ---- from ranks

    def joined(self, rank: int, instance: str) -> list[Order]:
        """A rank said hello, for the first time or again; another instance replaces the one before, which is not let in
        again while its successor is there. Raises ConfigError."""
        if not 0 <= rank < self.size:
            raise ConfigError(f"replica {self.name}: rank {rank}; expected 0 to {self.size - 1}")
        known = self._ranks.get(rank)
        arrived = self._arrivals.setdefault((rank, instance), len(self._arrivals))
        if known is not None and arrived < self._arrivals[rank, known.instance]:
            raise ConfigError(f"replica {self.name}: another process took its place as rank {rank}")
        orders = [] if known is None or known.instance == instance else self.left(rank)
        self._ranks[rank] = _Rank(instance, self._number())
        return [*orders, Admit(rank, self._ranks[rank].session)]

    def left(self, rank: int) -> list[Order]:
        """The rank is gone or silent. What was not committed is cancelled; nothing is granted until it is back."""
        return self._cancel() if self._ranks.pop(rank, None) is not None else []

    def reported(self, rank: int, standing: Standing) -> list[Order]:
        """A rank's standing, as it changed or as a heartbeat repeats it; orders that it shows to be lost are sent again. A
        rank that is not known must say hello first."""
        known = self._ranks.get(rank)
        if known is None:
            return []
        if standing.session != known.session:
            return [Admit(rank, known.session)]
        self._ranks[rank] = replace(known, standing=standing)
        if standing.refused is not None:
            self._refused.add(standing.refused)
        if standing.decided is not None and (self.decided is None or standing.decided > self.decided):
            self.decided = standing.decided
        used = [vote.number for vote in standing.votes] + [self.decided.number if self.decided else 0]
        self._next = max(self._next, *(number + 1 for number in used))
        orders = self._advance()
        sent = {order.ballot for order in orders if not isinstance(order, Admit) and order.rank == rank}
        return [*orders, *(order for order in self._repair(rank, standing) if order.ballot not in sent)]

    # ---- from the publisher

    def available(self, version: int) -> list[Order]:
        """The version may be granted from now on."""
        self._available.add(version)
        return self._advance()

    def withdrawn(self, version: int) -> list[Order]:
        """The version can't be read any more; ranks that hold it may still commit it, if all do."""
        self._available.discard(version)
        return self._advance()

    def reject(self, version: int) -> list[Order]:
        """This replica shall not go to the version; no effect on a committed one."""
        self._refused.add(version)
        return self._advance()

    def permit(self, version: int) -> list[Order]:
        """The fleet's policy lets this replica switch; no effect unless `ready` is this version."""
        return [*self._commit(), *self._advance()] if self.ready == version else []

    def rollback(self, version: int) -> list[Order]:
        """The version is bad: never granted or committed again. Ranks that switched to it go back to the newest earlier one
        that all of them hold, or can get. While a rank is missing it waits: that rank may serve, unheard of."""
        self._bad.add(version)
        return [*self._cancel(), *self._advance()]

    # ---- what it knows

    @property
    def missing(self) -> list[int]:
        """Ranks that are not there, or have not said where they stand."""
        return [rank for rank in range(self.size) if rank not in self._standings()]

    @property
    def ready(self) -> int | None:
        """The version that every rank voted for and the policy may permit."""
        return self.target.version if self.target is not None and self._is_elected(self.target) else None

    def view(self) -> ReplicaView:
        """What a rollout policy needs to know."""
        return ReplicaView(
            is_present=not self.missing,
            target=None if self.target is None else self.target.version,
            is_ready=self.ready is not None,
            decided=None if self.decided is None else self.decided.version,
            refused=frozenset(self._refused | self._bad),
        )

    # ---- steps

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    def _standings(self) -> dict[int, Standing]:
        return {rank: known.standing for rank, known in self._ranks.items() if known.standing is not None}

    def _is_elected(self, ballot: Ballot) -> bool:
        standings = self._standings()
        return len(standings) == self.size and all(ballot in each.votes for each in standings.values())

    def _advance(self) -> list[Order]:
        """Give up what can't succeed, commit what needs no permission, begin what all can follow."""
        standings = self._standings()
        if len(standings) < self.size:
            return []
        orders: list[Order] = []
        if self.target is not None and self._is_hopeless(self.target, standings):
            orders += self._cancel()
        if (
            self.target is not None
            and self._is_elected(self.target)
            and self._is_settled(self.target, standings)
        ):
            orders += self._commit()
        if self.target is None:
            orders += self._begin(standings)
        return orders

    def _is_hopeless(self, target: Ballot, standings: dict[int, Standing]) -> bool:
        if target.version in self._refused and not self._is_settled(target, standings):
            return True
        lacking = any(target.version not in each.complete for each in standings.values())
        return lacking and (target.version not in self._available or target.version in self._refused)

    def _is_settled(self, target: Ballot, standings: dict[int, Standing]) -> bool:
        """Whether the replica serves this version already, or must go back to it: no policy is asked."""
        decided = self.decided
        if decided is not None and (decided.version == target.version or decided.version in self._bad):
            return True
        return any(
            each.live is not None and each.live.version == target.version for each in standings.values()
        )

    def _begin(self, standings: dict[int, Standing]) -> list[Order]:
        version = self._goal(standings)
        if version is None or all(self._is_on_way(each, version) for each in standings.values()):
            return []
        if not all(version in each.complete or each.has_room for each in standings.values()):
            return []
        self.target = target = Ballot(self._number(), version)
        return [self._grant(rank, each, target) for rank, each in standings.items()]

    def _goal(self, standings: dict[int, Standing]) -> int | None:
        newest = max(self._available - self._refused - self._bad, default=None)
        if self.decided is not None and self.decided.version in self._bad:
            common = frozenset.intersection(*(each.complete for each in standings.values())) - self._bad
            return max((version for version in common if version < self.decided.version), default=newest)
        current = [each.live.version for each in standings.values() if each.live is not None]
        if self.decided is not None:
            current = [self.decided.version]
        return newest if newest is not None and newest >= max(current, default=newest) else None

    def _is_on_way(self, standing: Standing, version: int) -> bool:
        """Whether the rank serves the version and nothing later was decided, or will at its next boundary."""
        if self.decided is None:
            return standing.live is not None and standing.live.version == version
        return self.decided.version == version and (
            self.decided in standing.votes or standing.live == self.decided
        )

    def _grant(self, rank: int, standing: Standing, target: Ballot) -> Grant:
        return Grant(rank, standing.session, target, target.version in standing.complete)

    def _commit(self) -> list[Order]:
        if self.target is None:
            return []
        self.decided, self.target = self.target, None
        return [Commit(rank, known.session, self.decided) for rank, known in self._ranks.items()]

    def _cancel(self) -> list[Order]:
        if self.target is None:
            return []
        target, self.target = self.target, None
        return [Cancel(rank, known.session, target) for rank, known in self._ranks.items()]

    def _repair(self, rank: int, standing: Standing) -> list[Grant | Commit | Cancel]:
        """What this rank should have got already."""
        orders: list[Grant | Commit | Cancel] = []
        target, decided = self.target, self.decided
        if target is not None and target not in standing.votes:
            can_have = standing.has_room or target.version in standing.complete
            orders += [self._grant(rank, standing, target)] if can_have else []
        if decided is not None and decided in standing.votes and standing.decided != decided:
            orders.append(Commit(rank, standing.session, decided))
        if not self.missing:  # else a rank not heard of may know better
            orders += [
                Cancel(rank, standing.session, vote)
                for vote in sorted(standing.votes)
                if vote != target and (decided is None or vote.number > decided.number)
            ]
        return orders
