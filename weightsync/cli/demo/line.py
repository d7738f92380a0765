"""A child's end of the pipe to the demo's parent."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import TypeVar

from weightsync.cli.demo.events import Event, Order, Stop

OrderKind = TypeVar("OrderKind", bound=Order)


class Line:
    """Sends events, receives orders. A parent that went away counts as an order to stop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._orders: list[Order] = []
        self._is_stopped = False

    def send(self, event: Event) -> None:
        try:
            self._connection.send(event)
        except OSError:  # the parent closed its end or died
            self._is_stopped = True

    def is_stopped(self) -> bool:
        """Whether a `Stop` has arrived; never waits."""
        self._receive(0.0)
        return self._is_stopped

    def wait(self, kind: type[OrderKind], timeout_s: float) -> OrderKind | None:
        """The next order of this kind; None when told to stop, or when the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for order in self._orders:
                if isinstance(order, kind):
                    self._orders.remove(order)
                    return order
            left_s = deadline_s - time.monotonic()
            if self._is_stopped or left_s < 0:
                return None
            self._receive(left_s)

    def _receive(self, timeout_s: float) -> None:
        try:
            while not self._is_stopped and self._connection.poll(timeout_s):
                order = self._connection.recv()
                self._orders.append(order)
                self._is_stopped = isinstance(order, Stop)
                timeout_s = 0.0
        except (EOFError, OSError):
            self._is_stopped = True
