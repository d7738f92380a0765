"""Across machines by NIXL (UCX): one-sided READs of registered slots; RDMA where there is a NIC for it, else TCP or CMA.

The exporter registers what is used of each slot. The reader keeps a ring of registered buffers and READs ranges of a slot
into it, several at once, by descriptors that are prepared once for each plan; what has landed is digested while it is copied
to its place, by a thread of its own, while the next are on their way. How far a slot is staged is read from its header in
the same way, so the publisher takes no part.

Data is not encrypted, and who has the offer can read: with keys, `auto` passes it over.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import logging
import mmap
import secrets
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weightsync import _native
from weightsync.errors import ConfigError, EvictedError, TransportError, WeightSyncError
from weightsync.segment import Segment, round_up
from weightsync.wire.plan import Plan
from weightsync.wire.transport import (
    HEADER_STRIDE,
    TOKEN_BYTES,
    Caps,
    Environment,
    Exporter,
    LocalSlot,
    Reader,
    ReadJob,
)
from weightsync.wire.transports.chunks import Chunk, cut_plan

CHUNK_BYTES = 4 << 20
_RING = 6
_PROBE_BYTES = 64 << 10
_SPIN_S, _STAGING_S = 20e-6, 200e-6
_IDLE_S, _BUSY_S, _STILL_BUSY_S = 5e-3, 50e-6, 2.0
"""How often the exporter lets UCX make progress: it emulates one-sided reads on TCP and needs a little help for that."""
_TELL_S = 0.5
_LEAVE_S = 2.0
_CAPS = Caps(one_sided=True, cross_host=True, maps_slots=False)


class NixlExporter(Exporter):
    """An agent with the slots registered, and a thread that lets it progress while somebody reads."""

    caps = _CAPS

    def __init__(self, environment: Environment) -> None:
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._name = f"weightsync-{secrets.token_hex(8)}"
        self._agent = _make_agent(self._name)
        self._stopping = threading.Event()
        self._registered: list[Any] = []
        self._sizes: list[int] = []
        self._thread: threading.Thread | None = None

    def register(self, slots: list[LocalSlot], header: LocalSlot) -> None:
        self._probe = Segment.create("weightsync-nixl-probe", _PROBE_BYTES)
        self._pattern = self._probe.map(writable=True)
        self._pattern.array[:_PROBE_BYTES] = np.frombuffer(_probe_pattern(self._token), np.uint8)
        self._slots, self._fixed = slots, [self._pattern, header.mapping]
        self._register([(place.address, place.size) for place in self._fixed])
        self.grow()
        self._thread = threading.Thread(target=self._progress, name="weightsync-nixl", daemon=True)
        self._thread.start()

    def grow(self) -> bool:
        sizes = [round_up(max(slot.used, 1), mmap.PAGESIZE) for slot in self._slots]
        if sizes == self._sizes:
            return False
        # the ranges before stay registered, since somebody may be reading them
        self._register([(slot.mapping.address, size) for slot, size in zip(self._slots, sizes, strict=True)])
        self._sizes = sizes
        return True

    def _register(self, places: list[tuple[int, int]]) -> None:
        self._registered.append(self._agent.register_memory([(*place, 0, "") for place in places], "DRAM"))

    def export(self) -> dict[str, str]:
        places = [(place.address, place.size) for place in self._fixed]
        places += [(slot.mapping.address, size) for slot, size in zip(self._slots, self._sizes, strict=True)]
        return {
            "agent": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "token": self._token.hex(),
            "places": ",".join(f"{address:x}:{size:x}" for address, size in places),
            "rdma": str(int(has_rdma())),
        }

    def close(self) -> None:
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            for registered in self._registered:
                self._agent.deregister_memory(registered)
            self._pattern.close()
            self._probe.close()
        del self._agent

    def _progress(self) -> None:
        busy_until = 0.0
        while not self._stopping.wait(_BUSY_S if time.monotonic() < busy_until else _IDLE_S):
            with contextlib.suppress(Exception):  # of a reader that is gone
                if self._agent.get_new_notifs():
                    busy_until = time.monotonic() + _STILL_BUSY_S


@dataclass(slots=True)
class _Moves:
    """A plan's ranges, which buffer of the ring each goes to, and the transfers made so far, by slot and range."""

    chunks: list[Chunk]
    local: Any
    remote: dict[int, Any] = field(default_factory=dict)
    transfers: dict[tuple[int, int], Any] = field(default_factory=dict)


class NixlReader(Reader):
    """An agent with a ring of registered buffers."""

    caps = _CAPS

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._agent: Any = None
        self._peer = ""
        self._segment: Segment | None = None
        self._is_broken = False
        self._headers: dict[int, Any] = {}
        self._lander = ThreadPoolExecutor(1, "weightsync-nixl-land")

    def why_not(self, offer: dict[str, str]) -> str | None:
        if self._environment.keys:
            return "it does not encrypt, and there are keys"
        if offer.get("rdma") != "1" or not has_rdma():
            return "no RDMA device on both sides; over TCP, zmq is faster"
        return None

    def connect(self, offer: dict[str, str], timeout_s: float) -> None:
        try:
            metadata = base64.b64decode(offer["agent"], validate=True)
            token = bytes.fromhex(offer["token"])
            places = [place.split(":") for place in offer["places"].split(",")]
            self._places = [(int(address, 16), int(size, 16)) for address, size in places]
            if len(self._places) < 3:
                raise ValueError("no slots")
        except (KeyError, ValueError) as error:
            raise TransportError(f"the publisher's nixl offer can't be read: {error}") from error
        self._agent = _make_agent(f"weightsync-{secrets.token_hex(8)}")
        self._segment = Segment.create("weightsync-nixl-ring", _RING * CHUNK_BYTES + _PROBE_BYTES)
        self._ring = self._segment.map(writable=True)
        self._scratch = self._ring.address + _RING * CHUNK_BYTES
        try:
            self._registered = self._agent.register_memory(
                [(self._ring.address, self._ring.size, 0, "")], "DRAM"
            )
            self._peer = self._agent.add_remote_agent(metadata)
            self._tell()
            read = self._transfer(self._scratch, self._places[0][0], _PROBE_BYTES)
            self._finish(read, timeout_s)
            self._agent.release_xfer_handle(read)
        except WeightSyncError:
            raise
        except Exception as error:  # nixl has a dozen error classes of its own
            raise TransportError(f"nixl: {error!r}") from error
        found = self._ring.array[_RING * CHUNK_BYTES :][:_PROBE_BYTES].tobytes()
        if found != _probe_pattern(token):
            raise TransportError("the probe failed: nixl does not bring what the publisher holds")

    def prepare(self, plan: Plan) -> _Moves:
        chunks = cut_plan(plan, CHUNK_BYTES)
        smallest = min(size for _, size in self._places[2:])
        if any(chunk.length > CHUNK_BYTES or chunk.offset + chunk.length > smallest for chunk in chunks):
            raise TransportError("the plan reads beyond the publisher's slots")
        buffers = [self._ring.address + number % _RING * CHUNK_BYTES for number in range(len(chunks))]
        descriptors = [(buffer, chunk.length, 0) for buffer, chunk in zip(buffers, chunks, strict=True)]
        local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", descriptors, "DRAM") if chunks else None
        return _Moves(chunks, local)

    def read(self, moves: _Moves, job: ReadJob) -> None:
        if self._agent is None or self._is_broken or not 0 <= job.slot < len(self._places) - 2:
            raise TransportError(f"nixl: not connected, or slot {job.slot} does not exist")
        job.digests[:] = 0
        try:
            self._read(moves, job)
        except WeightSyncError:
            raise
        except Exception as error:  # nixl has a dozen error classes of its own
            self._is_broken = True
            raise TransportError(
                f"nixl: the peer's process ended, or the connection to it: {error!r}"
            ) from error

    def _read(self, moves: _Moves, job: ReadJob) -> None:
        flying: deque[int] = deque()
        landing: deque[Future[None]] = deque()
        begun, staged = 0, self._staged(job)
        last = told = time.monotonic()
        self._tell()
        try:
            while begun < len(moves.chunks) or flying:
                now = time.monotonic()
                if job.cancel.value:
                    job.raise_for(_native.CANCELLED, "nixl")
                if now - last > job.timeout_s:
                    job.raise_for(_native.TIMEOUT, "nixl")
                if now - told > _TELL_S:
                    self._tell()
                    told = now
                while landing and landing[0].done():
                    landing.popleft().result()
                while begun < len(moves.chunks) and len(flying) + len(landing) < _RING:
                    chunk = moves.chunks[begun]
                    if chunk.offset + chunk.length > staged:
                        break
                    self._begin(moves, job.slot, begun)
                    flying.append(begun)
                    begun += 1
                if flying and self._is_done(moves.transfers[job.slot, flying[0]]):
                    number = flying.popleft()
                    address = self._ring.address + number % _RING * CHUNK_BYTES
                    landing.append(self._lander.submit(moves.chunks[number].land, address, job))
                    last = time.monotonic()
                elif flying or len(landing) == _RING:
                    time.sleep(_SPIN_S)
                elif begun < len(moves.chunks):
                    before, staged = staged, self._staged(job)
                    if staged > before:
                        last = time.monotonic()
                    elif moves.chunks[begun].offset + moves.chunks[begun].length > staged:
                        time.sleep(_STAGING_S)
            while landing:
                landing.popleft().result()
        except BaseException:
            self._settle(moves, job.slot, flying)
            wait(landing)
            raise
        self._staged(job)  # raises if the slot was reused meanwhile

    def _staged(self, job: ReadJob) -> int:
        """How many bytes of the slot are there; 0 before it is opened. Raises EvictedError if it is past that use."""
        address = self._places[1][0] + HEADER_STRIDE * (job.slot + 1)
        if job.slot not in self._headers:
            self._headers[job.slot] = self._transfer(self._scratch + 64 * job.slot, address, 16)
        transfer = self._headers[job.slot]
        self._agent.transfer(transfer)
        self._finish(transfer, job.timeout_s)
        at = _RING * CHUNK_BYTES + 64 * job.slot
        generation, watermark = (int(word) for word in self._ring.array[at : at + 16].view(np.uint64))
        if generation > job.generation:
            raise EvictedError("the publisher reused the slot while it was being read")
        return watermark if generation == job.generation else 0

    def _begin(self, moves: _Moves, slot: int, number: int) -> None:
        transfer = moves.transfers.get((slot, number))
        if transfer is None:
            if slot not in moves.remote:
                base = self._places[slot + 2][0]
                moves.remote[slot] = self._agent.prep_xfer_dlist(
                    self._peer, [(base + chunk.offset, chunk.length, 0) for chunk in moves.chunks], "DRAM"
                )
            transfer = moves.transfers[slot, number] = self._agent.make_prepped_xfer(
                "READ", moves.local, [number], moves.remote[slot], [number]
            )
        self._agent.transfer(transfer)

    def _transfer(self, local: int, remote: int, size: int) -> Any:
        """A transfer of one range, begun."""
        descriptors = (
            self._agent.get_xfer_descs([(local, size, 0)], "DRAM"),
            self._agent.get_xfer_descs([(remote, size, 0)], "DRAM"),
        )
        transfer = self._agent.initialize_xfer("READ", *descriptors, self._peer)
        self._agent.transfer(transfer)
        return transfer

    def _is_done(self, transfer: Any) -> bool:
        state = self._agent.check_xfer_state(transfer)
        if state not in ("DONE", "PROC"):
            self._is_broken = True
            raise TransportError("nixl: the peer's process ended, or the connection to it")
        return bool(state == "DONE")

    def _finish(self, transfer: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._is_done(transfer):
            if time.monotonic() > deadline:
                self._is_broken = True
                raise TransportError(f"nixl: the publisher's memory could not be read within {timeout_s:g} s")
            time.sleep(_SPIN_S)

    def _settle(self, moves: _Moves, slot: int, flying: deque[int]) -> None:
        """After an error: nothing may land in the ring any more once we go on."""
        deadline = time.monotonic() + _LEAVE_S
        with contextlib.suppress(Exception):
            while flying and not self._is_broken and time.monotonic() < deadline:
                if self._is_done(moves.transfers[slot, flying[0]]):
                    flying.popleft()
                else:
                    time.sleep(_SPIN_S)
        self._is_broken = self._is_broken or bool(flying)

    def _tell(self) -> None:
        """Let the exporter know that somebody reads."""
        self._agent.send_notif(self._peer, b"reading")

    def close(self) -> None:
        if self._agent is not None:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(self._peer)
                self._agent.deregister_memory(self._registered)
            self._agent = None
        self._lander.shutdown()
        if self._segment is not None:
            self._ring.close()
            self._segment.close()
            self._segment = None


def has_rdma() -> bool:
    """Whether this host has an RDMA device."""
    return any(Path("/sys/class/infiniband").glob("*"))


def _make_agent(name: str) -> Any:
    """An agent with the UCX engine and no thread of its own, which would spin."""
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        raise ConfigError(
            f"transport nixl needs the package: pip install 'weightsync[nixl]' ({error})"
        ) from error
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it announces each agent on the console
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
    return agent


def _probe_pattern(token: bytes) -> bytes:
    """Bytes that only the holder of the token can expect; every byte value occurs."""
    return hashlib.shake_128(token).digest(_PROBE_BYTES)


EXPORTER = NixlExporter
READER = NixlReader
