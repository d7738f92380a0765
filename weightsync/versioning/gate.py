"""The gate between forward passes: readers pin a version, and a swap happens only when nobody reads.

Entering with a swap pending waits for the readers inside to leave, so that steady overlapping load can't put it off for
ever; after `drain_timeout_s` the entrant goes in with the old version instead, and the swap stays pending. A step inside
a step (same thread or task, or one that was started from there) never waits, so nesting can't deadlock.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType

from weightsync.errors import SyncTimeoutError, UsageError


class Gate:
    """`swap` is called with no reader inside and nobody entering; what it returns is called after the gate reopened."""

    def __init__(self, swap: Callable[[], Callable[[], None] | None], drain_timeout_s: float) -> None:
        self._swap = swap
        self._drain_timeout_s = drain_timeout_s
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        self._readers = 0
        self._is_pending = False
        self._is_shut = False
        self._innermost: ContextVar[Step | None] = ContextVar("weightsync-step", default=None)
        self.drains_missed = 0

    def request_swap(self) -> None:
        """From now on, whoever enters swaps first."""
        with self._changed:
            self._is_pending = not self._is_shut

    def shut(self) -> None:
        """No swap from here on; none is running when this returns."""
        with self._changed:
            self._is_shut, self._is_pending = True, False
            self._changed.notify_all()

    def step(self, label: Callable[[], int]) -> Step:
        return Step(self, label)

    def is_inside(self) -> bool:
        """Whether the caller is inside a step of its own."""
        outer = self._innermost.get()
        return outer is not None and outer.is_open

    @contextmanager
    def exclusive(self, timeout_s: float) -> Iterator[None]:
        """No reader inside and nobody entering, for a swap by hand. Raises SyncTimeoutError, UsageError inside a step."""
        if self.is_inside():
            raise UsageError("this would wait for the step that it is called from; leave the step first")
        with self._changed:
            if not self._wait_for(lambda: self._readers == 0, timeout_s):
                raise SyncTimeoutError(f"{self._readers} steps were still open after {timeout_s:g} s")
            yield

    def adopt_pending(self) -> None:
        """Swap now if a swap is pending and nobody is inside; never waits."""
        after = None
        with self._changed:
            if self._is_pending and not self._readers:
                after = self._swap_now()
        if after is not None:
            after()

    def _try_enter(self, is_nested: bool, gave_up: bool) -> tuple[bool, Callable[[], None] | None]:
        """Called locked: (entered, what to call after unlocking)."""
        after = None
        if self._is_pending and not is_nested:
            if self._readers and not gave_up:
                return False, None
            if not self._readers:
                after = self._swap_now()
        self._readers += 1
        return True, after

    def _swap_now(self) -> Callable[[], None] | None:
        self._is_pending = False
        return self._swap()

    def _wait_for(self, met: Callable[[], bool], timeout_s: float) -> bool:
        """Called locked. Waiters are counted so that leaving a step costs nothing when there is none."""
        self._waiting += 1
        try:
            return self._changed.wait_for(met, timeout_s)
        finally:
            self._waiting -= 1

    def _enter(self, is_nested: bool) -> None:
        with self._lock:
            if not self._is_pending:  # the usual case
                self._readers += 1
                return
            entered, after = self._try_enter(is_nested, False)
            if not entered:
                drained = self._wait_for(
                    lambda: not self._readers or not self._is_pending, self._drain_timeout_s
                )
                self.drains_missed += not drained
                _, after = self._try_enter(is_nested, True)
        self._tell(after)

    async def _enter_async(self, is_nested: bool) -> None:
        deadline = time.monotonic() + self._drain_timeout_s
        while True:
            with self._changed:
                late = time.monotonic() >= deadline
                entered, after = self._try_enter(is_nested, late)
                self.drains_missed += late and self._is_pending
            self._tell(after)
            if entered:
                return
            await asyncio.sleep(0.001)

    def _tell(self, after: Callable[[], None] | None) -> None:
        """Call what a swap left to be called; if that raises, the one who just entered is not inside."""
        if after is not None:
            try:
                after()
            except BaseException:
                self._leave()
                raise

    def _leave(self) -> None:
        with self._lock:
            self._readers -= 1
            if not self._readers and self._waiting:
                self._changed.notify_all()


class Step:
    """One pinned version, from entry to exit; `with` gives its number. Not reusable."""

    __slots__ = ("_gate", "_label", "_outer", "is_open")

    def __init__(self, gate: Gate, label: Callable[[], int]) -> None:
        self._gate = gate
        self._label = label
        self._outer: Step | None = None
        self.is_open = False

    def _opened(self) -> int:
        self._gate._innermost.set(self)
        self.is_open = True
        try:
            return self._label()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def _nesting(self) -> bool:
        if self.is_open:
            raise UsageError("this step is open already; call step() for each pass")
        self._outer = self._gate._innermost.get()
        return self._outer is not None and self._outer.is_open

    def __enter__(self) -> int:
        self._gate._enter(self._nesting())
        return self._opened()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_open = False
        self._gate._innermost.set(self._outer)
        self._gate._leave()

    async def __aenter__(self) -> int:
        await self._gate._enter_async(self._nesting())
        return self._opened()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)
