"""The ticket of one published version."""

from __future__ import annotations

from typing import Literal

from weightsync.errors import UsageError
from weightsync.publisher.line import Line
from weightsync.types import SyncReport
from weightsync.wire import messages as m
from weightsync.wire.layout import Catalogue

Stage = Literal["staged", "ready", "live"]
STAGES = ("staged", "ready", "live")


class Ticket:
    """Follows one version through the fleet. `skipped`: no slot was free and `when_full="skip"`, nothing was sent."""

    def __init__(self, line: Line | None, catalogue: Catalogue, version: int, epoch: int) -> None:
        self._line = line
        self._report = SyncReport(version, epoch, len(catalogue.tensors), catalogue.size_bytes)
        self.version = version

    @property
    def skipped(self) -> bool:
        return self._line is None

    def wait(self, stage: Stage, timeout_s: float = 30.0) -> SyncReport:
        """Block until the version is `staged` (sealed in the slots of all ranks), `ready` (verified by every member that
        was there when it began) or `live` (serving on all of them, or overtaken by a newer one).

        Raises SyncTimeoutError that names who is missing, and VersionError as soon as a member refuses the version or a
        rank could not stage it.
        """
        if stage not in STAGES:
            raise UsageError(f"stage {stage!r}: wait for one of {', '.join(STAGES)}")
        if self._line is not None:
            self._line.ask(m.AwaitStage, self.version, stage, timeout_s, timeout_s=timeout_s)
        return self.report

    @property
    def report(self) -> SyncReport:
        """What is known so far."""
        found = None if self._line is None else self._line.report(self.version)
        if found is not None:
            report = self._report
            report.stage_s, report.ready_s, report.live_s = found.stage_s, found.ready_s, found.live_s
            report.members = dict(found.members)
        return self._report

    def __repr__(self) -> str:
        return f"Ticket(version={self.version}{', skipped' if self.skipped else ''})"
