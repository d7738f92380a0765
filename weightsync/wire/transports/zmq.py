"""Anywhere: TCP streams over ZeroMQ, optionally encrypted with CURVE.

The reader asks for ranges of a slot with a window of requests on each stream; the exporter answers with frames that
point into the slot (no copy). A received frame is digested while it is copied to its final place, still warm in cache.
Requests ahead of the staging watermark, or for a use of the slot still to come, wait at the exporter, so staging and
transfer overlap.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from weightsync import _native
from weightsync.config import ZMQ_DESCRIPTORS
from weightsync.errors import CapacityError, EvictedError, TransportError
from weightsync.segment import check_descriptors
from weightsync.wire.plan import Plan
from weightsync.wire.transport import (
    TOKEN_BYTES,
    Caps,
    Environment,
    Exporter,
    LocalSlot,
    Reader,
    ReadJob,
    SlotHeaders,
)
from weightsync.wire.transports.chunks import Chunk, cut_plan

CHUNK_BYTES = 1 << 20
WINDOW = 4
STREAMS = 2
_PROBE_BYTES = 64 << 10
_REQUEST = struct.Struct("<16sQQIIQQ")  # token, serial, generation, slot, kind, offset, length
_REPLY = struct.Struct("<QII")  # serial, request number is the frame order; status, spare
_READ, _PROBE = 0, 1
_KEY_BYTES = 40
_OK, _EVICTED, _REFUSED = 0, 1, 2
_CAPS = Caps(one_sided=True, cross_host=True, maps_slots=False, encrypted=True)


@dataclass(frozen=True, slots=True)
class _Request:
    serial: int
    generation: int
    slot: int
    kind: int
    offset: int
    length: int


class ZmqExporter(Exporter):
    """One ROUTER socket and one thread that serve ranges of sealed or filling slots."""

    caps = _CAPS

    def __init__(self, environment: Environment) -> None:
        self._token = secrets.token_bytes(TOKEN_BYTES)
        if environment.context is None:
            raise TransportError("the zmq exporter needs the publisher's context, which checks keys")
        self._key = environment.keys.public if environment.keys else None
        self._socket = environment.context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, 4096)
        self._socket.setsockopt(zmq.IPV6, ":" in environment.host)
        if environment.keys:
            environment.keys.protect_server(self._socket)
        host = f"[{environment.host}]" if ":" in environment.host else environment.host
        try:
            self._socket.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self._socket.close()
            raise TransportError(f"zmq: can't serve at data_host={environment.host!r}: {error}") from error
        self._port = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._views: list[memoryview] = []
        self._parked: deque[tuple[bytes, _Request]] = deque()

    def register(self, slots: list[LocalSlot], header: LocalSlot) -> None:
        self._views = [memoryview(slot.mapping.buffer).cast("B") for slot in slots]
        self._headers = SlotHeaders(header.mapping)
        self._thread = threading.Thread(target=self._serve, name="weightsync-zmq-data", daemon=True)
        self._thread.start()

    def export(self) -> dict[str, str]:
        key = {} if self._key is None else {"key": self._key.decode()}
        return {"port": self._port, "token": self._token.hex(), **key}

    def close(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        if self._thread is None:
            self._socket.close()
        else:
            os.eventfd_write(self._wake, 1)
            self._thread.join(timeout=5.0)
        os.close(self._wake)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        with self._socket:
            while not self._stopping:
                events = dict(poller.poll(1 if self._parked else 1000))
                for _ in range(len(self._parked)):
                    self._answer(*self._parked.popleft())
                if self._socket in events:
                    self._take_requests()

    def _take_requests(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            request = self._parse(frames)
            if request is not None:
                self._answer(frames[0], request)

    def _parse(self, frames: list[bytes]) -> _Request | None:
        """None for anything but a well-formed request with the token; strangers get no answer."""
        if len(frames) != 2 or len(frames[1]) != _REQUEST.size:
            return None
        token, serial, generation, slot, kind, offset, length = _REQUEST.unpack(frames[1])
        if not secrets.compare_digest(token, self._token):
            return None
        return _Request(serial, generation, slot, kind, offset, length)

    def _answer(self, route: bytes, request: _Request) -> None:
        if request.kind == _PROBE:
            self._reply(route, request, _OK, probe_pattern(self._token))
            return
        if request.slot >= len(self._views) or request.offset + request.length > len(
            self._views[request.slot]
        ):
            self._reply(route, request, _REFUSED, b"")
            return
        generation = self._headers.generation(request.slot)  # before the watermark, which is cleared first
        end = request.offset + request.length
        if generation > request.generation:
            self._reply(route, request, _EVICTED, b"")
        elif generation < request.generation or self._headers.watermark(request.slot) < end:
            self._parked.append((route, request))
        else:
            self._reply(route, request, _OK, self._views[request.slot][request.offset : end])

    def _reply(self, route: bytes, request: _Request, status: int, data: memoryview | bytes) -> None:
        head = _REPLY.pack(request.serial, status, 0)
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([route, head, data], zmq.NOBLOCK, copy=False)


class ZmqReader(Reader):
    """Several DEALER sockets, each with a window of outstanding requests; frames go straight to their final place."""

    caps = _CAPS

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._context: zmq.Context[Any] | None = None
        self._sockets: list[zmq.Socket[Any]] = []
        self._monitors: list[zmq.Socket[Any]] = []
        self._token = b""
        self._serial = 0

    def connect(self, offer: dict[str, str], timeout_s: float) -> None:
        try:
            self._token = bytes.fromhex(offer["token"])
            port = int(offer["port"])
            if not 0 < port < 65536:
                raise ValueError(f"port {port}")
            server = offer["key"].encode("ascii") if self._environment.keys else None
            if server is not None and len(server) != _KEY_BYTES:
                raise ValueError("not a public key")
        except (KeyError, ValueError) as error:
            raise TransportError(f"the publisher's zmq offer can't be read: {error}") from error
        try:
            check_descriptors(ZMQ_DESCRIPTORS, "a data path")
        except CapacityError as error:
            raise TransportError(str(error)) from error
        self._context = zmq.Context(io_threads=STREAMS)
        at = offer.get("at", self._environment.host)
        host = f"[{at}]" if ":" in at else at
        try:
            for _ in range(STREAMS):
                socket = self._context.socket(zmq.DEALER)
                self._sockets.append(socket)
                socket.linger = 0
                socket.setsockopt(zmq.IPV6, ":" in at)
                if self._environment.keys:
                    self._environment.keys.protect_client(socket, server)
                socket.connect(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            raise TransportError(f"the zmq offer of {host}:{port} can't be used: {error}") from error
        self._probe(timeout_s)
        self._monitors = [socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) for socket in self._sockets]

    def _probe(self, timeout_s: float) -> None:
        expected = probe_pattern(self._token)
        for socket in self._sockets:
            self._ask(socket, 0, 0, _PROBE, 0, 0)
        for socket in self._sockets:
            if not socket.poll(int(timeout_s * 1000)):
                raise TransportError(f"the publisher's data port did not answer within {timeout_s:g} s")
            if socket.recv_multipart()[-1] != expected:
                raise TransportError(
                    "the probe failed: bytes arrive changed; is something rewriting this connection?"
                )

    def _ask(
        self, socket: zmq.Socket[Any], generation: int, slot: int, kind: int, offset: int, length: int
    ) -> None:
        socket.send(_REQUEST.pack(self._token, self._serial, generation, slot, kind, offset, length))

    def prepare(self, plan: Plan) -> list[Chunk]:
        return cut_plan(plan, CHUNK_BYTES)

    def read(self, moves: list[Chunk], job: ReadJob) -> None:
        if not self._sockets:
            raise TransportError("not connected")
        self._serial += 1
        job.digests[:] = 0
        waiting: dict[zmq.Socket[Any], deque[Chunk]] = {socket: deque() for socket in self._sockets}
        todo = deque(moves)
        for _ in range(WINDOW):
            for socket in self._sockets:
                self._request_next(socket, todo, waiting[socket], job)
        poller = zmq.Poller()
        for socket in (*self._sockets, *self._monitors):
            poller.register(socket, zmq.POLLIN)
        last = time.monotonic()
        while any(waiting.values()):
            if job.cancel.value:
                job.raise_for(_native.CANCELLED, "zmq")
            for socket, _ in poller.poll(100):
                if socket in self._monitors:
                    raise TransportError("zmq: the peer's process ended, or the connection to it")
                last = time.monotonic()
                frames = socket.recv_multipart(copy=False)
                serial, status, _ = _REPLY.unpack(frames[0].buffer)
                if serial != self._serial:
                    continue  # the answer to a request of a version given up
                chunk = waiting[socket].popleft()
                self._request_next(socket, todo, waiting[socket], job)
                self._land(chunk, status, frames[1], job)
            if time.monotonic() - last > job.timeout_s:
                job.raise_for(_native.TIMEOUT, "zmq")

    def _request_next(
        self, socket: zmq.Socket[Any], todo: deque[Chunk], waiting: deque[Chunk], job: ReadJob
    ) -> None:
        if todo:
            chunk = todo.popleft()
            self._ask(socket, job.generation, job.slot, _READ, chunk.offset, chunk.length)
            waiting.append(chunk)

    def _land(self, chunk: Chunk, status: int, frame: zmq.Frame, job: ReadJob) -> None:
        if status == _EVICTED:
            raise EvictedError("the publisher reused the slot while it was being read")
        data = np.frombuffer(frame.buffer, np.uint8)
        if status != _OK or len(data) != chunk.length:
            raise TransportError(
                f"the publisher refused bytes {chunk.offset} to {chunk.offset + chunk.length}"
            )
        chunk.land(data.ctypes.data, job)

    def close(self) -> None:
        for socket in self._sockets:
            socket.disable_monitor()  # while its other end is open: an event sent to nobody would block for ever
        for end in (*self._monitors, *self._sockets):
            end.close()
        self._sockets, self._monitors = [], []
        if self._context is not None:
            self._context.term()
            self._context = None


def probe_pattern(token: bytes) -> bytes:
    """Bytes that only the holder of the token can expect; every byte value occurs."""
    return hashlib.shake_128(token).digest(_PROBE_BYTES)


EXPORTER = ZmqExporter
READER = ZmqReader
