"""The control connection of a subscriber, or of a publisher's rank: one thread that owns the socket, says hello, beats,
and hands on messages."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import zmq

from weightsync.config import HEARTBEAT_S, MEMBER_TIMEOUT_S, ZMQ_DESCRIPTORS
from weightsync.errors import ProtocolError
from weightsync.segment import check_descriptors
from weightsync.wire import messages as m
from weightsync.wire.address import Address
from weightsync.wire.keys import Keys
from weightsync.wire.query import control_socket

_HELLO_S = 0.5


class Link:
    """Keeps this side known to whichever coordinator holds the address, through restarts of either.

    `hello(last_epoch)` and `heartbeat(epoch)` make the messages; `on_message` and `on_lost(reason)` are called on the
    link's thread and must not block.
    """

    def __init__(
        self,
        address: Address,
        keys: Keys | None,
        *,
        hello: Callable[[int], m.Hello | m.Enlist],
        heartbeat: Callable[[int], m.Heartbeat | m.Beat],
        on_message: Callable[[m.ToMember], None],
        on_lost: Callable[[str], None],
    ) -> None:
        check_descriptors(ZMQ_DESCRIPTORS, f"a connection to {address.text}")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = control_socket(self._context, address, keys)
        self._hello, self._heartbeat, self._on_message, self._on_lost = hello, heartbeat, on_message, on_lost
        self._outbox: deque[m.FromMember] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._watched: tuple[int, ...] = ()
        self._is_welcome = False
        self._last_heard = time.monotonic()
        self._last_said = 0.0
        self.epoch = 0
        self.refusal: str | None = None
        self._thread = threading.Thread(target=self._run, name="weightsync-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: m.FromMember) -> None:
        """Queue a message; any thread."""
        self._outbox.append(message)
        self._poke()

    def watch(self, fds: Iterable[int]) -> None:
        """Treat the end of any of these descriptors as the publisher's death."""
        self._watched = tuple(fds)
        self._poke()

    def rejoin(self) -> None:
        """Say hello again: the data path broke, or this side wants a fresh start."""
        self._watched = ()
        self._is_welcome = False
        self._poke()

    def close(self) -> None:
        """Say goodbye and stop."""
        if self._stopping:
            return
        self.send(m.Bye(self.epoch))
        self._stopping = True
        self._poke()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        wake, self._wake = self._wake, -1
        os.close(wake)

    def _poke(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        with self._context, self._socket:
            while True:
                self._say_what_is_due()
                while self._outbox:
                    self._transmit(self._outbox.popleft())
                if self._stopping:
                    return
                self._listen()

    def _say_what_is_due(self) -> None:
        now = time.monotonic()
        if self._is_welcome and now - self._last_heard > MEMBER_TIMEOUT_S:
            self._lose(f"the publisher was silent for {now - self._last_heard:.1f} s")
        if now - self._last_said >= (HEARTBEAT_S if self._is_welcome else _HELLO_S):
            self._last_said = now
            self._transmit(self._heartbeat(self.epoch) if self._is_welcome else self._hello(self.epoch))

    def _listen(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        watched = self._watched
        for fd in watched:
            poller.register(fd, zmq.POLLIN)
        due = self._last_said + (HEARTBEAT_S if self._is_welcome else _HELLO_S)
        events = dict(poller.poll(max(1, int((due - time.monotonic()) * 1000))))
        if self._wake in events:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        if watched is self._watched and any(fd in events for fd in watched):
            self._lose("the publisher's process ended")
        if self._socket in events:
            self._take_messages()

    def _take_messages(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(m.decode_to_member(frames))
            except ProtocolError as error:
                self.refusal = str(error)

    def _take(self, message: m.ToMember) -> None:
        self._last_heard = time.monotonic()
        match message:
            case m.Status():
                return
            case m.Refused():
                self.refusal = message.reason
                self._on_message(message)
                return
            case m.Unknown():
                self._is_welcome = False
                self._last_said = 0.0
                return
        if message.epoch < self.epoch:
            return  # fenced: an older life of the publisher
        match message:
            case m.Welcome() | m.Enlisted():
                self.epoch, self._is_welcome, self.refusal = message.epoch, True, None
            case m.Farewell():
                self._lose(f"the publisher left: {message.reason}")
                return
        self._on_message(message)

    def _lose(self, reason: str) -> None:
        self._watched = ()
        self._is_welcome = False
        self._on_lost(reason)

    def _transmit(self, message: m.FromMember) -> None:
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(m.encode(message), zmq.NOBLOCK)
