"""How far a transfer is: a live bar on a terminal, plain lines elsewhere; on stderr, results go to stdout."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

PLAIN_INTERVAL_S = 2.0


def size_text(size_bytes: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.2f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.2f} TiB"


def rate_text(size_bytes: float, seconds: float) -> str:
    """GiB/s of `size_bytes` in `seconds`."""
    return f"{size_bytes / 2**30 / max(seconds, 1e-9):.2f} GiB/s"


@contextlib.contextmanager
def busy(label: str) -> Iterator[None]:
    """Says what goes on while nothing can be counted."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(label):
            yield
    else:
        print(label, file=sys.stderr, flush=True)
        yield


class ByteProgress:
    """A context manager; call it with (done bytes, total bytes), as often and from any thread you like."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: Progress | None = None
        self._started = self._printed = time.monotonic()

    def __enter__(self) -> ByteProgress:
        console = Console(stderr=True)
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeElapsedColumn(),
                console=console,
            )
            self._task = self._bar.add_task(self._label, total=None)
            self._bar.start()
        return self

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done_bytes, total=total_bytes)
            return
        now = time.monotonic()
        if now - self._printed >= PLAIN_INTERVAL_S:
            self._printed = now
            rate = rate_text(done_bytes, now - self._started)
            print(
                f"{self._label}: {size_text(done_bytes)} of {size_text(total_bytes)}, {rate}", file=sys.stderr
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
