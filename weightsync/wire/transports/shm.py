"""Same host: memfd segments passed over a Unix socket and read in place.

Takes the publisher's slots, gives readers read-only mappings of them. The socket has an abstract name, so nothing is
left after `kill -9`; its end of file is how each side learns at once that the other process is gone. Handles go only to
processes of the same user that know the token.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass

import numpy as np

from weightsync import _native
from weightsync.errors import TransportError
from weightsync.segment import Mapping, Segment
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
    Uint64s,
)

_CAPS = Caps(one_sided=True, cross_host=False, maps_slots=True)
_HANDSHAKE_S = 5.0
_RETRY_S = 0.05
_MAX_SLOTS = 64
_INSTANCE_BYTES = 64
_GOODBYE = b"\0"
"""What a reader says before it closes; a socket that ends without it belonged to a process that died."""


class ShmExporter(Exporter):
    """Hands out descriptors of the slots; watches each reader's socket for its end."""

    caps = _CAPS

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._name = f"weightsync-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind("\0" + self._name)
        self._listener.listen(64)
        self._peers: dict[socket.socket, str] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._handles: list[int] = []
        self._sizes = b""

    def register(self, slots: list[LocalSlot], header: LocalSlot) -> None:
        SlotHeaders(header.mapping).token = self._token
        self._handles = [slot.segment.read_only_fd() for slot in (header, *slots)]
        self._sizes = struct.pack(
            f"<I{len(slots) + 1}Q", len(slots) + 1, *(s.segment.size for s in (header, *slots))
        )
        threading.Thread(target=self._accept, name="weightsync-shm-accept", daemon=True).start()

    def export(self) -> dict[str, str]:
        return {"socket": self._name, "token": self._token.hex(), "host": host_id()}

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers = list(self._peers)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for handle in self._handles:
            os.close(handle)

    def readers(self) -> list[str]:
        with self._lock:
            return list(self._peers.values())

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(
                    _RETRY_S
                )  # out of descriptors, say: whoever waits is served when there are some again
                continue
            threading.Thread(
                target=self._serve, args=(peer,), name="weightsync-shm-peer", daemon=True
            ).start()

    def _serve(self, peer: socket.socket) -> None:
        """One reader: check it, hand over, then sleep until it goes."""
        with peer:
            instance = self._hand_over(peer)
            if not instance:
                return
            with self._lock:
                if self._closed:
                    return
                self._peers[peer] = instance
            last_words = b""
            with contextlib.suppress(OSError):
                peer.settimeout(None)
                last_words = peer.recv(len(_GOODBYE))
            with self._lock:
                del self._peers[peer]
                closed = self._closed
        if not closed and last_words != _GOODBYE:
            self._environment.on_gone(instance)

    def _hand_over(self, peer: socket.socket) -> str:
        try:
            peer.settimeout(_HANDSHAKE_S)
            if _peer_user(peer) != os.getuid():
                return ""
            request = _receive_exactly(peer, TOKEN_BYTES + _INSTANCE_BYTES)
            if not secrets.compare_digest(request[:TOKEN_BYTES], self._token):
                return ""
            socket.send_fds(peer, [self._sizes], self._handles)
            return request[TOKEN_BYTES:].rstrip(b"\0").decode()
        except (OSError, UnicodeDecodeError):
            return ""


@dataclass(frozen=True, slots=True)
class _Moves:
    """A compiled plan, and where each of its moves lies in a slot."""

    program: _native.Program
    offsets: Uint64s


class ShmReader(Reader):
    """Maps the publisher's slots and copies straight out of them, digesting on the way."""

    caps = _CAPS

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._socket: socket.socket | None = None
        self._segments: list[Segment] = []
        self._slots: list[Mapping] = []
        self._headers: SlotHeaders | None = None
        self._header_mapping: Mapping | None = None

    def connect(self, offer: dict[str, str], timeout_s: float) -> None:
        if offer.get("host") != host_id():
            raise TransportError("the publisher runs on another host, or in another network namespace")
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            self._socket.settimeout(timeout_s)
            token = bytes.fromhex(offer["token"])
            self._socket.connect("\0" + offer["socket"])
            if _peer_user(self._socket) != os.getuid():
                raise TransportError("the publisher runs as another user")
            self._socket.sendall(token + self._environment.instance.encode().ljust(_INSTANCE_BYTES, b"\0"))
            self._segments = self._take(self._socket)
        except (OSError, KeyError, ValueError) as error:
            raise TransportError(f"the publisher's shared memory can't be had: {error}") from error
        self._header_mapping = self._segments[0].map(writable=False)
        self._slots = [segment.map(writable=False, populate=0) for segment in self._segments[1:]]
        self._headers = SlotHeaders(self._header_mapping)
        if self._headers.token != token:
            raise TransportError("the probe failed: shared memory does not hold what the publisher wrote")

    def _take(self, peer: socket.socket) -> list[Segment]:
        data, handles, _, _ = socket.recv_fds(peer, 4 + 8 * (_MAX_SLOTS + 1), _MAX_SLOTS + 1)
        if len(data) < 4 or len(data) != 4 + 8 * len(handles) or len(handles) < 2:
            for handle in handles:
                os.close(handle)
            raise TransportError("the publisher refused to hand over its shared memory")
        sizes = array.array("Q", data[4:])
        return [Segment(handle, size) for handle, size in zip(handles, sizes, strict=True)]

    def prepare(self, plan: Plan) -> _Moves:
        if len(plan.offsets):
            begin, end = int(plan.offsets.min()), int(plan.ends().max())
            if end > min((slot.size for slot in self._slots), default=0):
                raise TransportError("the plan reads beyond the publisher's slots")
            begin -= begin % mmap.PAGESIZE
            for slot in self._slots:
                _native.populate(slot.address + begin, end - begin, write=False)
        return _Moves(_native.Program(plan.table), plan.offsets.astype(np.uint64))

    def read(self, moves: _Moves, job: ReadJob) -> None:
        if self._headers is None or not 0 <= job.slot < len(self._slots):
            raise TransportError(f"not connected, or slot {job.slot} does not exist")
        status = moves.program.run(
            moves.offsets + np.uint64(self._slots[job.slot].address), job.destinations, job.digests,
            threads=self._environment.threads, progress=ctypes.addressof(job.progress),
            follow=self._headers.address(job.slot), generation=job.generation,
            timeout_s=job.timeout_s, cancel=ctypes.addressof(job.cancel),
        )  # fmt: skip
        job.raise_for(status, "shm")

    def slot_segments(self, size: int) -> list[Segment]:
        return [Segment(os.dup(segment.fd), min(size, segment.size)) for segment in self._segments[1:]]

    def liveness_fd(self) -> int | None:
        return self._socket.fileno() if self._socket is not None else None

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendall(_GOODBYE)
            self._socket.close()
            self._socket = None
        for segment in self._segments:
            segment.close()
        for mapping in self._slots:
            mapping.close()
        if self._header_mapping is not None:
            self._header_mapping.close()
        self._segments, self._slots, self._headers, self._header_mapping = [], [], None, None


def host_id() -> str:
    """Equal for processes that can share abstract sockets: same boot of the same kernel, same network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def _peer_user(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)


def _receive_exactly(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = peer.recv(size - len(data))
        if not more:
            raise OSError("the peer closed")
        data += more
    return data


EXPORTER = ShmExporter
READER = ShmReader
