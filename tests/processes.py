"""Real processes that do what a test tells them, one call after the other; no wait is without a deadline.

`Peer` is the test's handle. What it runs are functions of `tests.roles`, which get the process's `state` first.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

DEADLINE_S = 30.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "tests.processes", "tests.roles"]
)  # a child starts in milliseconds, not in seconds


class Peer:
    """A process of its own. `call` runs a function there and returns (or raises) what it did; `tell` and `reply` are
    the halves of `call`. `side` is a second pipe, for code there that is told to pause."""

    def __init__(self) -> None:
        self._orders, orders = _context.Pipe()
        self.side, side = _context.Pipe()
        self._process = _context.Process(target=_obey, args=(orders, side))
        self._process.start()
        orders.close()
        side.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def call(self, action: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.tell(action, *args, **options)
        return self.reply()

    def tell(self, action: Callable[..., Any], *args: Any, **options: Any) -> None:
        self._orders.send((action, args, options))

    def reply(self, timeout_s: float = DEADLINE_S) -> Any:
        assert self._orders.poll(timeout_s), f"process {self.pid} did not answer within {timeout_s:g} s"
        is_fine, result = self._orders.recv()
        if not is_fine:
            raise result
        return result

    def poll(self, timeout_s: float) -> bool:
        """Whether the answer is there within this time."""
        return self._orders.poll(timeout_s)

    def await_pause(self) -> str:
        """Block until code over there pauses; returns where."""
        assert self.side.poll(DEADLINE_S), f"process {self.pid} never paused"
        return str(self.side.recv())

    def resume(self) -> None:
        """Let the paused code go on."""
        self.side.send("go on")

    def kill(self) -> None:
        """`kill -9`, and wait for the end."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(DEADLINE_S)
        assert self._process.exitcode == -signal.SIGKILL
        self._close()

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: _state_of(self.pid) == "T", "the process stops")

    def cont(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def ask_to_leave(self) -> None:
        """Ask it to close everything and end."""
        with contextlib.suppress(OSError):
            self._orders.send(None)

    def join(self, code: int = 0) -> None:
        """Wait for the end of one that was asked to leave; assert the exit code."""
        pid = self.pid
        self._process.join(DEADLINE_S)
        got = self._process.exitcode
        if got is None:
            self._end_by_force()
        assert got == code, f"process {pid} exited with {got} (None: it did not end), expected {code}"
        self._close()

    @property
    def is_open(self) -> bool:
        return not self._orders.closed

    def _end_by_force(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.join(DEADLINE_S)
        self._close()

    def _close(self) -> None:
        self._orders.close()
        self.side.close()
        self._process.close()


def peers() -> Iterator[Callable[[], Peer]]:
    """The body of a fixture: makes peers; at the end each is asked to leave and must do so without a complaint."""
    made: list[Peer] = []

    def make() -> Peer:
        made.append(Peer())
        return made[-1]

    yield make
    left = [peer for peer in reversed(made) if peer.is_open]
    try:
        for peer in left:
            peer.cont()
            peer.ask_to_leave()
        for peer in left:
            peer.join()
    finally:
        for peer in left:
            if peer.is_open:
                peer._end_by_force()


def eventually(
    fact: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S, within_s: float = 0.005
) -> Any:
    """Poll until `fact()` is truthy and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := fact()):
        assert time.monotonic() < deadline, f"it never came true that {what}"
        time.sleep(within_s)
    return found


def library_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weightsync-")]


def _state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def _obey(orders: Connection, side: Connection) -> None:
    warnings.simplefilter("error")
    complaints: list[str] = []
    threading.excepthook = lambda args: complaints.append(
        f"{args.thread}: " + "".join(traceback.format_exception(args.exc_value))
    )
    sys.unraisablehook = lambda args: complaints.append(f"{args.err_msg} {args.object!r}: {args.exc_value!r}")
    with contextlib.ExitStack() as stack:
        state = SimpleNamespace(stack=stack, side=side)
        try:
            while (order := orders.recv()) is not None:
                action, args, options = order
                try:
                    answer = (True, action(state, *args, **options))
                except Exception as error:
                    answer = (False, _portable(error))
                orders.send(answer)
        except EOFError:
            os._exit(1)  # the test is gone
    state.__dict__.clear()
    gc.collect()
    eventually(lambda: not library_threads(), f"threads end: {library_threads()}", 10.0)
    print(*complaints, sep="\n", end="", file=sys.stderr, flush=True)
    os._exit(3 if complaints else 0)  # without the second that torch takes to leave


def _portable(error: Exception) -> Exception:
    error.add_note("".join(traceback.format_exception(error))) if hasattr(error, "add_note") else None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))
    return error
