"""Which replicas may switch to a version that they are ready for. Decisions only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from weightsync.errors import ConfigError
from weightsync.standing import of_key

Kind = Literal["each", "together", "canary", "manual"]


@dataclass(frozen=True, slots=True)
class Policy:
    """`each`: when a replica is ready. `together`: when all present are. `canary`: the first `canaries` by name at once, the
    rest when promoted. `manual`: all when promoted."""

    kind: Kind = "each"
    canaries: int = 0

    def __str__(self) -> str:
        return f"canary={self.canaries}" if self.kind == "canary" else self.kind


def parse_policy(text: str) -> Policy:
    """Reads `each`, `together`, `canary=N` or `manual`. Raises ConfigError."""
    match text.partition("="):
        case ("each" | "together" | "manual") as kind, "", "":
            return Policy(kind)
        case "canary", "=", count if count.isascii() and count.isdigit() and int(count) > 0:
            return Policy("canary", int(count))
    raise ConfigError(f"policy={text!r}: choose each, together, canary=N (N at least 1) or manual")


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """Where a replica stands. `target`: the version it votes on; `is_ready`: all its ranks did; `decided`: the newest that
    it committed; `refused`: versions that it will not go to."""

    is_present: bool
    target: int | None
    is_ready: bool
    decided: int | None
    refused: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Verdict:
    """`permit`: replicas that may commit the version they are ready for. `reject`: replicas that should give up the version
    they vote on, since it will not be permitted. Values are versions."""

    permit: Mapping[str, int]
    reject: Mapping[str, int]


class Rollout:
    """Remembers what was promoted, released and withdrawn; ask `decide` after every change."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._promotions: set[int] = set()
        self._released: set[int] = set()
        self._withdrawn: set[int] = set()

    def promote(self, version: int, known: Collection[int]) -> str | None:
        """Let all replicas go to `version`, one of the `known` ones; what is wrong, or None. Waiting for a lower one ends."""
        if self.policy.kind in ("each", "together"):
            return f"policy {self.policy} promotes by itself; promote() is for canary=N and manual"
        if version in self._withdrawn:
            return f"version {_number(version)} was withdrawn or rolled back; publish another"
        if version < self.promoted:
            return f"version {_number(version)} is older than {_number(self.promoted)}, which was promoted already"
        if version not in known:
            return f"version {_number(version)} is unknown or no longer held; there are {sorted(map(_number, known)) or 'none'}"
        self._promotions.add(version)
        return None

    @property
    def promoted(self) -> int:
        """The newest promotion that was not rolled back; 0 before the first."""
        return max(self._promotions - self._withdrawn, default=0)

    def withdraw(self, version: int) -> None:
        """The version is rolled back, or should not exist: it is never permitted again."""
        self._withdrawn.add(version)

    def decide(self, replicas: Mapping[str, ReplicaView]) -> Verdict:
        """For each replica (by name, absent ones too): may it commit, must it give up, or neither."""
        permit: dict[str, int] = {}
        reject: dict[str, int] = {}
        self._release(replicas)
        canaries = set(sorted(replicas)[: self.policy.canaries])
        for name, view in replicas.items():
            if view.target is None:
                continue
            if view.target in self._withdrawn or self._is_void(view.target, name in canaries, replicas):
                reject[name] = view.target
            elif view.is_ready and self._may_commit(view.target, name in canaries):
                permit[name] = view.target
        return Verdict(permit, reject)

    def _release(self, replicas: Mapping[str, ReplicaView]) -> None:
        """With `together`: a version for which every present replica is ready is open to all from then on."""
        if self.policy.kind != "together":
            return
        present = [view for view in replicas.values() if view.is_present]
        for version in {view.target for view in present if view.is_ready}:
            if version is not None and all(
                view.decided == version or (view.is_ready and view.target == version) for view in present
            ):
                self._released.add(version)

    def _may_commit(self, version: int, is_canary: bool) -> bool:
        match self.policy.kind:
            case "each":
                return True
            case "together":
                return version in self._released
            case _:
                return is_canary or version == self.promoted

    def _is_void(self, version: int, is_canary: bool, replicas: Mapping[str, ReplicaView]) -> bool:
        match self.policy.kind:
            case "each":
                return False
            case "together":
                return version not in self._released and any(
                    view.is_present and (version in view.refused or _is_past(view, version))
                    for view in replicas.values()
                )
            case _:
                return not is_canary and version < self.promoted


def _number(version: int) -> int:
    """As the publisher counts, without the epoch."""
    return of_key(version)[1]


def _is_past(view: ReplicaView, version: int) -> bool:
    """Whether the replica goes to a later version and will not come back for this one."""
    return (view.target or 0) > version or (view.decided or 0) > version
