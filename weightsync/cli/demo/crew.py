"""The demo's child processes: spawned, listened to, and never left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Literal

from weightsync.cli.demo.events import Crashed, Event, Order, Stop
from weightsync.cli.demo.line import Line
from weightsync.cli.demo.settings import Settings

TRAINER = "trainer"


class ChildFailedError(Exception):
    """A child process died or did not end well; the text says which, and carries its traceback."""


class Crew:
    """One trainer and N servers. `close()` ends them all; after it no child is alive."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self._lines: dict[str, Connection] = {}
        self._processes: dict[str, SpawnProcess] = {}
        self._told_to_stop: set[str] = set()
        with _interrupts_held():
            for index, name in enumerate((TRAINER, *settings.server_names)):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=run_child, args=(name, index - 1, settings, theirs), name=name, daemon=True
                )
                process.start()
                theirs.close()
                self._lines[name] = ours
                self._processes[name] = process

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> Literal[False]:
        self.close(grace_s=0.0)
        return False

    def tell(self, order: Order, *names: str) -> None:
        """Give an order to these children, or to all of them."""
        for name in names or tuple(self._lines):
            if isinstance(order, Stop):
                self._told_to_stop.add(name)
            with contextlib.suppress(OSError):  # a dead child is noticed by `events`
                self._lines[name].send(order)

    def events(self, timeout_s: float) -> list[Event]:
        """What the children sent, after waiting at most `timeout_s` for the first event.

        ChildFailedError: a child crashed, was killed, or left before it was told to stop.
        """
        heard: list[Event] = []
        open_lines = [line for line in self._lines.values() if not line.closed]
        ready = wait(open_lines, timeout_s)
        for line in open_lines:
            if line not in ready:
                continue
            try:
                event: Event = line.recv()
            except (EOFError, OSError):
                line.close()
                continue
            if isinstance(event, Crashed):
                raise ChildFailedError(f"{event.name} failed:\n{event.traceback}")
            heard.append(event)
        self._require_alive()
        return heard

    def _require_alive(self) -> None:
        """A child may exit only after it was told to, and only with exit code 0. Its pipe is read to the end first."""
        for name, process in self._processes.items():
            has_left = self._lines[name].closed and process.exitcode is not None
            if has_left and (process.exitcode != 0 or name not in self._told_to_stop):
                raise ChildFailedError(f"{name} {describe_exit(process.exitcode)}")

    def close(self, grace_s: float = 0.0) -> list[str]:
        """Stop everyone; after `grace_s` by force. Returns a line per child that didn't end well by itself."""
        self.tell(Stop())
        deadline_s = time.monotonic() + grace_s
        complaints = []
        for name, process in self._processes.items():
            process.join(max(0.0, deadline_s - time.monotonic()))
            if process.exitcode is None:
                complaints.append(f"{name} did not stop within {grace_s:g} s and was ended")
                end_process(process)
            elif process.exitcode != 0:
                complaints.append(f"{name} {describe_exit(process.exitcode)}")
            self._lines[name].close()
        self._processes.clear()
        return complaints


def run_child(name: str, index: int, settings: Settings, connection: Connection) -> None:
    """The edge of a child process: what it did not expect becomes a `Crashed` event and a non-zero exit."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent alone acts on it
    line = Line(connection)
    try:
        if name == TRAINER:
            from weightsync.cli.demo.trainer import run_trainer

            run_trainer(settings, line)
        else:
            from weightsync.cli.demo.server import run_server

            run_server(settings, index, line)
    except Exception:
        line.send(Crashed(name, traceback.format_exc()))
        raise SystemExit(1) from None
    finally:
        connection.close()


def end_process(process: SpawnProcess) -> None:
    process.terminate()
    process.join(2.0)
    if process.exitcode is None:
        process.kill()
        process.join(2.0)


def describe_exit(exit_code: int | None) -> str:
    if exit_code is None:
        return "is still running"
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"left with exit code {exit_code}"


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Start children with Ctrl-C ignored, so that one pressed during their imports doesn't kill them mid-way."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, which receives no Ctrl-C anyway
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
