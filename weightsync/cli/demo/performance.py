"""One run from start to end: bring the processes up, let them work by the schedule, bring them down."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from weightsync.cli.demo.crew import ChildFailedError, Crew
from weightsync.cli.demo.events import (
    Begin,
    Connect,
    Event,
    ServerDone,
    ServerUp,
    Stop,
    TrainerDone,
    TrainerUp,
)
from weightsync.cli.demo.schedule import plan_phases
from weightsync.cli.demo.settings import Settings, pick_rate
from weightsync.cli.demo.tally import Tally

TICK_S = 0.1
START_S = 180.0  # imports, model building and the first version, on a slow machine
FINISH_S = 60.0  # after the schedule's end: the last optimizer step, the last version, the last requests
EXIT_S = 10.0
LEAD_S = 0.2  # from the order to begin until the first phase, so that all start together

EventKind = TypeVar("EventKind", bound=Event)


class Performance:
    """Runs the crew and folds what it reports into `tally`, which stays readable after a failure or Ctrl-C."""

    def __init__(self, settings: Settings, tick: Callable[[Tally], None]) -> None:
        self.tally = Tally(settings)
        self.was_interrupted = False
        self._settings = settings
        self._tick = tick

    def run(self) -> None:
        """ChildFailedError: a child died, hung or did not exit cleanly. In no case is one left running."""
        with Crew(self._settings) as crew:
            try:
                self._start(crew)
                self._await(crew, TrainerDone, 1, LEAD_S + self._settings.seconds + FINISH_S)
            except KeyboardInterrupt:
                self.was_interrupted = True
                if self.tally.schedule is None:
                    return
            self._finish(crew)

    def _start(self, crew: Crew) -> None:
        servers = self._settings.server_names
        up = self._await(crew, TrainerUp, 1, START_S)
        crew.tell(Connect(up[0].address), *servers)
        ready = self._await(crew, ServerUp, len(servers), START_S)
        rate = self._settings.rate
        if rate is None:
            rate = pick_rate(max(server.pass_s for server in ready), self._settings.size)
        self.tally.rate = rate
        self.tally.schedule = plan_phases(time.monotonic() + LEAD_S, self._settings.seconds)
        crew.tell(Begin(self.tally.schedule, rate))

    def _finish(self, crew: Crew) -> None:
        """Servers first: the publisher stays until none of them needs it."""
        servers = self._settings.server_names
        crew.tell(Stop(), *servers)
        self._await(crew, ServerDone, len(servers), FINISH_S)
        complaints = crew.close(EXIT_S)
        self.tally.is_over = True
        if complaints:
            raise ChildFailedError("; ".join(complaints))

    def _await(self, crew: Crew, kind: type[EventKind], count: int, timeout_s: float) -> list[EventKind]:
        """Fold events until `count` of this kind came; those are returned."""
        deadline_s = time.monotonic() + timeout_s
        found: list[EventKind] = []
        while len(found) < count:
            for event in crew.events(TICK_S):
                self.tally.fold(event)
                if isinstance(event, kind):
                    found.append(event)
            self._tick(self.tally)
            if time.monotonic() > deadline_s:
                raise ChildFailedError(
                    f"{len(found)} of {count} {kind.__name__} reports within {timeout_s:.0f} s; "
                    "is this machine overloaded? A smaller --model-size or fewer --replicas may help"
                )
        return found
