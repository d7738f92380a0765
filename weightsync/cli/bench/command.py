"""`weightsync bench`: rows in the style of nccl-tests, each checked to the last element."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from weightsync import __version__
from weightsync.cli.options import Insecure, KeysDirectory, TimeoutS, Verbose
from weightsync.cli.progress import busy, size_text
from weightsync.cli.pull import parse_size
from weightsync.cli.signals import sigterm_as_interrupt
from weightsync.errors import ConfigError, SyncTimeoutError, WeightSyncError

if TYPE_CHECKING:
    from weightsync.cli.bench.content import Content
    from weightsync.cli.bench.reader import Received

Names = list[str] | None
_WARM_UP = 1
_LAST_WORDS_S = 3.0


@dataclass(frozen=True, slots=True)
class Row:
    """What one way of syncing took, in seconds; medians over the rounds after the first. `ratio`: of `live_s` to a plain copy
    of as many bytes. What only the other end knows is None."""

    transport: str
    swap: str
    tensors: int
    bytes: int
    rounds: int
    stage_s: float | None
    live_s: float | None
    live_p99_s: float | None
    read_s: float | None
    pause_s: float | None
    gib_per_s: float
    plain_copy_s: float
    ratio: float | None
    wrong: int | None


def bench(
    address: Annotated[
        str | None,
        typer.Argument(metavar="[ADDRESS]", show_default=False, help="Where another host runs the same with --serve."),
    ] = None,
    transport: Annotated[
        Names, typer.Option("--transport", metavar="NAME", help="Only this one; may be given again.")
    ] = None,
    swap: Annotated[
        Names, typer.Option("--swap", metavar="MODE", help="remap, copy, flip or adopt; may be given again.")
    ] = None,
    size: Annotated[str, typer.Option("--size", metavar="BYTES", help="Of all tensors, such as 1GiB.")] = "256MiB",
    tensors: Annotated[int, typer.Option("--tensors", min=1, metavar="N", help="In how many tensors.")] = 128,
    rounds: Annotated[int, typer.Option("--rounds", min=2, metavar="N", help="Versions; the first warms up.")] = 6,
    verify: Annotated[str, typer.Option("--verify", metavar="HOW", help="fused, or full (reads it again).")] = "fused",
    serve: Annotated[
        str | None,
        typer.Option("--serve", metavar="ADDRESS", help="Be the sending end for another host, such as tcp://0.0.0.0:7077."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the rows, versions and hardware there too.")
    ] = None,
    keys: KeysDirectory = None,
    insecure: Insecure = False,
    timeout_s: TimeoutS = 60.0,
    verbose: Verbose = False,
) -> None:  # fmt: skip
    """Measure syncs: from publish() to live on a server, every element checked at every version.

    Without an address both ends are processes of this host, and every transport is taken in turn. Between two hosts, start
    the sending end first, then the receiving end with the same --size, --tensors and --rounds. `ratio` is the time over
    that of a plain copy of as many bytes, taken in the same minute; `wrong` counts elements that are not as published.

    Examples:

      weightsync bench

      weightsync bench --transport nixl --size 1GiB

      weightsync bench --serve tcp://0.0.0.0:7077 --insecure          (on one host)

      weightsync bench tcp://10.0.0.1:7077 --insecure --transport zmq (on another)
    """
    from weightsync.wire.registry import transport_names

    installed = transport_names()
    unknown = sorted(set(transport or []) - set(installed))
    if unknown:
        raise ConfigError(f"transports {', '.join(unknown)}: installed are {', '.join(installed)}")
    if address is not None and serve is not None:
        raise ConfigError(
            "an ADDRESS is for the receiving end, --serve for the sending one; this is one of them"
        )
    job = _Job(parse_size(size), tensors, rounds, verify, keys, insecure, timeout_s)
    with sigterm_as_interrupt():
        if serve is not None:
            rows = job.send(serve, transport)
        elif address is not None:
            rows = [
                job.receive(address, name, mode)
                for name in transport or ["auto"]
                for mode in swap or ["remap"]
            ]
        else:
            rows = list(job.here(transport or installed, swap or ["remap"]))
    _show(rows)
    if json_file is not None:
        json_file.write_text(json.dumps(_document(rows), indent=1) + "\n")
    if any(row.wrong for row in rows):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class Sent:
    """One version as its sender saw it: seconds from publish() to staged, and to live; of a plain copy."""

    stage_s: float
    live_s: float
    plain_s: float
    transport: str


@dataclass(frozen=True, slots=True)
class _Job:
    size_bytes: int
    tensors: int
    rounds: int
    verify: str
    keys: Path | None
    insecure: bool
    timeout_s: float

    def here(self, transports: list[str], swaps: list[str]) -> Iterator[Row]:
        """Both ends on this host, one row for each way that works."""
        for name in transports:
            for mode in swaps:
                with busy(f"{name}, {mode}: {self.rounds} versions of {size_text(self.size_bytes)}"):
                    yield self._here(name, mode)

    def _here(self, transport: str, swap: str) -> Row:
        import weightsync as ws
        from weightsync.cli.bench.content import Content
        from weightsync.cli.bench.reader import Received

        content = Content(self.size_bytes, self.tensors)
        with ws.Publisher(
            "tcp://127.0.0.1:0", transports=(transport,), timeout_s=self.timeout_s
        ) as publisher:
            publisher.register(content.state)
            with self._reader(publisher.address, transport, swap) as reader:
                self._await_reader(publisher, reader)
                received: list[Received] = []

                def next_received(version: int) -> None:
                    line = reader.stdout.readline() if reader.stdout else ""
                    if not line:
                        raise ConfigError(f"{transport}, {swap}: {_last_line(reader.communicate()[1])}")
                    received.append(Received(**json.loads(line)))

                try:
                    sent = self._publish(publisher, content, next_received)
                except WeightSyncError:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        reader.wait(_LAST_WORDS_S)
                        next_received(0)  # raises what the receiving end died of
                    raise
        return self._row(transport, swap, content.size_bytes, sent, received)

    @contextmanager
    def _reader(self, address: str, transport: str, swap: str) -> Iterator[subprocess.Popen[str]]:
        options = {
            "size_bytes": self.size_bytes, "tensors": self.tensors, "rounds": self.rounds, "transport": transport,
            "swap": swap, "verify": self.verify, "insecure": False, "timeout_s": self.timeout_s,
        }  # fmt: skip
        argv = [sys.executable, "-m", "weightsync.cli.bench.reader", address, json.dumps(options)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _await_reader(self, publisher: Any, reader: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline:
            try:
                publisher.wait_for_members(1, 0.5)
                return
            except SyncTimeoutError:
                if reader.poll() is not None:
                    raise ConfigError(_last_line(reader.communicate()[1])) from None
        raise SyncTimeoutError(f"the receiving process did not join within {self.timeout_s:g} s")

    def send(self, address: str, transports: Names) -> list[Row]:
        """The sending end, for a receiver elsewhere."""
        import weightsync as ws
        from weightsync.cli.bench.content import Content

        content = Content(self.size_bytes, self.tensors)
        with ws.Publisher(
            address, transports=transports, keys=self.keys, insecure=self.insecure, timeout_s=self.timeout_s
        ) as publisher:
            publisher.register(content.state)
            with busy(f"waiting for a receiver at {publisher.address}, until Ctrl-C"):
                publisher.wait_for_members(1, 24 * 3600.0)
            # the other end checks now, which takes it as long as it would us
            sent = self._publish(publisher, content, lambda version: content.wrong(version))
            name = ", ".join(sorted({one.transport for one in sent}))
        return [self._row(name, "-", content.size_bytes, sent, [])]

    def receive(self, address: str, transport: str, swap: str) -> Row:
        """The receiving end, for a sender elsewhere."""
        from weightsync.cli.bench.reader import receive

        with busy(f"receiving {self.rounds} versions of {size_text(self.size_bytes)} from {address}"):
            received = list(receive(
                address, size_bytes=self.size_bytes, tensors=self.tensors, rounds=self.rounds, transport=transport,
                swap=swap, verify=self.verify, keys=self.keys, insecure=self.insecure, timeout_s=self.timeout_s,
            ))  # fmt: skip
        return self._row(received[-1].transport, swap, self.size_bytes, [], received)

    def _publish(self, publisher: Any, content: Content, await_check: Callable[[int], object]) -> list[Sent]:
        """Every version after the first; each after the one before was checked."""
        from weightsync.cli.bench.yardstick import PlainCopy

        copy, sent = PlainCopy(content.size_bytes), []
        for version in range(1, self.rounds + 1):
            content.go_to(version)
            plain = min(copy.seconds() for _ in range(2))
            started = time.perf_counter()
            ticket = publisher.publish()
            staged = time.perf_counter() - started
            report = ticket.wait("live", self.timeout_s)
            transports = {member.transport for member in report.members.values()}
            sent.append(Sent(staged, time.perf_counter() - started, plain, "+".join(sorted(transports))))
            await_check(version)
        return sent[_WARM_UP:]

    def _row(
        self, transport: str, swap: str, size: int, sent: list[Sent], received: list[Received]
    ) -> Row:  # fmt: skip
        import numpy as np

        from weightsync.cli.bench.yardstick import PlainCopy

        live, plain = [one.live_s for one in sent], [one.plain_s for one in sent]
        if not plain:
            copy = PlainCopy(size)
            plain = [copy.seconds() for _ in range(3)][1:]
        timed = [one for one in received if one.version > _WARM_UP] or received
        read_s = float(np.median([one.read_s for one in timed])) if timed else None
        live_s = float(np.median(live)) if live else None
        plain_s = float(np.median(plain))
        return Row(
            transport, swap, self.tensors, size, self.rounds,
            stage_s=float(np.median([one.stage_s for one in sent])) if sent else None, live_s=live_s,
            live_p99_s=float(np.quantile(live, 0.99)) if live else None, read_s=read_s,
            pause_s=float(np.median([one.pause_s for one in timed])) if timed else None,
            gib_per_s=size / 2**30 / (live_s or read_s or 1.0), plain_copy_s=plain_s,
            ratio=None if live_s is None else live_s / plain_s,
            wrong=sum(one.wrong for one in received) if received else None,
        )  # fmt: skip


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["the receiving process ended"])[-1].removeprefix("error: ")


def _show(rows: list[Row]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in (
        "transport",
        "swap",
        "size",
        "tensors",
        "stage ms",
        "live ms",
        "p99",
        "read ms",
        "pause µs",
        "GiB/s",
        "ratio",
    ):
        table.add_column(head, justify="left" if head in ("transport", "swap") else "right", no_wrap=True)
    table.add_column("wrong", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.transport, row.swap, size_text(row.bytes), str(row.tensors), _milli(row.stage_s), _milli(row.live_s),
            _milli(row.live_p99_s), _milli(row.read_s), "-" if row.pause_s is None else f"{row.pause_s * 1e6:.0f}",
            f"{row.gib_per_s:.2f}", "-" if row.ratio is None else f"{row.ratio:.2f}",
            "-" if row.wrong is None else str(row.wrong),
        )  # fmt: skip
    Console(width=max(Console().width, 110)).print(table)
    print(f"plain copy of as many bytes: {min(row.plain_copy_s for row in rows) * 1e3:.1f} ms")


def _milli(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def _document(rows: list[Row]) -> dict[str, Any]:
    import torch

    return {
        "weightsync": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "system": f"{platform.system()} {platform.release()}", "cpus": os.cpu_count(),
            "python": platform.python_version(), "torch": torch.__version__,
        },
        "rows": [asdict(row) for row in rows],
    }  # fmt: skip
