"""The coordinator's state: members, slots, leases and versions. No sockets, no threads: messages in, messages out.

A slot with leases is never overwritten. A lease is *reading* (ends when the member verified, refused, or died; can be
evicted) or *pinned* (the slot itself serves on that member; ends only when it says so or its process is gone).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from weightsync.config import MAX_MEMBERS, MEMBER_TIMEOUT_S
from weightsync.types import FleetStatus, MemberReport, MemberStatus
from weightsync.wire import messages as m
from weightsync.wire.layout import Layout

_RECORDS = 64
READING = "reading"
PINNED = "pinned"


@dataclass(slots=True)
class Member:
    """A subscriber that said Hello."""

    hello: m.Hello
    label: str
    last_seen: float
    welcomed: bool = False
    newer_than: int | None = None
    live_version: int | None = None
    state: str = "joining"
    transport: str = ""
    error: str | None = None


@dataclass(slots=True)
class SlotState:
    """One staging slot: `version` 0 is empty; `digests` None is not sealed yet."""

    version: int = 0
    generation: int = 0
    digests: bytes | None = None
    leases: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class VersionRecord:
    """What became of one version; `members` holds those that were there when it began, and of those that came `late` the
    ones that it went live on (nobody waits for them)."""

    version: int
    started: float
    members: dict[str, MemberReport]
    sealed: float | None = None
    aborted: str | None = None
    lost: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)

    def missing(self, stage: str) -> list[str]:
        """Members that have not reached `stage` ("ready" or "live") and still may."""
        return [
            label
            for label, report in self.members.items()
            if label not in self.lost and (report.ready_s if stage == "ready" else report.live_s) is None
        ]

    def reached(self, stage: str) -> float | None:
        """Seconds from publish() until the last member reached `stage`; None if one has not."""
        times = [
            report.ready_s if stage == "ready" else report.live_s
            for label, report in self.members.items()
            if label not in self.lost and label not in self.late
        ]
        return None if not times or None in times else max(t for t in times if t is not None)


class Fleet:
    """Feed it messages and ticks under one lock; send what `drain()` yields."""

    def __init__(self, *, address: str, publisher: str, epoch: int, slots: int) -> None:
        self.address = address
        self.publisher = publisher
        self.epoch = epoch
        self.slots = [SlotState() for _ in range(slots)]
        self.members: dict[bytes, Member] = {}
        self.records: deque[VersionRecord] = deque(maxlen=_RECORDS)
        self.newest = 0
        self.fenced_by: str | None = None
        self.refused = 0
        self._layout: Layout | None = None
        self._offers: dict[str, dict[str, str]] = {}
        self._out: list[tuple[bytes, m.ToMember]] = []

    # ---- from the publisher

    def register(self, layout: Layout, offers: dict[str, dict[str, str]]) -> None:
        """The layout is settled: members that waited for it are welcomed."""
        self._layout, self._offers = layout, offers
        for route, member in self.members.items():
            self._welcome(route, member)

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
            serving = [s for s, slot in enumerate(self.slots) if PINNED in slot.leases.values()]
            idle = [s for s, slot in enumerate(self.slots) if not slot.leases]
            free = idle if len(serving) + len(idle) == len(self.slots) else []
        return min(free, key=lambda s: self.slots[s].version, default=None)

    def take_slot(self) -> int | None:
        """As `free_slot`; what was in it is not offered to anybody from here on."""
        number = self.free_slot()
        if number is not None:
            self.slots[number] = SlotState()
        return number

    def evict(self) -> int | None:
        """Take the oldest slot that is only being read away from its readers; they restart on the newest version."""
        readable = [
            s
            for s, slot in enumerate(self.slots)
            if slot.version != self.newest and all(kind == READING for kind in slot.leases.values())
        ]
        victim = min(readable, key=lambda s: self.slots[s].version, default=None)
        if victim is not None:
            self._break_leases(self.slots[victim], "evicted: the publisher reused the slot")
        return victim

    def begin(self, version: int, slot: int, generation: int, now: float) -> None:
        """Staging of `version` starts; members with a standing pull are told, and hold a lease from here on."""
        self.slots[slot] = SlotState(version, generation)
        reports = {member.label: MemberReport() for member in self.members.values() if member.welcomed}
        self.records.append(VersionRecord(version, now, reports))
        for route, member in self.members.items():
            if member.newer_than is not None and version > member.newer_than:
                self._grant(route, member, self.slots[slot])

    def seal(self, version: int, digests: bytes, now: float) -> None:
        """The version is complete and immutable."""
        slot = self._slot_of(version)
        record = self.record(version)
        if slot is None or record is None:
            return
        slot.digests, record.sealed, self.newest = digests, now, version
        for route, member in self.members.items():
            if member.hello.instance in slot.leases:
                self._send(route, m.Seal(self.epoch, version, digests))

    def abort(self, version: int, reason: str) -> None:
        """The version will not exist (staging failed); its slot is empty again."""
        slot, record = self._slot_of(version), self.record(version)
        if record is not None:
            record.aborted = reason
        if slot is not None:
            self._break_leases(slot, reason)
            slot.version, slot.digests = 0, None

    def fence(self, reason: str) -> None:
        """This publisher is over: nobody is served any more."""
        if self.fenced_by is None:
            self.fenced_by = reason
            self.farewell(reason)

    def farewell(self, reason: str) -> None:
        for route in self.members:
            self._send(route, m.Farewell(self.epoch, reason))

    # ---- from members

    def receive(self, route: bytes, message: m.FromMember, now: float) -> None:
        """One message of a member."""
        match message:
            case m.AskStatus():
                self._send(route, m.Status(self.status(now)))
                return
            case m.AskLayout():
                if self._layout is not None:
                    self._send(route, m.Welcome(self.epoch, self.publisher, self._layout, {}))
                return
            case m.Hello():
                self._hello(route, message, now)
                return
            case m.TakeOver():
                return  # decided by the coordinator, which knows the peer's key
        member = self.members.get(route)
        if member is None or message.epoch != self.epoch:
            if message.epoch > self.epoch:
                self.fence(f"a member follows epoch {message.epoch}, newer than {self.epoch}")
            elif not isinstance(message, m.Bye):
                self._send(route, m.Unknown(self.epoch))
            return
        member.last_seen = now
        match message:
            case m.Heartbeat():
                member.state, member.transport = message.state, message.transport
                member.live_version = message.live_version
                self._send(route, m.Pong(self.epoch, self.newest))
            case m.Pull():
                self._pull(route, member, message.newer_than)
            case m.Verified():
                self._verified(member, message, now)
            case m.Live():
                self._live(member, message, now)
            case m.Release():
                self._release(member.hello.instance, message.version)
            case m.Failed():
                self._failed(member, message)
            case m.Bye():
                self._remove(route, "left", keep_pinned=False)

    def refuse(self, route: bytes, reason: str) -> None:
        """Answer bytes that are not a message of ours."""
        self.refused += 1
        self._send(route, m.Refused(self.epoch, reason))

    def gone(self, instance: str) -> None:
        """The process behind `instance` has ended: every lease it held is over."""
        for route, member in list(self.members.items()):
            if member.hello.instance == instance:
                self._remove(route, "its process ended", keep_pinned=False)
        for slot in self.slots:
            slot.leases.pop(instance, None)

    def tick(self, now: float) -> None:
        """Drop members that have been silent too long. A pinned slot stays theirs: the process may only be stopped."""
        for route, member in list(self.members.items()):
            silent = now - member.last_seen
            if silent > MEMBER_TIMEOUT_S:
                self._remove(route, f"silent for {silent:.1f} s", keep_pinned=True)

    # ---- what it knows

    def record(self, version: int) -> VersionRecord | None:
        return next((r for r in reversed(self.records) if r.version == version), None)

    def holders(self) -> list[str]:
        """Who keeps slots from being overwritten, in words."""
        labels = {member.hello.instance: member.label for member in self.members.values()}
        return [
            f"{labels.get(instance, 'a silent member')} ({kind} version {slot.version})"
            for slot in self.slots
            for instance, kind in slot.leases.items()
        ]

    def laggards(self, version: int) -> list[str]:
        """Servers whose live version is below `version`, idle ones too."""
        return [
            f"{member.label} (live {member.live_version})"
            for member in self.members.values()
            if member.welcomed and member.hello.role == "server" and (member.live_version or 0) < version
        ]

    def status(self, now: float) -> FleetStatus:
        rows = [
            MemberStatus(
                name=member.label, host=member.hello.host, pid=member.hello.pid, role=member.hello.role,
                transport=member.transport, swap=member.hello.swap, state=member.state,
                live_version=member.live_version,
                lag=None if member.live_version is None else max(0, self.newest - member.live_version),
                last_seen_s=round(now - member.last_seen, 3), error=member.error,
            )
            for member in self.members.values()
        ]  # fmt: skip
        layout = self._layout
        return FleetStatus(
            self.address, self.epoch, self.publisher, self.newest, len(self.slots),
            layout.size_bytes if layout else 0, len(layout.tensors) if layout else 0, rows,
        )  # fmt: skip

    def drain(self) -> Iterator[tuple[bytes, m.ToMember]]:
        """Messages to send, oldest first; each is yielded once."""
        out, self._out = self._out, []
        yield from out

    # ---- steps

    def _send(self, route: bytes, message: m.ToMember) -> None:
        self._out.append((route, message))

    def _slot_of(self, version: int) -> SlotState | None:
        return next((slot for slot in self.slots if slot.version == version and version), None)

    def _hello(self, route: bytes, hello: m.Hello, now: float) -> None:
        if hello.last_epoch > self.epoch:
            self.fence(f"{hello.name} follows epoch {hello.last_epoch}, newer than {self.epoch}")
            self._send(route, m.Refused(self.epoch, "this publisher is older than the one you followed"))
            return
        label = ""
        for other, member in list(self.members.items()):
            if member.hello.instance == hello.instance:  # a reconnect: not lost, but no longer reading
                label = member.label
                del self.members[other]
                self._end_leases(hello.instance, keep_pinned=True)
            elif other == route:
                self._remove(other, "another member took over its connection", keep_pinned=False)
        held = hello.holds if hello.holds and hello.last_epoch == self.epoch else []
        for slot in self.slots:
            if slot.version not in held:
                slot.leases.pop(hello.instance, None)
        if len(self.members) >= MAX_MEMBERS:
            self._send(route, m.Refused(self.epoch, f"{MAX_MEMBERS} members are connected already"))
            return
        if not label:
            labels = {member.label for member in self.members.values()}
            label = hello.name if hello.name not in labels else f"{hello.name}@{hello.pid}"
            label = label if label not in labels else f"{label}.{hello.instance[:6]}"
        member = self.members[route] = Member(hello, label, now)
        if self._layout is not None:
            self._welcome(route, member)

    def _welcome(self, route: bytes, member: Member) -> None:
        if self._layout is not None:
            member.welcomed, member.state = True, "welcomed"
            self._send(route, m.Welcome(self.epoch, self.publisher, self._layout, self._offers))

    def _pull(self, route: bytes, member: Member, newer_than: int) -> None:
        member.newer_than = newer_than
        newest = max(self.slots, key=lambda slot: slot.version)
        if newest.version > newer_than:
            self._grant(route, member, newest)

    def _grant(self, route: bytes, member: Member, slot: SlotState) -> None:
        member.newer_than = None
        kind = (
            READING if member.hello.holds is None else PINNED
        )  # what may go live there is not taken away any more
        slot.leases.setdefault(member.hello.instance, kind)
        self._send(route, m.Announce(self.epoch, slot.version, self.slots.index(slot), slot.generation))
        if slot.digests is not None:
            self._send(route, m.Seal(self.epoch, slot.version, slot.digests))

    def _verified(self, member: Member, message: m.Verified, now: float) -> None:
        slot = self._slot_of(message.version)
        if slot is not None and member.hello.instance in slot.leases:
            if message.holds_lease:
                slot.leases[member.hello.instance] = PINNED
            else:
                del slot.leases[member.hello.instance]
        member.error = None
        for record in self.records:
            report = record.members.get(member.label)
            if report is not None and record.version <= message.version and report.ready_s is None:
                report.transport, report.ready_s, report.error = message.transport, now - record.started, None
                if record.version == message.version:
                    report.read_s = message.read_s

    def _live(self, member: Member, message: m.Live, now: float) -> None:
        member.live_version = message.version
        for record in self.records:
            if record.version == message.version and member.label not in record.members:
                record.late.add(member.label)
                record.members[member.label] = MemberReport(member.transport)
            report = record.members.get(member.label)
            if report is not None and record.version <= message.version and report.live_s is None:
                report.live_s, report.error = now - record.started, None
                report.ready_s = report.live_s if report.ready_s is None else report.ready_s
                if record.version == message.version:
                    report.swap_pause_s = message.pause_s

    def _release(self, instance: str, version: int) -> None:
        slot = self._slot_of(version)
        if slot is not None:
            slot.leases.pop(instance, None)

    def _failed(self, member: Member, message: m.Failed) -> None:
        self._release(member.hello.instance, message.version)
        member.error = message.error
        record = self.record(message.version)
        if record is not None and member.label in record.members:
            record.members[member.label].error = message.error

    def _break_leases(self, slot: SlotState, reason: str) -> None:
        for route, member in self.members.items():
            if slot.leases.pop(member.hello.instance, None) is not None:
                self._send(route, m.Abort(self.epoch, slot.version, reason))
        slot.leases.clear()

    def _remove(self, route: bytes, why: str, *, keep_pinned: bool) -> None:
        member = self.members.pop(route)
        self._end_leases(member.hello.instance, keep_pinned=keep_pinned)
        for record in self.records:
            report = record.members.get(member.label)
            if report is not None and report.live_s is None:
                record.lost.add(member.label)
                report.error = report.error or why

    def _end_leases(self, instance: str, *, keep_pinned: bool) -> None:
        for slot in self.slots:
            if not keep_pinned or slot.leases.get(instance) == READING:
                slot.leases.pop(instance, None)
