"""The replicas of a fleet, and the policy by which they go to a version. Orders out, for Fleet to send."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import time_ns

from weightsync.errors import ConfigError
from weightsync.standing import Ballot, Standing, key_of, of_key
from weightsync.wire import messages as m
from weightsync.wire.replicas import Order, Replica
from weightsync.wire.rollout import Policy, Rollout, parse_policy

Seat = tuple[str, int]
"""Name of the replica, rank in it."""


class Ballots:
    """Versions are plain numbers of this epoch here; `Replica` gets them with the epoch in front."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self.replicas: dict[str, Replica] = {}
        self._rollout = Rollout(Policy())
        self._offered: int | None = None
        self._bad: set[int] = set()

    def follow(self, epoch: int) -> None:
        """The same versions count in another epoch from now on; members take their seats again."""
        self._epoch = epoch
        self.replicas.clear()
        self._begin_rollout(self.policy)

    @property
    def policy(self) -> Policy:
        return self._rollout.policy

    def set_policy(self, text: str) -> None:
        """As the publisher said. Raises ConfigError."""
        policy = parse_policy(text)
        if policy != self.policy:
            self._begin_rollout(policy)

    def _begin_rollout(self, policy: Policy) -> None:
        self._rollout = Rollout(policy)
        for version in self._bad:
            self._rollout.withdraw(self._key(version))

    def seat_of(self, hello: m.Hello, label: str) -> Seat | None:
        """Where a member votes; None: it need not, being alone, and nobody else decides."""
        if hello.role != "server" or (hello.ranks == 1 and self.policy.kind == "each"):
            return None
        return (label if hello.replica is None else hello.replica, hello.rank)

    def join(self, seat: Seat, hello: m.Hello) -> list[Order]:
        """The member may vote; one of the orders is its Admit. Raises ConfigError if its replica is of another size."""
        name, rank = seat
        replica = self.replicas.get(name)
        if replica is None:
            replica = self.replicas[name] = Replica(name, hello.ranks, first_number=time_ns())
            for version in self._bad:
                replica.rollback(self._key(version))
            if self._offered is not None:
                replica.available(self._key(self._offered))
        if replica.size != hello.ranks:
            raise ConfigError(f"replica {name} has {replica.size} ranks; this one says {hello.ranks}")
        return replica.joined(rank, hello.instance)

    def leave(self, seat: Seat, is_empty: bool) -> list[Order]:
        """The member is gone; `is_empty`: the last one of its replica."""
        name, rank = seat
        orders = self.replicas[name].left(rank) if name in self.replicas else []
        if is_empty:
            self.replicas.pop(name, None)
        return orders

    def reported(self, seat: Seat, stand: m.Stand) -> list[Order]:
        """Where a member stands."""
        replica = self.replicas.get(seat[0])
        return [] if replica is None else replica.reported(seat[1], standing_of(stand))

    def offer(self, version: int) -> list[tuple[str, Order]]:
        """The version may be read from now on, and no older one that is not held already."""
        before, self._offered = self._offered, version
        orders: list[tuple[str, Order]] = []
        if before is not None and before != version:
            orders = self._each(lambda replica: replica.withdrawn(self._key(before)))
        return orders + self._each(lambda replica: replica.available(self._key(version)))

    def withdraw(self, version: int) -> list[tuple[str, Order]]:
        """The version can't be read any more."""
        if self._offered == version:
            self._offered = None
        return self._each(lambda replica: replica.withdrawn(self._key(version)))

    def promote(self, version: int, known: Iterable[int]) -> str | None:
        """What is wrong with promoting it; None: done."""
        return self._rollout.promote(self._key(version), [self._key(one) for one in known])

    def rollback(self, version: int) -> list[tuple[str, Order]]:
        """The version is bad, everywhere and for good."""
        self._bad.add(version)
        self._rollout.withdraw(self._key(version))
        return self._each(lambda replica: replica.rollback(self._key(version)))

    def is_bad(self, version: int) -> bool:
        return version in self._bad

    @property
    def bad(self) -> list[int]:
        """What was rolled back."""
        return sorted(self._bad)

    def decide(self) -> list[tuple[str, Order]]:
        """What the policy makes of where the replicas stand now."""
        orders: list[tuple[str, Order]] = []
        while True:
            verdict = self._rollout.decide({name: replica.view() for name, replica in self.replicas.items()})
            made: list[tuple[str, Order]] = []
            for name, key in verdict.reject.items():
                made += [(name, order) for order in self.replicas[name].reject(key)]
            for name, key in verdict.permit.items():
                made += [(name, order) for order in self.replicas[name].permit(key)]
            orders += made
            if not made:
                return orders

    def _key(self, version: int) -> int:
        return key_of(self._epoch, version)

    def _each(self, action: Callable[[Replica], list[Order]]) -> list[tuple[str, Order]]:
        return [(name, order) for name, replica in self.replicas.items() for order in action(replica)]


def ballot_to_wire(ballot: Ballot) -> m.BallotOf:
    """As (number, epoch, version)."""
    return (ballot.number, *of_key(ballot.version))


def ballot_of_wire(ballot: m.BallotOf) -> Ballot:
    """From (number, epoch, version)."""
    number, epoch, version = ballot
    return Ballot(number, key_of(epoch, version))


def standing_of(stand: m.Stand) -> Standing:
    """From a message."""
    return Standing(
        stand.session,
        None if stand.live is None else ballot_of_wire(stand.live),
        None if stand.decided is None else ballot_of_wire(stand.decided),
        frozenset(map(ballot_of_wire, stand.votes)),
        frozenset(key_of(*version) for version in stand.complete),
        stand.granted,
        None if stand.refused is None else key_of(*stand.refused),
        stand.has_room,
    )


def stand_of(epoch: int, standing: Standing) -> m.Stand:
    """As a message."""
    return m.Stand(
        epoch,
        standing.session,
        None if standing.live is None else ballot_to_wire(standing.live),
        None if standing.decided is None else ballot_to_wire(standing.decided),
        sorted(map(ballot_to_wire, standing.votes)),
        sorted(of_key(version) for version in standing.complete),
        standing.granted,
        None if standing.refused is None else of_key(standing.refused),
        standing.has_room,
    )
