"""What the processes of the tests do: publishers and subscribers whose every element says which publish it is from.

Content number n means that each element of each tensor is n, so that a torn or mixed-up version shows in the weights
themselves, whatever the digests say.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import zmq

import weightsync as ws
import weightsync.publisher.publisher
import weightsync.subscriber.fetch
import weightsync.wire.fleet
import weightsync.wire.link
from weightsync import _native
from weightsync.errors import FencedError, SyncTimeoutError
from weightsync.publisher import staging
from weightsync.segment import Segment
from weightsync.versioning.slots import SlotState
from weightsync.wire import registry
from weightsync.wire.transport import Environment, LocalSlot
from weightsync.wire.transports import chunks
from weightsync.wire.transports import nixl as nixl_transport
from weightsync.wire.transports import shm as shm_transport
from weightsync.wire.transports import zmq as zmq_transport

State = SimpleNamespace


def model(blocks: int = 6, width: int = 64) -> torch.nn.Module:
    """A few layers with a buffer; about `blocks * width² * 4` bytes."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(blocks)]
    made = torch.nn.Sequential(*layers)
    made.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
    return made


@torch.no_grad()
def fill(made: torch.nn.Module | dict[str, torch.Tensor], content: float) -> None:
    for tensor in _tensors(made):
        tensor.fill_(content)


def content_of(made: torch.nn.Module | dict[str, torch.Tensor]) -> float:
    """The content number; an AssertionError if the elements are of different publishes."""
    low = {float(t.min()) for t in _tensors(made) if t.numel()}
    high = {float(t.max()) for t in _tensors(made) if t.numel()}
    assert low == high and len(low) == 1, f"torn: elements from {sorted(low)} to {sorted(high)}"
    return low.pop()


def _tensors(made: torch.nn.Module | dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return list((made.state_dict() if isinstance(made, torch.nn.Module) else made).values())


# ---- publishers


def open_publisher(state: State, address: str, *, size: dict[str, int] | None = None, **options: Any) -> str:
    """Publish a model at `address`; returns the real address."""
    bind_publisher(state, address, size=size, **options)
    register(state)
    return str(state.pub.address)


def bind_publisher(state: State, address: str, *, size: dict[str, int] | None = None, **options: Any) -> str:
    state.pub = state.stack.enter_context(ws.Publisher(address, **options))
    state.trained = model(**(size or {}))
    return str(state.pub.address)


def register(state: State) -> None:
    state.pub.register(state.trained)


def publish(
    state: State, content: float, *, wait: str | None = "ready", members: int = 0, **options: Any
) -> int:
    """Publish `content`, scribble over the trainer's tensors at once, and wait."""
    state.pub.wait_for_members(members, 20.0)
    fill(state.trained, content)
    state.ticket = state.pub.publish(**options)
    fill(state.trained, -7)
    if wait is not None and not state.ticket.skipped:
        state.ticket.wait(wait, options.get("timeout_s", 20.0))
    return int(state.ticket.version)


def publish_many(state: State, contents: Iterable[int], wait: str | None = None) -> None:
    """Publish as fast as can be."""
    for content in contents:
        publish(state, content, wait=wait)


def publish_as_is(state: State) -> int:
    return int(state.pub.publish().version)


def replace(state: State, layer: str, key: str, make: Callable[[], torch.Tensor | None]) -> None:
    """Put another tensor where a parameter was."""
    state.trained.get_submodule(layer)._parameters[key] = make()


def free_storage(state: State, layer: str, key: str) -> None:
    """As FSDP does between two forward passes."""
    state.trained.get_submodule(layer)._parameters[key].untyped_storage().resize_(0)


def is_skipped(state: State) -> bool:
    return bool(state.ticket.skipped)


def can_flip_before_sealing(state: State) -> None:
    """Makes `flip_next` possible: a bit of the slot changes after the digests were made, before anyone reads it."""
    state.flip = None
    stage = staging.Staging.stage

    def spoiled(self: staging.Staging, slot: int, generation: int) -> bytes:
        if state.flip is None:
            return stage(self, slot, generation)
        name, bit = state.flip
        state.flip = None
        number = next(n for n, spec in enumerate(self.layout.tensors) if spec.name == name)
        watermark = self.headers.address(slot) + 8
        program, self._program = self._program, SimpleNamespace(
            run=lambda *args, progress, **options: program.run(*args, progress=0, **options)
        )  # fmt: skip
        try:
            digests = stage(self, slot, generation)
        finally:
            self._program = program
        cell = int(np.flatnonzero(self._columns.tensor == number)[0])
        self.slots[slot].mapping.array[int(self._cell_offsets[cell]) + 5] ^= 1 << bit
        ends = self._cell_offsets + self._cell_sizes
        ctypes.c_uint64.from_address(watermark).value = int(ends.max())
        return digests

    staging.Staging.stage = spoiled


def flip_next(state: State, name: str, bit: int) -> None:
    state.flip = (name, bit)


def spoil_next_seal(state: State, how: str) -> None:
    """The next manifest has digests of a wrong length, or wrong ones."""
    arrangement = state.pub._coordinator.fleet.books.arrangement
    digests_of = arrangement.digests

    def spoiled(number: int, of_ranks: list[np.ndarray]) -> bytes:
        arrangement.digests = digests_of
        digests = digests_of(number, of_ranks)
        return {"short": digests[:-8], "long": digests + bytes(8), "zero": bytes(len(digests))}[how]

    arrangement.digests = spoiled


def close_publisher(state: State) -> None:
    state.pub.close()


def address(state: State) -> str:
    return str(state.pub.address)


def await_stage(state: State, stage: str) -> dict[str, str | None]:
    """Wait for the newest ticket; returns each member's error."""
    report = state.ticket.wait(stage, 20.0)
    return {name: member.error for name, member in report.members.items()}


def await_fence(state: State) -> None:
    """Block until this publisher has fenced itself."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        try:
            state.pub.wait_for_members(10_000, 0.01)
        except FencedError:
            return
        except SyncTimeoutError:
            pass
    raise AssertionError("it was never fenced")


def epoch(state: State) -> int:
    return int(state.pub.epoch)


def members(state: State) -> list[tuple[str, int | None]]:
    return [(member.name, member.live_version) for member in state.pub.status().members]


def live_versions(state: State) -> dict[str, int | None]:
    return dict(members(state))


def relayed(state: State, version: int) -> dict[str, int]:
    """How many bytes of a version each member read from others."""
    report = state.pub._line.report(version)
    return {name: member.relayed_bytes for name, member in report.members.items()}


def size(state: State) -> int:
    """Bytes of the model that is published."""
    return sum(tensor.nbytes for tensor in _tensors(state.trained))


def holders(state: State) -> list[str]:
    """Who holds which slots."""
    found: list[str] = state.pub._coordinator.look(
        lambda fleet: fleet.books.versions.holders(fleet.books.members.labels())
    )
    return found


# ---- subscribers


def open_subscriber(
    state: State, address: str, *, size: dict[str, int] | None = None, start_s: float = 20.0, **options: Any
) -> str:
    """Follow `address`; returns the transport."""
    make_model(state, size=size)
    return subscribe(state, address, start_s=start_s, **options)


def make_model(state: State, *, size: dict[str, int] | None = None) -> None:
    state.served = model(**(size or {}))
    fill(state.served, -1)


def subscribe(state: State, address: str, *, start_s: float = 20.0, **options: Any) -> str:
    state.sub = state.stack.enter_context(ws.Subscriber(address, state.served, **options).start(start_s))
    return str(state.sub.stats.transport)


def close_subscriber(state: State) -> None:
    state.sub.close()


def await_version(state: State, version: int, timeout_s: float = 20.0) -> tuple[int, float]:
    """Wait for a version; returns it and its content."""
    state.sub.wait_for(version, timeout_s)
    return look(state)


def look(state: State) -> tuple[int, float]:
    """One forward pass: the version, checked against its manifest, and the content that it sees."""
    with state.sub.step() as version:
        wrong = state.sub.check()
        assert not wrong, f"version {version} does not match its manifest: {wrong}"
        return int(version), content_of(state.served)


def await_content(state: State, content: float, timeout_s: float = 20.0) -> tuple[int, float]:
    """Serve until `content` is seen."""
    deadline = time.monotonic() + timeout_s
    while (seen := look(state))[1] != content:
        assert time.monotonic() < deadline, f"still {seen}, waited for {content}: {state.sub.stats}"
        time.sleep(0.005)
    return seen


def live_epoch(state: State) -> int | None:
    return state.sub.epoch


def await_silence(state: State) -> None:
    """Block until the publisher counts as gone here."""
    deadline = time.monotonic() + 20.0
    while state.sub._link._is_welcome:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_filling(state: State) -> bool:
    return bool(state.sub._table.find(SlotState.FILLING))


def sessions(state: State) -> int:
    """Something that is another number for another session."""
    return id(state.sub._receiver.session)


def await_error(state: State) -> None:
    """Wait for a version that can't come; raises why."""
    state.sub.wait_for(10**6, 20.0)


def rejoin(state: State) -> None:
    """Present itself again, as after a lost data path."""
    state.sub._rejoin()


def last_error(state: State) -> str | None:
    return state.sub.stats.last_error


def counts(state: State) -> tuple[int, int, int]:
    """Versions verified, live, failed."""
    stats = state.sub.stats
    return stats.versions_verified, stats.versions_live, stats.versions_failed


def serve(state: State) -> None:
    """Serve on a thread of its own, without a pause, until `stop_serving`."""
    state.seen = []
    state.trouble = []
    state.enough = threading.Event()

    def run() -> None:
        try:
            while not state.enough.is_set():
                seen = look(state)
                if not state.seen or state.seen[-1] != seen:
                    state.seen.append(seen)
                time.sleep(0.002)
        except BaseException as error:
            state.trouble.append(error)

    state.server = threading.Thread(target=run)
    state.server.start()
    state.stack.callback(state.enough.set)


def stop_serving(state: State) -> list[tuple[int, float]]:
    """The versions served, in order, with their content."""
    state.enough.set()
    state.server.join(20.0)
    assert not state.server.is_alive()
    if state.trouble:
        raise state.trouble[0]
    return list(state.seen)


def flip_after_reading(state: State, at_version: int, times: int) -> None:
    """A bit of the back buffer changes after a version was read into it. Call before joining; shm only."""
    read = shm_transport.ShmReader.read
    left = [times]

    def spoiled(self: shm_transport.ShmReader, moves: Any, job: Any) -> None:
        read(self, moves, job)
        if job.generation == at_version and left[0]:
            left[0] -= 1
            ctypes.c_uint8.from_address(int(job.destinations[3]) + 9).value ^= 4

    shm_transport.ShmReader.read = spoiled


@torch.no_grad()
def touch_live(state: State, name: str) -> None:
    """Write to a live weight, as no server should."""
    state.served.state_dict()[name][0, 0] += 1


# ---- both


def be_impatient(state: State, member_timeout_s: float) -> None:
    """A silent peer counts as gone after this long, instead of five seconds."""
    weightsync.wire.link.MEMBER_TIMEOUT_S = member_timeout_s
    weightsync.wire.fleet.MEMBER_TIMEOUT_S = member_timeout_s


class _Halting:
    """The real program in two halves, with a pause between them."""

    pause: Callable[[], None]

    def __init__(self, table: np.ndarray) -> None:
        self._cut = len(table) // 2
        self._halves = [_native.Program(table[: self._cut]), _native.Program(table[self._cut :])]

    def run(self, src: np.ndarray, dst: np.ndarray | None, digests: np.ndarray | None, **options: Any) -> int:
        for part, half in zip((slice(self._cut), slice(self._cut, None)), self._halves, strict=True):
            some = None if digests is None else np.zeros(len(src[part]), np.uint64)
            status = half.run(src[part].copy(), None if dst is None else dst[part].copy(), some, **options)
            if status != _native.OK:
                return status
            if digests is not None:
                digests[part] = some
            if half is self._halves[0]:
                type(self).pause()
        return _native.OK


def _pausing(state: State, where: str) -> type[_Halting]:
    state.is_armed = False

    def pause() -> None:
        if state.is_armed:
            state.is_armed = False
            state.side.send(where)
            state.side.recv()

    return type("Halting", (_Halting,), {"pause": staticmethod(pause)})


def arm(state: State) -> None:
    """Pause half-way through the next staging (or reading), see `Peer.await_pause`."""
    state.is_armed = True


def can_pause_staging(state: State) -> None:
    """Call before the first publish."""
    staging._native = SimpleNamespace(Program=_pausing(state, "staging"))


def can_pause_reading(state: State, transport: str) -> None:
    """Call before joining."""
    module = shm_transport if transport == "shm" else chunks
    module._native = SimpleNamespace(
        Program=_pausing(state, "reading"),
        populate=_native.populate,
        **{name: getattr(_native, name) for name in ("OK", "EVICTED", "CANCELLED", "TIMEOUT")},
    )
    zmq_transport.CHUNK_BYTES = nixl_transport.CHUNK_BYTES = 64 << 10
    zmq_transport.WINDOW = 1


def serve_wrong_bytes(state: State) -> None:
    """Whatever others read from this member's slots over zmq from now on has a bit flipped."""
    reply = zmq_transport.ZmqExporter._reply

    def spoiled(self: Any, route: bytes, request: Any, status: int, data: Any) -> None:
        if request.kind == zmq_transport._READ and len(data):
            data = bytearray(data)
            data[len(data) // 2] ^= 4
            data = bytes(data)
        reply(self, route, request, status, data)

    zmq_transport.ZmqExporter._reply = spoiled  # type: ignore[method-assign]  # this process is for spoiling


def close_while_the_peer_leaves(state: State) -> None:
    """Close a zmq reader; its peer leaves as soon as the first monitor of a connection is closed."""
    context = zmq.Context()
    environment = Environment(context, None, "127.0.0.1", "0" * 32, 1, lambda instance: None)
    memory, header = (Segment.create("test", 1 << 20) for _ in range(2))
    exporter, reader = zmq_transport.ZmqExporter(environment), zmq_transport.ZmqReader(environment)
    slot, page = (LocalSlot(one, one.map(writable=True), one.size) for one in (memory, header))
    exporter.register([slot], page)
    reader.connect(exporter.export(), 10.0)
    first = reader._monitors[0]

    def close() -> None:
        first.close()
        exporter.close()
        context.term()
        time.sleep(0.3)  # until the reader's connections have noticed

    reader._monitors[0] = SimpleNamespace(close=close)  # type: ignore[call-overload]  # all that is called
    reader.close()
    for place in (slot, page):
        place.mapping.close()
        place.segment.close()


# ---- raw sockets


def dealer(context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(address)
    return socket


def probe_request(token: bytes) -> bytes:
    """What a reader of the zmq data path asks first."""
    return struct.pack("<16sQQIIQQ", token, 1, 0, 0, 1, 0, 0)


# ---- limits


def limit(state: State, which: int, value: int) -> None:
    resource.setrlimit(which, (value, value))


def limit_address_space(state: State, spare: int | None) -> None:
    """Leave `spare` bytes beyond what is mapped now; None: no limit."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard if spare is None else used + spare, hard))


def limit_files(state: State, spare: int | None) -> None:
    """Let `spare` more descriptors be opened; None: as many as allowed."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if spare is None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for fd in state.fillers:
            os.close(fd)
        state.fillers = []
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    state.fillers = []
    try:
        while True:
            state.fillers.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        for fd in state.fillers[len(state.fillers) - spare :]:
            os.close(fd)
        del state.fillers[len(state.fillers) - spare :]


def settle(fact: Callable[[], bool]) -> None:
    """Block until `fact` holds: some things end on other threads."""
    deadline = time.monotonic() + 10.0
    while not fact():
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.005)


def forget_package(state: State, name: str) -> None:
    """As if it was not installed here."""
    sys.modules[name] = None  # type: ignore[assignment]  # what makes an import fail
    registry.find_spec = lambda package: None if package == name else find_spec(package)


# ---- other users


def become_another_user(state: State) -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


def ask_for_handles(state: State | None, name: str, token: str) -> int:
    """How many descriptors the publisher's shared-memory socket hands over."""
    handles = _handles(name, token)
    for handle in handles:
        os.close(handle)
    return len(handles)


def writable_handles(name: str, token: str) -> int:
    """How many of them can be mapped for writing, as they are or opened again."""
    count = 0
    for handle in _handles(name, token):
        try:
            mmap.mmap(handle, 4096, mmap.MAP_SHARED, mmap.PROT_WRITE | mmap.PROT_READ).close()
            count += 1
        except OSError:
            pass
        os.close(handle)
    return count


def _handles(name: str, token: str) -> list[int]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
        asker.settimeout(10.0)
        asker.connect("\0" + name)
        try:
            asker.sendall(bytes.fromhex(token) + b"spy".ljust(64, b"\0"))
            return list(socket.recv_fds(asker, 4096, 64)[1])
        except ConnectionError:
            return []


def footprint(state: State) -> dict[str, int]:
    """What this process takes: threads (`pool`: those of them that read shares, at most 8, made when needed), descriptors,
    mappings, resident bytes."""
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    with open("/proc/self/maps") as file:
        maps = len(file.readlines())
    threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    pool = sum(thread.name.startswith("weightsync-share") for thread in threading.enumerate())
    return {"threads": threads, "pool": pool, "files": files, "maps": maps, "resident": resident}


def await_nobody(state: State) -> None:
    """Block until the publisher has no members, and no thread that waited for one."""
    settle(lambda: not state.pub.status().members)
    settle(lambda: not any(thread.name == "weightsync-shm-peer" for thread in threading.enumerate()))
