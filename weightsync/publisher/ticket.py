"""The ticket of one published version."""

from __future__ import annotations

from typing import Literal

from weightsync.errors import UsageError
from weightsync.types import MemberReport, SyncReport
from weightsync.wire.coordinator import Coordinator
from weightsync.wire.fleet import Fleet
from weightsync.wire.layout import Layout

Stage = Literal["staged", "ready", "live"]
STAGES = ("staged", "ready", "live")


class Ticket:
    """Follows one version through the fleet. `skipped`: no slot was free and `when_full="skip"`, nothing was sent."""

    def __init__(self, coordinator: Coordinator | None, layout: Layout, version: int, epoch: int) -> None:
        self._coordinator = coordinator
        self._report = SyncReport(version, epoch, len(layout.tensors), layout.size_bytes)
        self.version = version

    @property
    def skipped(self) -> bool:
        return self._coordinator is None

    def wait(self, stage: Stage, timeout_s: float = 30.0) -> SyncReport:
        """Block until the version is `staged` (sealed in a slot), `ready` (verified by every member that was there
        when it began) or `live` (serving on all of them, or overtaken by a newer one).

        Raises SyncTimeoutError that names who is missing, and VersionError as soon as a member refuses the version.
        """
        if stage not in STAGES:
            raise UsageError(f"stage {stage!r}: wait for one of {', '.join(STAGES)}")
        if self._coordinator is not None and stage != "staged":
            self._coordinator.wait_stage(self.version, stage, timeout_s)
        return self.report

    @property
    def report(self) -> SyncReport:
        """What is known so far."""
        if self._coordinator is not None:
            self._coordinator.look(self._fill)
        return self._report

    def _fill(self, fleet: Fleet) -> None:
        record = fleet.record(self.version)
        if record is None:
            return
        report = self._report
        report.stage_s = None if record.sealed is None else record.sealed - record.started
        report.ready_s, report.live_s = record.reached("ready"), record.reached("live")
        report.members = {
            name: MemberReport(m.transport, m.read_s, m.ready_s, m.live_s, m.swap_pause_s, m.error)
            for name, m in record.members.items()
        }

    def __repr__(self) -> str:
        return f"Ticket(version={self.version}{', skipped' if self.skipped else ''})"
