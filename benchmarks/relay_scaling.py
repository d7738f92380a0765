"""One trainer and more and more servers on hosts of their own with slow links: `python -m benchmarks.relay_scaling`.

For each number of servers, without relay and with it: what leaves the trainer's network interface, in copies of the model, and
the time from publish() to the last server verified, over that of one server alone.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import netns

_ROUNDS = 4
_DEADLINE_S = 300.0


def main(
    servers: Annotated[str, typer.Option(help="Numbers of servers, with commas.")] = "1,2,4,8",
    mib: Annotated[int, typer.Option(help="Size of the model.")] = 64,
    mbit: Annotated[int, typer.Option(help="Rate of each host's link, both ways.")] = 200,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows there too.")] = None,
) -> None:
    """Measure how relay scales, over network namespaces. Needs root."""
    reason = netns.why_not()
    if reason is not None:
        sys.exit(f"can't measure: {reason}")
    counts = [int(count) for count in servers.split(",")]
    rows = []
    with netns.hosts(max(counts) + 1, mbit=mbit) as hosts:
        for count in counts:
            for relay in ("never", "auto") if count > 1 else ("never",):
                row = measure(hosts[0], hosts[1 : count + 1], mib, relay)
                alone = rows[0]["ready_s"] if rows else row["ready_s"]
                rows.append(row | {"times_alone": row["ready_s"] / alone})
                print(
                    f"{count} servers, relay {relay}: {row['egress_copies']:.2f} copies left the trainer, ready after "
                    f"{row['ready_s']:.2f} s = {rows[-1]['times_alone']:.2f} x one server alone, wrong {row['wrong']}",
                    flush=True,
                )
    if json_file is not None:
        json_file.write_text(json.dumps({"mib": mib, "mbit": mbit, "rows": rows}, indent=1) + "\n")


def measure(trainer: netns.Host, servers: list[netns.Host], mib: int, relay: str) -> dict[str, Any]:
    """Medians over the versions after the first."""
    address = f"tcp://{trainer.address}:7077"
    python = [sys.executable, "-m", "benchmarks.relay_scaling_end"]
    with contextlib.ExitStack() as stack:
        sender = _start(stack, trainer.command(*python, "send", address, str(mib), str(len(servers)), relay))
        for server in servers:
            _start(stack, server.command(*python, "receive", address, str(mib), server.name))
        times, copies, wrong = [], [], 0
        for _ in range(_ROUNDS):
            _say(sender, "next")
            _expect(sender, "joined")
            before = trainer.bytes_out()
            _say(sender, "publish")
            report = json.loads(_line(sender))
            copies.append((trainer.bytes_out() - before) / (mib << 20))
            times.append(report["ready_s"])
            wrong += report["errors"]
        _say(sender, "end")
        sender.wait(30)
    return {
        "servers": len(servers), "relay": relay, "egress_copies": float(np.median(copies[1:])),
        "ready_s": float(np.median(times[1:])), "wrong": wrong,
    }  # fmt: skip


def _start(stack: contextlib.ExitStack, argv: list[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _say(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()


def _expect(process: subprocess.Popen[str], word: str) -> None:
    got = _line(process)
    if got != word:
        raise RuntimeError(f"expected {word!r}, got {got!r}")


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    started = time.monotonic()
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"a process ended, after {time.monotonic() - started:.0f} s")
    return line


if __name__ == "__main__":
    typer.run(main)
