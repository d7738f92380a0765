"""When the trainer publishes and when it only trains, so that one run compares syncing on with syncing off."""

from __future__ import annotations

from dataclasses import dataclass

# Off and on alternate twice, so that a slow drift of the machine's speed falls on both alike.
SHARES = ((False, 1.0), (True, 2.0), (False, 1.0), (True, 2.0))


@dataclass(frozen=True, slots=True)
class Phase:
    """`[begin_s, end_s)` on the monotonic clock, which all processes of one host share."""

    begin_s: float
    end_s: float
    is_syncing: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    phases: tuple[Phase, ...]

    @property
    def begin_s(self) -> float:
        return self.phases[0].begin_s

    @property
    def end_s(self) -> float:
        return self.phases[-1].end_s

    def is_syncing(self, at_s: float) -> bool:
        """Whether the trainer publishes at this time. False before the run, True after it (the last version)."""
        for phase in self.phases:
            if at_s < phase.end_s:
                return phase.is_syncing and at_s >= phase.begin_s
        return self.phases[-1].is_syncing


def plan_phases(begin_s: float, seconds: float) -> Schedule:
    whole = sum(share for _, share in SHARES)
    phases = []
    for is_syncing, share in SHARES:
        end_s = begin_s + seconds * share / whole
        phases.append(Phase(begin_s, end_s, is_syncing))
        begin_s = end_s
    return Schedule(tuple(phases))
