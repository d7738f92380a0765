"""One life of the publisher as this subscriber sees it: its catalogue, the plan made for it, and the data paths."""

from __future__ import annotations

import ctypes
import logging
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from weightsync import _native
from weightsync._native import layout as col
from weightsync.config import HUGE_PAGE
from weightsync.errors import ConfigError, LayoutError, TransportError, WeightSyncError
from weightsync.segment import Segment, round_up
from weightsync.tensors import Entry, dtype_name
from weightsync.versioning.swap.mode import SwapMode, Uint64s, find_doubled
from weightsync.wire import messages as m
from weightsync.wire.layout import Boxes, Catalogue
from weightsync.wire.plan import Matches, Plan, Want, make_plan, match_names
from weightsync.wire.registry import ladder, make_reader, transport_names
from weightsync.wire.transport import Environment, Reader, ReadJob

log = logging.getLogger("weightsync")
CONNECT_S = 10.0
_MAX_READERS = 16
_PEER_FAILED = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user said about matching and transport."""

    transport: str
    allow_missing: tuple[str, ...]
    ignore: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What makes a plan, for any place the bytes may go to."""

    catalogue: Catalogue
    matches: Matches
    message: m.Plan

    def plan(self, wants: Sequence[Want]) -> Plan:
        message = self.message
        return make_plan(
            self.catalogue, wants, self.matches, message.boxes, message.ranks, message.wants, message.offsets
        )


class Session:
    """Connected to every rank that the plan reads. `verifier` digests a slot of ours as the plan lays it out."""

    def __init__(
        self, welcome: m.Welcome, matches: Matches, wants: list[Want], mode: SwapMode, environment: Environment,
        wanted: str,
    ) -> None:  # fmt: skip
        self.epoch = welcome.epoch
        self._offers = welcome.offers
        self._catalogue, self._matches, self._wants = welcome.catalogue, matches, wants
        self._mode, self._environment, self._wanted = mode, environment, wanted
        self._readers: dict[int, tuple[Reader, str]] = {}
        self._pool = ThreadPoolExecutor(_MAX_READERS, "weightsync-read")
        self._progress: list[ctypes.c_uint64] = []

    def use(self, message: m.Plan) -> None:
        """Follow this plan from now on. Raises ProtocolError, TransportError, LayoutError, CapacityError."""
        self.recipe = Recipe(self._catalogue, self._matches, message)
        self.plan = plan = self.recipe.plan(self._wants)
        self._parts = plan.parts()
        for rank, (_, part) in self._parts.items():
            if rank not in self._readers:
                if rank >= len(self._offers):
                    raise TransportError(f"a plan reads rank {rank} of {len(self._offers)}")
                self._readers[rank] = _connect(
                    self._offers[rank], rank, self._mode, self._environment, self._wanted
                )
            self._readers[rank][0].prepare(part)
        self._bind()
        self.verifier = verifier_of(plan)

    def _bind(self) -> None:
        plan, mode = self.plan, self._mode
        first = np.unique(plan.wants, return_index=True)[1] if len(plan.wants) else plan.wants
        offsets = dict(zip(plan.wants[first].tolist(), plan.offsets[first].tolist(), strict=True))
        segments: list[Segment] = []
        if mode.borrows_slots:
            if len(self._readers) != 1 or len(offsets) != len(plan.wants):
                raise LayoutError(
                    f"swap={mode.name!r} needs one publisher rank that holds each tensor as it is wanted here; "
                    f"{len(self._readers)} ranks hold {len(plan.wants)} pieces of {len(offsets)}"
                )
            span = round_up(int(plan.ends().max(initial=1)), HUGE_PAGE)
            segments = next(iter(self._readers.values()))[0].slot_segments(span)
        try:
            mode.bind(offsets, segments)
        finally:
            for segment in segments:
                segment.close()

    @property
    def transport(self) -> str:
        """Names of the transports in use."""
        return "+".join(sorted({name for _, name in self._readers.values()}))

    @property
    def received(self) -> int:
        """Bytes received of the version being read."""
        return sum(int(counter.value) for counter in self._progress)

    def read(
        self,
        announce: m.Announce,
        targets: Uint64s,
        digests: Uint64s,
        timeout_s: float,
        cancel: ctypes.c_uint32,
    ) -> None:
        """Move a version to `targets`, from all ranks at once. Raises EvictedError, SyncTimeoutError, TransportError."""
        jobs = [
            (self._readers[rank][0], ReadJob(
                announce.slot, announce.generation, targets[some], digests[some], timeout_s, ctypes.c_uint64(0), cancel
            ))
            for rank, (some, _) in self._parts.items()
        ]  # fmt: skip
        self._progress = [job.progress for _, job in jobs]
        if len(jobs) == 1:
            jobs[0][0].read(jobs[0][1])
            return
        failures: list[WeightSyncError] = []

        def run(reader: Reader, job: ReadJob) -> None:
            try:
                reader.read(job)
            except WeightSyncError as error:
                failures.append(error)
                cancel.value = cancel.value or _PEER_FAILED  # no use in reading on

        for future in wait([self._pool.submit(run, *job) for job in jobs]).done:
            future.result()
        if failures:
            if cancel.value == _PEER_FAILED:
                cancel.value = 0
            raise failures[0]

    def liveness_fds(self) -> list[int]:
        """Descriptors that become readable when a rank's process is gone."""
        found = [reader.liveness_fd() for reader, _ in self._readers.values()]
        return [fd for fd in found if fd is not None]

    def close(self) -> None:
        self._pool.shutdown()
        for reader, _ in self._readers.values():
            reader.close()


def open_session(
    welcome: m.Welcome,
    entries: list[Entry],
    mode: SwapMode,
    environment: Environment,
    choice: Choice,
    ask_plan: Callable[[Boxes], m.Plan],
) -> Session:
    """Match names, ask for a plan, choose transports, take over the tensors. Raises LayoutError,
    TransportError, CapacityError."""
    welcome.catalogue.validate()
    wants = wants_of(entries, mode.strides())
    matches = match_names(welcome.catalogue, wants, allow_missing=choice.allow_missing, ignore=choice.ignore)
    doubled = find_doubled([entries[number] for number in matches.wants])
    if doubled:
        raise LayoutError(f"written twice, since their memory overlaps: {', '.join(doubled)}")
    session = Session(welcome, matches, wants, mode, environment, choice.transport)
    try:
        session.use(ask_plan(matches.boxes))
    except BaseException:
        session.close()
        raise
    return session


def verifier_of(plan: Plan) -> _native.Program:
    """A program that digests the plan's boxes where they lie here."""
    table = plan.table.copy()
    table[:, col.SRC_STRIDE : col.SRC_STRIDE + 8] = table[:, col.DST_STRIDE : col.DST_STRIDE + 8]
    return _native.Program(table)


def mismatches(plan: Plan, found: np.ndarray, expected: np.ndarray) -> list[str]:
    """Names of the moves whose digests differ."""
    return [plan.names[number] for number in np.flatnonzero(found != expected)]


def wants_of(entries: list[Entry], strides: Sequence[tuple[int, ...]]) -> list[Want]:
    """What a server wants, written with these byte strides."""
    return [
        Want(entry.names, dtype_name(entry.tensor.dtype), entry.shape, entry.box, steps)
        for entry, steps in zip(entries, strides, strict=True)
    ]


def _connect(
    offers: dict[str, dict[str, str]], rank: int, mode: SwapMode, environment: Environment, wanted: str
) -> tuple[Reader, str]:
    """A connected and probed reader. `auto` walks the ladder; a transport asked for by name never falls back."""
    if wanted != "auto" and wanted not in transport_names():
        raise ConfigError(f"transport={wanted!r}: installed are auto, {', '.join(transport_names())}")
    if wanted != "auto" and wanted not in offers:
        raise TransportError(
            f"transport={wanted!r} was asked for, but the publisher offers {', '.join(offers)}"
        )
    skipped: list[str] = []
    for name in [wanted] if wanted != "auto" else ladder(list(offers)):
        reader = make_reader(name, environment)
        if mode.borrows_slots and not reader.caps.maps_slots:
            skipped.append(f"{name}: can't map slots, which swap={mode.name!r} needs")
            continue
        try:
            reader.connect(offers[name], CONNECT_S)
        except TransportError as error:
            reader.close()
            skipped.append(f"{name}: {error}")
            continue
        log.info(
            "transport %s to rank %d chosen on %s%s",
            name,
            rank,
            socket.gethostname(),
            f" (skipped {'; '.join(skipped)})" if skipped else "",
        )
        return reader, name
    raise TransportError(
        f"no data path to rank {rank} of the publisher works: {'; '.join(skipped) or 'it offers none that is installed'}"
    )
