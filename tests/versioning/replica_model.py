"""One replica as a finite state machine: the real `Replica` and `RankCommit`s, with queues, slots and faults around them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from weightsync.standing import Standing
from weightsync.versioning.commit import RankCommit
from weightsync.wire.replicas import Admit, Cancel, Commit, Grant, Replica

HELLO, UNKNOWN = "hello", "unknown"
_PUBLISHER_SLOTS = 2
_QUEUE = 4
T = TypeVar("T", RankCommit, Replica)


class Violation(AssertionError):
    """An invariant does not hold; the text says which."""


@dataclass(frozen=True)
class Setting:
    """What may happen, and how often. `drive`: how step boundaries are agreed upon. `slots`: of each rank, the live one
    included. The two classes may be replaced by wrong ones."""

    ranks: int = 2
    drive: Literal["agreement", "engine"] = "agreement"
    slots: int = 2
    versions: int = 3
    faults: tuple[tuple[str, int], ...] = ()
    total: int = 2
    replica: type[Replica] = Replica
    commit: type[RankCommit] = RankCommit


def copied(machine: T) -> T:
    """A copy that shares only immutable values."""
    new = object.__new__(type(machine))
    for name, value in vars(machine).items():
        new.__dict__[name] = value.copy() if isinstance(value, (set, dict)) else value
    return new


def frozen(machine: T | None) -> object:
    if machine is None:
        return None
    return tuple(
        frozenset(value) if isinstance(value, set)
        else tuple(sorted(value.items())) if isinstance(value, dict) and all(isinstance(v, int) for v in value.values())
        else frozenset(value.items()) if isinstance(value, dict)
        else value
        for value in vars(machine).values()
    )  # fmt: skip


@dataclass(frozen=True)
class Host:
    """What surrounds one rank: its process's number, the versions in its memory, what it reads, its queues, and where it is
    in the round of the step boundary (`posted` None: it has not called yet)."""

    instance: int = 1
    memory: frozenset[int] = frozenset()
    reading: int | None = None
    to_rank: tuple[Any, ...] = ()
    stale: tuple[Any, ...] = ()
    to_coordinator: tuple[Any, ...] = ()
    posted: int | None = None
    is_member: bool = False


class World:
    """One state. `moves()` yields what may happen next, as (name, is it a fault, what to call on a copy)."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.coordinator: Replica | None = None
        self.starts = 0
        self.ranks: list[RankCommit | None] = [setting.commit() for _ in range(setting.ranks)]
        self.hosts = [Host() for _ in range(setting.ranks)]
        self.published = 0
        self.withdrawn: frozenset[int] = frozenset()
        self.bad: frozenset[int] = frozenset()
        self.has_group = False
        self.agreed: int | None = None
        self.faults = dict(setting.faults)
        self.left = setting.total
        self._start_coordinator()
        self._publish()

    def copy(self) -> World:
        new = object.__new__(World)
        new.__dict__.update(self.__dict__)
        new.coordinator = None if self.coordinator is None else copied(self.coordinator)
        new.ranks = [None if rank is None else copied(rank) for rank in self.ranks]
        new.hosts = list(self.hosts)
        new.faults = dict(self.faults)
        return new

    def key(self) -> object:
        return (
            frozen(self.coordinator), self.starts, tuple(frozen(rank) for rank in self.ranks), tuple(self.hosts),
            self.published, self.withdrawn, self.bad, self.has_group, self.agreed, tuple(self.faults.values()), self.left,
        )  # fmt: skip

    # ---- what may happen

    def moves(self) -> Iterator[tuple[str, bool, Callable[[World], None]]]:
        for r, rank in enumerate(self.ranks):
            yield from self._rank_moves(r, rank, self.hosts[r])
        if self.coordinator is None:
            yield "coordinator starts", False, World._start_coordinator
        else:
            ready = self.coordinator.ready
            if ready is not None:
                yield f"permit {ready}", False, lambda w: w._orders(w._up.permit(ready))
                if self._may("reject"):
                    yield f"reject {ready}", True, lambda w: w._orders(w._up.reject(ready))
            if self._may("coordinator"):
                yield "coordinator dies", True, World._stop_coordinator
            decided = self.coordinator.decided
            if decided is not None and decided.version not in self.bad and self._may("rollback"):
                yield f"rollback {decided.version}", True, lambda w: w._roll_back(decided.version)
        if self.published < self.setting.versions:
            yield "publish", True, World._publish
        for version in self._available() if self._may("withdraw") else ():
            yield f"withdraw {version}", True, partial(World._withdraw, version=version)
        if not self.has_group and any(rank is not None for rank in self.ranks):
            yield "form a group", False, World._form_group

    def _rank_moves(
        self, r: int, rank: RankCommit | None, host: Host
    ) -> Iterator[tuple[str, bool, Callable[[World], None]]]:
        if host.to_coordinator:
            if self.coordinator is not None:
                yield f"{r} is heard", False, lambda w: w._hear(r)
                if self._may("double"):
                    yield f"{r} is heard twice", True, lambda w: w._hear(r, keep=True)
            if self._may("lose"):
                yield f"{r} is not heard", True, lambda w: w._set(r, to_coordinator=host.to_coordinator[1:])
        if rank is None:
            yield f"{r} restarts", False, lambda w: w._restart(r)
            if self.coordinator is not None and r not in self.coordinator.missing:
                yield f"{r} is missed", False, lambda w: w._orders(w._up.left(r))
            return
        if rank.poisoned is not None:
            yield f"{r} is ended", False, lambda w: w._crash(r)
            return
        if host.to_rank:
            yield f"{r} gets {_name(host.to_rank[0])}", False, lambda w: w._get(r)
            if self._may("double"):
                yield f"{r} gets {_name(host.to_rank[0])} twice", True, lambda w: w._get(r, keep=True)
            if self._may("lose"):
                yield (
                    f"{r} loses {_name(host.to_rank[0])}",
                    True,
                    lambda w: w._set(r, to_rank=host.to_rank[1:]),
                )
        for number, message in enumerate(host.stale):
            yield f"{r} gets a stale {_name(message)}", True, partial(World._get_stale, r=r, number=number)
        if not host.to_coordinator and not host.to_rank and self._has_news(r):
            yield f"{r} beats", False, lambda w: w._beat(r)
        if host.reading is not None:
            if host.reading in self._available():
                yield f"{r} verifies {host.reading}", False, lambda w: w._verify(r)
            else:
                yield f"{r} can't read {host.reading}", False, lambda w: w._stop_reading(r)
            if self._may("refuse"):
                yield f"{r} refuses {host.reading}", True, lambda w: w._refuse(r)
        if self._may("crash"):
            yield f"{r} dies", True, lambda w: w._crash(r)
        if self._may("partition") and self.coordinator is not None and r not in self.coordinator.missing:
            yield f"{r} is missed, but lives", True, lambda w: w._orders(w._up.left(r))
        if host.is_member and host.posted is None and self._is_round_due():
            yield f"{r} at a boundary", False, lambda w: w._boundary(r)
            if self._may("activation") and self.agreed:
                yield f"{r} fails at a boundary", True, lambda w: w._boundary(r, fails=True)

    def _may(self, fault: str) -> bool:
        return self.left > 0 and self.faults.get(fault, 0) > 0

    def spend(self, name: str) -> None:
        """One fault less; publishing and stale messages are free, their number is bounded anyway."""
        words = {
            "heard twice": "double", "twice": "double", "not heard": "lose", "loses": "lose", "refuses": "refuse",
            "but lives": "partition", "fails": "activation", "coordinator dies": "coordinator", "reject": "reject",
            "rollback": "rollback", "withdraw": "withdraw", "dies": "crash",
        }  # fmt: skip
        fault = next((fault for word, fault in words.items() if word in name), None)
        if fault is not None:
            self.faults[fault] -= 1
            self.left -= 1

    # ---- the publisher and the coordinator

    @property
    def _up(self) -> Replica:
        assert self.coordinator is not None
        return self.coordinator

    def _available(self) -> list[int]:
        newest = range(max(1, self.published - _PUBLISHER_SLOTS + 1), self.published + 1)
        return [version for version in newest if version not in self.withdrawn]

    def _start_coordinator(self) -> None:
        self.starts += 1
        self.coordinator = self.setting.replica("r", self.setting.ranks, first_number=100 * self.starts)
        for version in self._available():
            self.coordinator.available(version)
        for version in sorted(self.bad):
            self.coordinator.rollback(version)

    def _stop_coordinator(self) -> None:
        self.coordinator = None
        for r, host in enumerate(self.hosts):
            kept = tuple(m for m in host.to_rank if isinstance(m, (Commit, Cancel, Grant)))
            self._set(r, to_rank=(), stale=(host.stale + kept)[-2:])

    def _publish(self) -> None:
        before = self._available()
        self.published += 1
        if self.coordinator is not None:
            for version in before:
                if version not in self._available():
                    self._orders(self.coordinator.withdrawn(version))
            self._orders(self.coordinator.available(self.published))

    def _withdraw(self, version: int) -> None:
        self.withdrawn |= {version}
        if self.coordinator is not None:
            self._orders(self.coordinator.withdrawn(version))

    def _roll_back(self, version: int) -> None:
        self.bad |= {version}
        self._orders(self._up.rollback(version))

    def _orders(self, orders: list[Any]) -> None:
        for order in orders:
            if isinstance(order, Commit):
                self._check_commit(order)
            host = self.hosts[order.rank]
            if len(host.to_rank) < _QUEUE and self.ranks[order.rank] is not None:
                self._set(order.rank, to_rank=(*host.to_rank, order))

    def _check_commit(self, order: Commit) -> None:
        known = self._up._ranks[order.rank]
        rank, host = self.ranks[order.rank], self.hosts[order.rank]
        if rank is None or known.instance != str(host.instance):
            return
        is_done = rank.live is not None and rank.live.number >= order.ballot.number
        if not is_done and (order.ballot not in rank._votes or order.ballot.version not in host.memory):
            raise Violation(f"{order} without the vote of rank {order.rank}")

    def _hear(self, r: int, keep: bool = False) -> None:
        message = self.hosts[r].to_coordinator[0]
        if not keep:
            self._set(r, to_coordinator=self.hosts[r].to_coordinator[1:])
        if isinstance(message, Standing):
            if r not in self._up._ranks:
                if len(self.hosts[r].to_rank) < _QUEUE:
                    self._set(r, to_rank=(*self.hosts[r].to_rank, UNKNOWN))
            else:
                self._orders(self._up.reported(r, message))
        else:
            self._orders(self._up.joined(r, message[1]))

    # ---- a rank

    def _set(self, r: int, **changes: Any) -> None:
        self.hosts[r] = replace(self.hosts[r], **changes)

    def _alive(self, r: int) -> RankCommit:
        rank = self.ranks[r]
        assert rank is not None
        return rank

    def _has_room(self, r: int) -> bool:
        rank, host = self._alive(r), self.hosts[r]
        kept = sum(not rank.may_drop(version) for version in host.memory)
        return host.reading is None and kept < self.setting.slots

    def _send(self, r: int, message: Any) -> None:
        queue = self.hosts[r].to_coordinator
        if queue and isinstance(queue[-1], Standing) and (len(queue) > 1 or queue[-1] == message):
            queue = queue[:-1]  # more than two would only make the search longer
        self._set(r, to_coordinator=(*queue, message))

    def _say(self, r: int) -> None:
        if self._alive(r).session:
            self._send(r, self._alive(r).standing(has_room=self._has_room(r)))

    def _has_news(self, r: int) -> bool:
        """Whether a heartbeat would change anything."""
        known = None if self.coordinator is None else self.coordinator._ranks.get(r)
        standing = self._alive(r).standing(has_room=self._has_room(r))
        if self.coordinator is None or known is None or known.standing != standing:
            return self.coordinator is not None
        return bool(self.coordinator._repair(r, standing))

    def _beat(self, r: int) -> None:
        self._say(r) if self._alive(r).session else self._send(r, (HELLO, str(self.hosts[r].instance)))

    def _get(self, r: int, keep: bool = False) -> None:
        message = self.hosts[r].to_rank[0]
        if not keep:
            self._set(r, to_rank=self.hosts[r].to_rank[1:])
        self._take(r, message)

    def _get_stale(self, r: int, number: int) -> None:
        stale = self.hosts[r].stale
        self._set(r, stale=stale[:number] + stale[number + 1 :])
        self._take(r, stale[number])

    def _take(self, r: int, message: Any) -> None:
        rank = self._alive(r)
        match message:
            case Admit(session=session):
                rank.enter(session)
            case Grant(session=session, ballot=ballot):
                version = ballot.version
                if version not in self.hosts[r].memory and version != self.hosts[r].reading:
                    if not self._has_room(r):
                        return
                    if rank.on_grant(session, ballot):
                        self._make_room(r)
                        self._set(r, reading=version)
                else:
                    rank.on_grant(session, ballot)
            case Commit(session=session, ballot=ballot):
                rank.on_commit(session, ballot)
            case Cancel(session=session, ballot=ballot):
                rank.on_cancel(session, ballot)
            case _:
                self._send(r, (HELLO, str(self.hosts[r].instance)))
                return
        self._say(r)

    def _make_room(self, r: int) -> None:
        rank, memory = self._alive(r), self.hosts[r].memory
        for version in sorted(memory):
            if len(memory) >= self.setting.slots and rank.may_drop(version):
                rank.dropped(version)
                memory = memory - {version}
        if len(memory) >= self.setting.slots:
            raise Violation(f"rank {r} reads without room")
        self._set(r, memory=memory)

    def _verify(self, r: int) -> None:
        version = self.hosts[r].reading
        assert version is not None
        self._set(r, reading=None, memory=self.hosts[r].memory | {version})
        self._alive(r).verified(version)
        self._say(r)

    def _stop_reading(self, r: int) -> None:
        self._set(r, reading=None)
        self._say(r)

    def _refuse(self, r: int) -> None:
        version = self.hosts[r].reading
        assert version is not None
        self._alive(r).refuse(version)
        self._stop_reading(r)

    def _crash(self, r: int) -> None:
        self.ranks[r] = None
        host = self.hosts[r]
        self.hosts[r] = Host(
            host.instance, to_coordinator=host.to_coordinator, is_member=host.is_member, posted=host.posted
        )
        if host.is_member:
            self.has_group = False

    def _restart(self, r: int) -> None:
        """A new process; the others' group is over by the time it asks to be in one."""
        self.ranks[r] = self.setting.commit()
        self.hosts[r] = Host(self.hosts[r].instance + 1, to_coordinator=self.hosts[r].to_coordinator[-1:])
        self._dissolve()

    # ---- step boundaries

    def _dissolve(self) -> None:
        self.has_group, self.agreed = False, None
        for r in range(len(self.hosts)):
            self._set(r, posted=None, is_member=False)

    def _form_group(self) -> None:
        self._dissolve()
        self.has_group = True
        members = [r for r, rank in enumerate(self.ranks) if rank is not None and rank.poisoned is None]
        for r in members:
            self._set(r, is_member=True)
        if self.setting.drive == "engine":
            self.agreed = max((self._alive(r).proposal for r in members), default=0)

    def _boundary(self, r: int, fails: bool = False) -> None:
        """Rank `r` calls: it proposes for the next boundary, and does what was agreed for this one."""
        rank = self._alive(r)
        self._set(r, posted=rank.proposal)
        if self.agreed:
            version = rank.order(self.agreed)
            if rank.poisoned is not None:
                raise Violation(f"rank {r}: {rank.poisoned}")
            if version is not None and fails:
                rank.poison("activation failed")
                self.has_group = False
            elif version is not None:
                if version not in self.hosts[r].memory:
                    raise Violation(f"rank {r} serves version {version}, which it does not hold")
                rank.switched(self.agreed)
            self._say(r)
        members = [number for number, host in enumerate(self.hosts) if host.is_member]
        if all(self.hosts[number].posted is not None for number in members) and self.has_group:
            self._end_round(members)

    def _end_round(self, members: list[int]) -> None:
        live = {
            each.live.version for each in (self._alive(r) for r in members) if each.live and not each.poisoned
        }
        if len(live) > 1 and self.agreed is not None:
            raise Violation(f"versions {sorted(live)} serve one step")
        if self.setting.drive == "agreement":
            self.agreed = max(self.hosts[r].posted or 0 for r in members)
        else:
            ready = [each.ready.number for each in (self._alive(r) for r in members) if each.ready]
            self.agreed = ready[0] if ready else 0
        for r in members:
            self._set(r, posted=None)

    def _is_round_due(self) -> bool:
        """Whether one more round of the step boundary would change anything."""
        members = [self._alive(r) for r, host in enumerate(self.hosts) if host.is_member and self.ranks[r]]
        if self.agreed is None or any(host.posted is not None for host in self.hosts):
            return True
        return any(
            rank.proposal > self.agreed
            or (rank.live is not None and rank.live.number < self.agreed)
            or rank.ready
            for rank in members
        )

    # ---- what is hoped for

    def is_at_goal(self) -> bool:
        """All ranks serve the newest version that the replica may have (or it may have none)."""
        if self.coordinator is None or any(rank is None or rank.poisoned for rank in self.ranks):
            return False
        if self.coordinator.missing:
            return False
        refused = self.coordinator._refused | self.bad
        good = max((v for v in self._available() if v not in refused), default=None)
        decided = self.coordinator.decided
        live = {rank.live.version if rank.live else None for rank in self.ranks if rank is not None}
        if decided is not None and decided.version not in self.bad and decided.version > (good or 0):
            return live == {decided.version} or None in live
        if good is None:
            return len(live) == 1 or None in live
        return live == {good} or (
            decided is not None
            and len(live) == 1
            and None not in live
            and not live & self.bad
            and live > {good}
        )


def _name(message: Any) -> str:
    ballot = getattr(message, "ballot", None)
    return (
        message
        if isinstance(message, str)
        else type(message).__name__ + (f"({ballot.number}: {ballot.version})" if ballot else "")
    )


@dataclass
class Search:
    """What a search saw. `is_complete`: there was nothing left to see."""

    states: int
    is_complete: bool
    sample: list[tuple[World, tuple[Any, ...]]]


def serving(setting: Setting) -> World:
    """The state that searches begin with: version 1 serves on all ranks."""
    world = World(setting)
    rounds_to_goal(world, 0, change=True)
    assert world.is_at_goal()
    return world


def search(setting: Setting, limit: int, every: int = 50) -> Search:
    """Breadth first over all states of `setting`, `limit` at most. Raises Violation with the moves that lead to it."""
    first = serving(setting)
    seen = {first.key()}
    queue: deque[tuple[World, tuple[Any, ...]]] = deque([(first, ())])
    sample = []
    count = 0
    while queue:
        world, path = queue.popleft()
        if count % every == 0:
            sample.append((world, path))
        count += 1
        for name, is_fault, move in world.moves():
            after = world.copy()
            if is_fault:
                after.spend(name)
            try:
                move(after)
            except Violation as violation:
                raise Violation(f"{violation}\n" + "\n".join(steps((path, name)))) from None
            key = after.key()
            if key not in seen and len(seen) < limit:
                seen.add(key)
                queue.append((after, (path, name)))
    return Search(len(seen), len(seen) < limit, sample)


def walk(setting: Setting, seed: int, length: int) -> Iterator[tuple[World, list[str]]]:
    """One random run, far deeper than the search goes: each state and how it came about."""
    rng = random.Random(seed)
    world, names = serving(setting) if seed % 2 else World(setting), []
    for _ in range(length):
        moves = list(world.moves())
        if not moves:
            return
        wanted = rng.random() < 0.05
        name, is_fault, move = rng.choice([move for move in moves if move[1] == wanted] or moves)
        names.append(name)
        if is_fault:
            world.spend(name)
        try:
            move(world)
        except Violation as violation:
            raise Violation(f"{violation}\n" + "\n".join(names)) from None
        yield world, names


def steps(path: tuple[Any, ...]) -> list[str]:
    """The moves of a path, oldest first."""
    names: list[str] = []
    while path:
        path, name = path
        names.append(name)
    return names[::-1]


def rounds_to_goal(world: World, seed: int, most: int = 60, change: bool = False) -> int | None:
    """Without faults, each round doing every move that is possible in random order: rounds until the goal; None: never."""
    rng = random.Random(seed)
    world = world if change else world.copy()
    for number in range(most):
        if world.is_at_goal():
            return number
        names = [name for name, is_fault, _ in world.moves() if not is_fault]
        rng.shuffle(names)
        for chosen in names:
            move = next((m for name, _, m in world.moves() if name == chosen), None)
            if move is not None:
                move(world)
    return None
