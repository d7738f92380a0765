"""Slots of the publisher, who leases them, and what became of each version. No messages: facts and decisions.

A slot with leases is never overwritten. A lease is *reading* (ends when the member verified, refused, or died; can be
evicted) or *pinned* (the slot itself serves on that member; ends only when it says so or its process is gone).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from weightsync.errors import VersionError
from weightsync.moves import Int64s
from weightsync.types import MemberReport
from weightsync.wire import messages as m

_RECORDS = 64
Lease = Literal["reading", "pinned"]


@dataclass(slots=True)
class SlotState:
    """One staging slot, on all ranks: `version` 0 is empty. `digests`: of all cells of each rank, None until it has sealed
    its part. `cells`: how many cells of each rank are (or will be) there. `edition`: of the arrangement they are of.
    `inherited`: what it holds since before this coordinator, which can't be read from here but may serve somewhere."""

    version: int = 0
    generation: int = 0
    is_sealed: bool = False
    digests: list[Int64s | None] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    edition: int = -1
    begun: set[int] = field(default_factory=set)
    extending: set[int] = field(default_factory=set)
    leases: dict[str, Lease] = field(default_factory=dict)
    inherited: int = 0

    def holds(self, version: int) -> bool:
        """Whether a lease for this version is one of this slot."""
        return version > 0 and version in (self.version, self.inherited)

    def late_ranks(self) -> list[int]:
        """Ranks that have not sealed their part."""
        return [rank for rank, digests in enumerate(self.digests) if digests is None]

    def seal_part(self, rank: int, digests: bytes) -> str | None:
        """A rank's part is complete, or has grown; what is wrong with it."""
        found = np.frombuffer(digests[: len(digests) // 8 * 8], "<u8").astype(np.int64)
        if len(found) < self.cells[rank]:
            return f"sealed {len(found)} cells of {self.cells[rank]}"
        self.digests[rank], self.cells[rank] = found, len(found)
        return None


@dataclass(slots=True)
class VersionRecord:
    """What became of one version; `members` holds those that were there when it began, and of those that came `late` the
    ones that have it (nobody waits for them)."""

    version: int
    started: float
    members: dict[str, MemberReport]
    sealed: float | None = None
    aborted: str | None = None
    lost: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)

    def report_of(self, label: str, version: int) -> MemberReport | None:
        """Of a member that has `version`; if that is this one, there is one from now on."""
        if version == self.version and label not in self.members:
            self.late.add(label)
            self.members[label] = MemberReport()
        return self.members.get(label)

    def raise_if_refused(self) -> None:
        """Raise VersionError if the version was aborted, a member refused it, or every member was lost."""
        if self.aborted:
            raise VersionError(f"version {self.version} was aborted: {self.aborted}")
        errors = [
            f"{name}: {report.error}"
            for name, report in self.members.items()
            if report.error and name not in self.lost
        ]
        if errors:
            raise VersionError(
                f"version {self.version} was refused, the previous one still serves there. {'; '.join(errors)}"
            )
        if self.members and len(self.lost) == len(self.members):
            raise VersionError(
                f"version {self.version}: every member was lost: {', '.join(sorted(self.lost))}"
            )

    def missing(self, stage: str) -> list[str]:
        """Members that have not reached `stage` ("ready" or "live") and still may."""
        return [
            label
            for label, report in self.members.items()
            if label not in self.lost | self.late
            and (report.ready_s if stage == "ready" else report.live_s) is None
        ]

    def reached(self, stage: str) -> float | None:
        """Seconds from publish() until the last member reached `stage`; None if one has not."""
        times = [
            report.ready_s if stage == "ready" else report.live_s
            for label, report in self.members.items()
            if label not in self.lost and label not in self.late
        ]
        return None if not times or None in times else max(t for t in times if t is not None)


class Versions:
    """`newest`: the newest that is sealed; `begun`: the newest that any rank began; `skipped`: the last that found no slot;
    `inherited`: the newest that a rank began before this coordinator."""

    def __init__(self) -> None:
        self.slots: list[SlotState] = []
        self.records: deque[VersionRecord] = deque(maxlen=_RECORDS)
        self.newest = self.begun = self.skipped = self.inherited = 0
        self._generation = 0

    # ---- lookup

    def slot_of(self, version: int) -> SlotState | None:
        return next((slot for slot in self.slots if slot.version == version and version), None)

    def number_of(self, slot: SlotState) -> int:
        return next(number for number, one in enumerate(self.slots) if one is slot)

    def staging(self) -> SlotState | None:
        """The slot that is being filled."""
        return next((slot for slot in self.slots if slot.version and not slot.is_sealed), None)

    def held(self) -> list[int]:
        """Versions that are in slots."""
        return [slot.version for slot in self.slots if slot.version]

    def record(self, version: int) -> VersionRecord | None:
        return next((r for r in reversed(self.records) if r.version == version), None)

    def is_older(self, version: int) -> bool:
        """Whether the version is older than all that are remembered."""
        return bool(self.records) and version < self.records[0].version

    def report(self, version: int) -> m.Report | None:
        """What is known of a version."""
        record = self.record(version)
        if record is None:
            return None
        staged = None if record.sealed is None else record.sealed - record.started
        members = {name: msgspec.structs.replace(report) for name, report in record.members.items()}
        return m.Report(staged, record.reached("ready"), record.reached("live"), members)

    def holders(self, labels: dict[str, str]) -> list[str]:
        """Who keeps slots from being overwritten, in words; `labels` of instances."""
        return [
            f"{labels.get(instance, 'a silent member')} ({kind} version {slot.version or slot.inherited})"
            for slot in self.slots
            for instance, kind in slot.leases.items()
        ]

    # ---- a version's life

    def inherit(self, enlist: m.Enlist) -> None:
        """A rank outlived another coordinator. What its slots hold stays until each of its readers has said what it serves."""
        self.inherited = max(self.inherited, enlist.version, *(version for version, _ in enlist.held))
        self.newest, self.begun = max(self.newest, enlist.version), max(self.begun, self.inherited)
        for slot, (version, generation) in zip(self.slots, enlist.held, strict=False):
            self._generation = max(self._generation, generation)
            if version:
                slot.inherited = version
                slot.leases.update(dict.fromkeys(enlist.readers, "pinned"))

    def begin(
        self, version: int, number: int, cells: list[int], edition: int, members: Collection[str], now: float
    ) -> None:
        """Staging of `version` in slot `number` starts; `members` are waited for."""
        self._generation += 1
        self.slots[number] = SlotState(version, self._generation, False, [None] * len(cells), cells, edition)
        self.begun = version
        self.records.append(VersionRecord(version, now, {label: MemberReport() for label in members}))

    def seal(self, slot: SlotState, now: float) -> None:
        """The version is complete and immutable."""
        slot.is_sealed, self.newest = True, slot.version
        record = self.record(slot.version)
        if record is not None:
            record.sealed = now

    def free_slot(self) -> int | None:
        """A slot that may be overwritten: no leases, not the newest sealed version. Empty ones first, then the oldest.

        The newest goes if nobody reads it and all others serve at members: they do so until there is something newer.
        """
        free = [
            s
            for s, slot in enumerate(self.slots)
            if not slot.leases and (slot.version != self.newest or not slot.version)
        ]
        if not free:
            serving = [s for s, slot in enumerate(self.slots) if "pinned" in slot.leases.values()]
            idle = [s for s, slot in enumerate(self.slots) if not slot.leases]
            free = idle if len(serving) + len(idle) == len(self.slots) else []
        return min(free, key=lambda s: self.slots[s].version, default=None)

    def evictable(self) -> int | None:
        """The oldest slot that is only being read."""
        readable = [
            s
            for s, slot in enumerate(self.slots)
            if slot.version != self.newest and all(kind == "reading" for kind in slot.leases.values())
        ]
        return min(readable, key=lambda s: self.slots[s].version, default=None)

    # ---- what members say

    def verified(self, label: str, message: m.Verified, now: float) -> None:
        """The member holds the version; older ones count as reached."""
        for record in self.records:
            report = record.report_of(label, message.version)
            if report is not None and record.version <= message.version and report.ready_s is None:
                report.transport, report.ready_s, report.error = message.transport, now - record.started, None
                if record.version == message.version:
                    report.read_s, report.relayed_bytes = message.read_s, message.relayed_bytes

    def live(self, label: str, transport: str, message: m.Live, now: float) -> None:
        """The version serves on the member; older ones count as reached."""
        for record in self.records:
            report = record.report_of(label, message.version)
            if report is not None and record.version <= message.version and report.live_s is None:
                report.transport = report.transport or transport
                report.live_s, report.error = now - record.started, None
                report.ready_s = report.live_s if report.ready_s is None else report.ready_s
                if record.version == message.version:
                    report.swap_pause_s = message.pause_s

    def failed(self, label: str, message: m.Failed) -> None:
        """The member refused the version."""
        record = self.record(message.version)
        if record is not None and label in record.members:
            record.members[label].error = message.error

    def lost(self, label: str, why: str) -> None:
        """The member is gone; nobody waits for it any more."""
        for record in self.records:
            report = record.members.get(label)
            if report is not None and report.live_s is None:
                record.lost.add(label)
                report.error = report.error or why

    # ---- leases

    def release(self, instance: str, version: int) -> None:
        """The member is done with the version's slot."""
        for slot in self.slots:
            if slot.holds(version):
                slot.leases.pop(instance, None)

    def keep_lease(self, instance: str, version: int) -> None:
        """The slot itself serves there."""
        slot = self.slot_of(version)
        if slot is not None and instance in slot.leases:
            slot.leases[instance] = "pinned"

    def keep_only(self, instance: str, versions: Collection[int]) -> None:
        """The member serves from these versions' slots and no others."""
        for slot in self.slots:
            if not any(map(slot.holds, versions)):
                slot.leases.pop(instance, None)

    def end_leases(self, instance: str, *, keep_pinned: bool) -> None:
        """The member no longer reads; if it is gone, it does not serve either."""
        for slot in self.slots:
            if not keep_pinned or slot.leases.get(instance) == "reading":
                slot.leases.pop(instance, None)
