"""The coordinator: a thread that answers members on the control socket and keeps the fleet's state.

Owns the ROUTER socket. It lives in the process of the publisher's rank 0, whose messages it takes directly, or in one of its
own. All change the state under one lock and wake the loop, which alone touches the socket. A stalled or hostile peer
can't block it: sends never wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq
import zmq.auth.thread

from weightsync.config import HEARTBEAT_S, MAX_MEMBER_BYTES, ZMQ_DESCRIPTORS
from weightsync.errors import (
    AddressInUseError,
    ConfigError,
    FencedError,
    ProtocolError,
    UsageError,
    WeightSyncError,
)
from weightsync.segment import check_descriptors
from weightsync.types import FleetStatus
from weightsync.wire import messages as m
from weightsync.wire.address import Address
from weightsync.wire.fleet import Fleet
from weightsync.wire.keys import Keys
from weightsync.wire.query import ask

LOCAL = b""
"""The route of the rank in this process."""
_BATCH = 256
_PROBE_S = 1.5
_TAKEOVER_S = 15.0
_PLANNED_AT_ONCE = 50_000
"""Cells and wanted boxes that take some milliseconds to plan."""


class Coordinator:
    """Binds `address` at once; raises AddressInUseError that names who holds it. `close()` is idempotent. `epoch`: of a
    publisher that has none yet, which is any that it is a part of. `is_external`: it is a part of none."""

    def __init__(
        self, address: Address, *, publisher: str, epoch: int, keys: Keys | None, takeover: bool, is_external: bool = False
    ) -> None:  # fmt: skip
        self._keys = keys
        check_descriptors(ZMQ_DESCRIPTORS, f"a publisher at {address.text}")
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 64)
        self._auth = authenticate(self._context, keys) if keys else None
        self._socket = self._context.socket(zmq.ROUTER)
        self._lock_file = -1
        try:
            self._configure(self._socket, address)
            epoch = self._bind(address, publisher, epoch, takeover)
        except BaseException:
            self._dispose()
            raise
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.fleet = Fleet(address=endpoint, publisher=publisher, epoch=epoch, is_external=is_external)
        self._lock = threading.Lock()
        self._outbox: deque[tuple[bytes, m.ToMember]] = deque()
        self._deliver: Callable[[m.ToMember], None] = lambda message: None
        self._on_end: Callable[[BaseException], None] = lambda error: None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._crash: BaseException | None = None
        self._planner = ThreadPoolExecutor(1, "weightsync-planner")
        self.fleet.books.run_aside = self._run_aside
        self._thread = threading.Thread(target=self._run, name="weightsync-coordinator", daemon=True)
        self._thread.start()

    # ---- for those in this process

    @property
    def context(self) -> zmq.Context[Any]:
        """The context whose authenticator also guards data sockets."""
        return self._context

    def join(self, deliver: Callable[[m.ToMember], None], on_end: Callable[[BaseException], None]) -> None:
        """A rank of the publisher in this very process: `deliver` gets its messages, `on_end` why there will be no more.
        Both are called under the coordinator's lock and must not block."""
        self._deliver, self._on_end = deliver, on_end

    def receive(self, message: m.FromMember) -> None:
        """A message of the rank in this process; what can be answered at once is, before this returns."""
        with self._lock:
            self._require_alive()
            now = time.monotonic()
            self.fleet.receive(LOCAL, message, now)
            self.fleet.settle(now)
            self._collect()
            self._poke()  # locked: close() has not let go of the descriptor yet

    def look(self, action: Callable[[Fleet], Any]) -> Any:
        """Read the fleet under the lock; legal even after the end."""
        with self._lock:
            return action(self.fleet)

    def status(self) -> FleetStatus:
        status: FleetStatus = self.look(lambda fleet: fleet.status(time.monotonic()))
        return status

    def gone(self, instance: str) -> None:
        """A member's process has ended (seen by a data transport)."""
        with contextlib.suppress(FencedError, UsageError):
            self.receive(m.MemberGone(self.fleet.epoch, instance))

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the coordinator ends, and raise what ended it; or for `timeout_s`."""
        self._thread.join(timeout_s)
        with self._lock:
            self._require_alive()

    def close(self) -> None:
        """Say farewell, free the address, stop the thread."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            self.fleet.farewell("the publisher closed")
            self._collect()
        self._poke()
        self._thread.join(timeout=5.0)
        self._planner.shutdown(wait=False)
        os.close(self._wake)
        self._wake = -1
        if self._auth is not None:
            self._auth.stop()
        self._context.term()

    # ---- planning

    def _run_aside(self, size: int, work: Callable[[], bool], done: Callable[[bool], None]) -> None:
        """Called locked. Large plans take seconds, in which members must not think that nobody is there."""
        if size < _PLANNED_AT_ONCE:
            done(work())
            return

        def run() -> None:
            try:
                result = work()
            except BaseException as crash:  # a thread's edge: kept, and raised to whoever calls next
                self._crash = crash
                self._poke()
                return
            with self._lock:
                if not self._stopping:
                    done(result)
            self._poke()

        self._planner.submit(run)

    # ---- binding

    def _configure(self, socket: zmq.Socket[Any], address: Address) -> None:
        socket.linger = 300
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MEMBER_BYTES)
        socket.setsockopt(zmq.IPV6, ":" in address.host)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        if self._keys:
            self._keys.protect_server(socket)

    def _bind(self, address: Address, publisher: str, epoch: int, takeover: bool) -> int:
        if self._try_bind(address):
            return epoch
        try:
            reply = ask(address, m.AskStatus(), keys=self._keys, timeout_s=_PROBE_S)
        except ProtocolError:
            reply = None  # it does speak ZeroMQ, but is none of ours
        if not isinstance(reply, m.Status):
            raise AddressInUseError(
                f"{address.text} is in use by something that does not answer as a weightsync publisher; "
                "choose another address, or stop that process"
            )
        holder = reply.status
        if not takeover:
            raise AddressInUseError(
                f"{address.text}: publisher {holder.publisher!r} is alive there (epoch {holder.epoch}, version "
                f"{holder.version}, {len(holder.members)} members); stop it, or pass takeover=True to replace it"
            )
        epoch = max(epoch, holder.epoch + 1)
        ask(address, m.TakeOver(publisher, epoch), keys=self._keys, timeout_s=_PROBE_S)
        deadline = time.monotonic() + _TAKEOVER_S
        while not self._try_bind(address):
            if time.monotonic() > deadline:
                raise AddressInUseError(
                    f"{address.text}: publisher {holder.publisher!r} did not give it up within {_TAKEOVER_S:g} s"
                )
            time.sleep(0.02)
        return epoch

    def _try_bind(self, address: Address) -> bool:
        if address.scheme == "ipc" and not address.host.startswith("@") and not self._lock_path(address.host):
            return False
        try:
            host = f"[{address.host}]" if ":" in address.host else address.host
            self._socket.bind(
                f"tcp://{host}:{address.port or '*'}" if address.scheme == "tcp" else address.text
            )
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                return False
            raise ConfigError(f"can't bind {address.text}: {error.strerror}") from error
        return True

    def _lock_path(self, path: str) -> bool:
        """libzmq would silently steal a socket file; a lock beside it tells whether its owner lives."""
        if self._lock_file < 0:
            try:
                self._lock_file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise ConfigError(f"can't bind ipc://{path}: {error}") from error
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    # ---- the loop

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while not (self._stopping or self._crash or self.fleet.fenced_by):
                events = dict(poller.poll(self._patience_ms()))
                if self._wake in events:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                self._turn(self._receive_batch() if self._socket in events else [])
            self._flush()
        except BaseException as crash:  # a thread's edge: kept, and raised to whoever calls next
            self._crash = crash
        finally:
            self._dispose()
            with self._lock:
                error = self._end()
                if error is not None:
                    self._on_end(error)

    def _patience_ms(self) -> int:
        """Until the next heartbeat is due, or somebody's deadline."""
        with self._lock:
            deadline = self.fleet.next_deadline()
        left = HEARTBEAT_S if deadline is None else min(HEARTBEAT_S, deadline - time.monotonic())
        return max(0, math.ceil(left * 1000))

    def _dispose(self) -> None:
        self._socket.close()
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1
        if not hasattr(self, "fleet"):  # never came up
            if self._auth is not None:
                self._auth.stop()
            self._context.term()

    def _receive_batch(self) -> list[tuple[bytes, list[bytes], str]]:
        batch = []
        for _ in range(_BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            user = ""
            with contextlib.suppress(zmq.ZMQError):
                user = str(frames[-1].get("User-Id"))
            batch.append((frames[0].bytes, [frame.bytes for frame in frames[1:]], user))
        return batch

    def _turn(self, batch: list[tuple[bytes, list[bytes], str]]) -> None:
        now = time.monotonic()
        with self._lock:
            for route, frames, user in batch:
                try:
                    message = m.decode_from_member(frames)
                except ProtocolError as error:
                    self.fleet.refuse(route, str(error))
                    continue
                is_order = isinstance(message, m.Enlist | m.Promote | m.Rollback)
                if is_order and not self._is_publisher(user):
                    self.fleet.refuse(route, "a rank of the publisher needs the publisher's own key")
                    continue
                if isinstance(message, m.TakeOver) and self._is_publisher(user):
                    self.fleet.fence(f"taken over by publisher {message.publisher!r}, epoch {message.epoch}")
                    self.fleet.refuse(route, "yours now")
                self.fleet.receive(route, message, now)
            local = self.fleet.ranks.find(LOCAL)
            if local is not None:
                local.last_seen = now
            self.fleet.tick(now)
            self.fleet.settle(now)
            self._collect()
        self._flush()

    def _is_publisher(self, user: str) -> bool:
        return self._keys is None or user == self._keys.publisher.decode()

    def _collect(self) -> None:
        """Called locked: sort what the fleet wants sent."""
        for route, message in self.fleet.drain():
            if route == LOCAL:
                self._deliver(message)
            else:
                self._outbox.append((route, message))

    def _flush(self) -> None:
        while self._outbox:
            route, message = self._outbox.popleft()
            with contextlib.suppress(zmq.Again, zmq.ZMQError):
                self._socket.send_multipart([route, *m.encode(message)], zmq.NOBLOCK)

    def _poke(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _end(self) -> WeightSyncError | None:
        """Why there is no more service; None: there is."""
        if self.fleet.fenced_by:
            return FencedError(
                f"{self.fleet.address}: this publisher (epoch {self.fleet.epoch}) is fenced: {self.fleet.fenced_by}"
            )
        if self._crash is not None:
            error = UsageError(f"the coordinator thread failed: {self._crash!r}")
            error.__cause__ = self._crash
            return error
        return UsageError("the publisher is closed") if self._stopping else None

    def _require_alive(self) -> None:
        error = self._end()
        if error is not None:
            raise error


def authenticate(context: zmq.Context[Any], keys: Keys) -> zmq.auth.thread.ThreadAuthenticator:
    """Let nobody connect to the sockets of `context` but those whose keys are allowed. `stop()` it before the context."""
    auth = zmq.auth.thread.ThreadAuthenticator(context)
    auth.start()
    auth.configure_curve_callback("weightsync", _Allow(keys.allowed))
    return auth


class _Allow:
    """pyzmq's callback form of an access list: raw public keys in, yes or no out."""

    def __init__(self, allowed: frozenset[bytes]) -> None:
        self._allowed = allowed

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._allowed
