"""Fixtures of all tests: addresses that nobody else uses, and child processes that end by a deadline."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import settings

DEADLINE_S = 60.0

settings.register_profile("weightsync", deadline=None)  # speed is measured in benchmarks, not in tests
settings.load_profile("weightsync")


class Child:
    """A real process. Its output (stdout and stderr together) is collected while it runs."""

    def __init__(self, argv: Sequence[str], env: dict[str, str]) -> None:
        self.argv = list(argv)
        self.process = subprocess.Popen(
            self.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._is_over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """What it has printed so far."""
        with self._changed:
            return "".join(self._lines)

    def wait_for(self, pattern: str, timeout_s: float = DEADLINE_S) -> re.Match[str]:
        """The first match in the output; fails when the process ends, or the deadline passes, without one."""

        def find() -> re.Match[str] | None:
            return re.search(pattern, "".join(self._lines))

        with self._changed:
            self._changed.wait_for(lambda: find() or self._is_over, timeout_s)
            match = find()
        assert match, f"{self.argv} never printed {pattern!r}:\n{self.output}"
        return match

    def join(self, code: int = 0, timeout_s: float = DEADLINE_S) -> str:
        """Wait for the end, assert the exit code, return the output."""
        try:
            got = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"{self.argv} still ran after {timeout_s:g} s:\n{self.output}")
        self._reader.join(DEADLINE_S)
        assert got == code, f"{self.argv} exited with {got}, expected {code}:\n{self.output}"
        return self.output

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


@pytest.fixture
def spawn() -> Iterator[Callable[..., Child]]:
    """`spawn("-m", "weightsync.cli", NAME="value")` starts a Python child. None may outlive the test."""
    children: list[Child] = []

    def start(*argv: object, **env: str) -> Child:
        child = Child([sys.executable, *map(str, argv)], {**os.environ, "PYTHONUNBUFFERED": "1", **env})
        children.append(child)
        return child

    yield start
    left = [child for child in children if child.process.poll() is None]
    for child in left:
        child.kill()
    for child in children:
        child._reader.join(DEADLINE_S)
    assert not left, f"still running at the end of the test: {[child.argv for child in left]}"


@pytest.fixture
def address() -> str:
    """An address without a file or a port behind it."""
    return f"ipc://@weightsync-test-{uuid.uuid4().hex}"
