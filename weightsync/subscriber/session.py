"""One life of the publisher as this subscriber sees it: its catalogue, the plan made for it, and the data paths."""

from __future__ import annotations

import ctypes
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weightsync import _native
from weightsync._native import layout as col
from weightsync.config import HUGE_PAGE
from weightsync.errors import ConfigError, DigestError, LayoutError, TransportError, WeightSyncError
from weightsync.moves import contiguous_strides
from weightsync.segment import Segment, round_up
from weightsync.tensors import Entry, dtype_name
from weightsync.types import DTYPES
from weightsync.versioning.swap.mode import SwapMode, Uint64s, find_doubled
from weightsync.wire import messages as m
from weightsync.wire.layout import Boxes, Catalogue
from weightsync.wire.plan import BoolArray, Matches, Plan, Want, make_plan, match_names
from weightsync.wire.registry import ladder, make_reader, transport_names
from weightsync.wire.transport import Environment, Reader, ReadJob

log = logging.getLogger("weightsync")
CONNECT_S = 10.0
_PEER_CONNECT_S = 3.0
_MAX_READERS = 16
_MAX_SHARES = 8
_MAX_PEERS = 16
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


@dataclass(frozen=True, slots=True)
class Share:
    """Some wanted boxes, prepared to be read from one source: `plan` has their moves, `parts` says which rows of it each
    connected path reads."""

    plan: Plan
    parts: list[tuple[Path, slice, Any]]

    @property
    def transport(self) -> str:
        """Names of the transports that it takes."""
        return "+".join(sorted({path.transport for path, _, _ in self.parts}))


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """A connected reader, which reads for one at a time."""

    reader: Reader
    transport: str
    lock: threading.Lock = field(default_factory=threading.Lock)


class Session:
    """Connected to every rank that the plan reads. `verifier` digests a slot of ours as the plan lays it out."""

    def __init__(
        self, welcome: m.Welcome, matches: Matches, wants: list[Want], mode: SwapMode, environment: Environment,
        wanted: str,
    ) -> None:  # fmt: skip
        self.epoch = welcome.epoch
        self.matches = matches
        self._offers = welcome.offers
        self._catalogue, self._wants = welcome.catalogue, wants
        self._mode, self._environment, self._wanted = mode, environment, wanted
        self._paths: dict[int, Path] = {}
        self._peers: dict[int, tuple[Path, Plan]] = {}
        self._shares: dict[tuple[int, int, int], Share] = {}
        self._peers_lock = threading.Lock()
        self.pool = ThreadPoolExecutor(_MAX_SHARES, "weightsync-share")
        self._parts_pool = ThreadPoolExecutor(_MAX_READERS, "weightsync-read")
        self._progress: list[ctypes.c_uint64] = []

    def use(self, message: m.Plan) -> None:
        """Follow this plan from now on. Raises ProtocolError, TransportError, LayoutError, CapacityError."""
        self.recipe = Recipe(self._catalogue, self.matches, message)
        self.plan = plan = self.recipe.plan(self._wants)
        for rank in plan.parts():
            if rank not in self._paths:
                if rank >= len(self._offers):
                    raise TransportError(f"a plan reads rank {rank} of {len(self._offers)}")
                self._paths[rank] = _connect(
                    self._offers[rank], f"rank {rank}", self._mode, self._environment, self._wanted
                )
        self._shares = {}
        self._whole = self._prepare(plan)
        self._bind()
        self.verifier = verifier_of(plan)

    def _prepare(self, plan: Plan) -> Share:
        return Share(plan, [
            (self._paths[rank], some, self._paths[rank].reader.prepare(part))
            for rank, (some, part) in plan.parts().items()
        ])  # fmt: skip

    def _bind(self) -> None:
        plan, mode = self.plan, self._mode
        first = np.unique(plan.wants, return_index=True)[1] if len(plan.wants) else plan.wants
        offsets = dict(zip(plan.wants[first].tolist(), plan.offsets[first].tolist(), strict=True))
        segments: list[Segment] = []
        if mode.borrows_slots:
            if len(self._paths) != 1 or len(offsets) != len(plan.wants):
                raise LayoutError(
                    f"swap={mode.name!r} needs one publisher rank that holds each tensor as it is wanted here; "
                    f"{len(self._paths)} ranks hold {len(plan.wants)} pieces of {len(offsets)}"
                )
            span = round_up(int(plan.ends().max(initial=1)), HUGE_PAGE)
            segments = next(iter(self._paths.values())).reader.slot_segments(span)
        try:
            mode.bind(offsets, segments)
        finally:
            for segment in segments:
                segment.close()

    @property
    def transport(self) -> str:
        """Names of the transports in use."""
        return self._whole.transport

    @property
    def received(self) -> int:
        """Bytes received of the version being read."""
        return sum(int(counter.value) for counter in list(self._progress))

    def begin(self) -> None:
        """The bytes received count from here."""
        self._progress = []

    def read(
        self,
        share: Share | None,
        slot: int,
        generation: int,
        targets: Uint64s,
        digests: Uint64s,
        timeout_s: float,
        cancel: ctypes.c_uint32,
    ) -> None:
        """Move a share (None: everything) of a version to `targets`, from all its sources at once. Raises EvictedError,
        SyncTimeoutError, TransportError."""
        jobs = [
            (path, moves, ReadJob(
                slot, generation, targets[some], digests[some], timeout_s, ctypes.c_uint64(0), cancel
            ))
            for path, some, moves in (share or self._whole).parts
        ]  # fmt: skip
        self._progress += [job.progress for _, _, job in jobs]
        failures: list[WeightSyncError] = []

        def run(path: Path, moves: Any, job: ReadJob) -> None:
            try:
                with path.lock:
                    path.reader.read(moves, job)
            except WeightSyncError as error:
                failures.append(error)
                cancel.value = cancel.value or _PEER_FAILED  # no use in reading on

        others = [self._parts_pool.submit(run, *job) for job in jobs[1:]]
        if jobs:
            run(*jobs[0])
        for future in wait(others).done:
            future.result()
        if failures:
            if cancel.value == _PEER_FAILED:
                cancel.value = 0
            raise failures[0]

    # ---- shares of a version, from the publisher or from other members

    def share(self, peer: m.Peer | None, first: int, stop: int) -> Share:
        """The wants from `first` to `stop`, to be read from a peer (None: from the publisher). Raises TransportError."""
        key = (-1 if peer is None else peer.number, first, stop)
        found = self._shares.get(key)
        if found is None:
            if peer is None:
                found = self._prepare(self.plan.only(self.rows(first, stop)))
            else:
                path, whole = self._path_to(peer)
                moves = path.reader.prepare(whole.only(slice(first, stop)))
                found = Share(whole.only(slice(first, stop)), [(path, slice(0, stop - first), moves)])
            self._shares[key] = found
        return found

    def rows(self, first: int, stop: int) -> BoolArray:
        """Which moves of the plan bring the wants from `first` to `stop`."""
        of_want = np.frombuffer(self.recipe.message.wants, "<u4")
        rows: BoolArray = (of_want >= first) & (of_want < stop)
        return rows

    @property
    def is_dense(self) -> bool:
        """Whether every wanted box lies in a slot here as it would on the wire, so that others can read it from there."""
        wants = [self._wants[number] for number in self.matches.wants.tolist()]
        return all(w.strides == contiguous_strides(w.box.shape, DTYPES[w.dtype].itemsize) for w in wants)

    def of_wants(self, digests: Uint64s) -> Uint64s:
        """From the digests of the plan's moves those of whole wanted boxes: two sums mod 2^32 each."""
        whole = np.zeros(len(self.matches.wants), np.uint64)
        np.add.at(
            whole.view(np.uint32).reshape(-1, 2),
            np.frombuffer(self.recipe.message.wants, "<u4"),
            digests.view(np.uint32).reshape(-1, 2),
        )
        return whole

    def drop(self, number: int) -> None:
        """The peer is of no use any more; connect again if it is named again."""
        with self._peers_lock:
            found = self._peers.pop(number, None)
        for key in [key for key in list(self._shares) if key[0] == number]:
            self._shares.pop(key, None)
        if found is not None:
            with found[0].lock:
                found[0].reader.close()

    def forget(self, number: int) -> None:
        """The peer is gone: drop it, without waiting for those who still read from it."""
        self.pool.submit(self.drop, number)

    def _path_to(self, peer: m.Peer) -> tuple[Path, Plan]:
        """Connected to a peer, with the plan that reads every wanted box whole out of its slot. Of many peers only those
        used last stay connected."""
        with self._peers_lock:
            found = self._peers.pop(peer.number, None)
            if found is not None:
                self._peers[peer.number] = found
                return found
        count = len(self.matches.wants)
        plan = make_plan(
            self._catalogue, self._wants, self.matches, self.matches.boxes, bytes(4 * count),
            np.arange(count, dtype="<u4").tobytes(), peer.offsets,
        )  # fmt: skip
        path = _connect(peer.offers, peer.name, self._mode, self._environment, self._wanted, _PEER_CONNECT_S)
        with self._peers_lock:
            idle = [number for number, (other, _) in self._peers.items() if not other.lock.locked()]
            found = self._peers.setdefault(peer.number, (path, plan))
            surplus = max(0, len(self._peers) - _MAX_PEERS)
        if found[0] is not path:
            path.reader.close()
        for number in idle[:surplus]:
            self.drop(number)
        return found

    def liveness_fds(self) -> list[int]:
        """Descriptors that become readable when a rank's process is gone."""
        found = [path.reader.liveness_fd() for path in self._paths.values()]
        return [fd for fd in found if fd is not None]

    def close(self) -> None:
        self.pool.shutdown()
        self._parts_pool.shutdown()
        for path in (*self._paths.values(), *(path for path, _ in self._peers.values())):
            path.reader.close()


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


def wrong_digests(version: int, names: Sequence[str]) -> DigestError:
    """The error that says which tensors are not what was published."""
    shown = f"{', '.join(names[:10])}{', …' if len(names) > 10 else ''}"
    return DigestError(f"version {version}: {len(names)} tensors do not match their digests: {shown}")


def wants_of(entries: list[Entry], strides: Sequence[tuple[int, ...]]) -> list[Want]:
    """What a server wants, written with these byte strides."""
    return [
        Want(entry.names, dtype_name(entry.tensor.dtype), entry.shape, entry.box, steps)
        for entry, steps in zip(entries, strides, strict=True)
    ]


def _connect(
    offers: dict[str, dict[str, str]],
    peer: str,
    mode: SwapMode,
    environment: Environment,
    wanted: str,
    timeout_s: float = CONNECT_S,
) -> Path:
    """A connected and probed reader. `auto` walks the ladder; a transport asked for by name never falls back."""
    if wanted != "auto" and wanted not in transport_names():
        raise ConfigError(f"transport={wanted!r}: installed are auto, {', '.join(transport_names())}")
    if wanted != "auto" and wanted not in offers:
        raise TransportError(f"transport={wanted!r} was asked for, but {peer} offers {', '.join(offers)}")
    skipped: list[str] = []
    for name in [wanted] if wanted != "auto" else ladder(list(offers)):
        reader = make_reader(name, environment)
        if mode.borrows_slots and not reader.caps.maps_slots:
            skipped.append(f"{name}: can't map slots, which swap={mode.name!r} needs")
            continue
        reason = reader.why_not(offers[name]) if wanted == "auto" else None
        if reason is not None:
            skipped.append(f"{name}: {reason}")
            continue
        try:
            reader.connect(offers[name], timeout_s)
        except TransportError as error:
            reader.close()
            skipped.append(f"{name}: {error}")
            continue
        except BaseException:
            reader.close()
            raise
        log.info(
            "transport %s to %s chosen on %s%s",
            name,
            peer,
            socket.gethostname(),
            f" (skipped {'; '.join(skipped)})" if skipped else "",
        )
        return Path(reader, name)
    raise TransportError(
        f"no data path to {peer} works: {'; '.join(skipped) or 'it offers none that is installed'}"
    )
