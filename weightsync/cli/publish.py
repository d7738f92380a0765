"""`weightsync publish`: serve a checkpoint to everyone who pulls or subscribes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightsync.cli.options import Insecure, KeysDirectory, Verbose
from weightsync.cli.progress import busy, rate_text, size_text
from weightsync.cli.signals import sigterm_as_interrupt
from weightsync.errors import SyncTimeoutError

if TYPE_CHECKING:
    from weightsync import Publisher, Ticket

POLL_S = 0.05


def publish(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A .safetensors file or a Hugging Face checkpoint folder.",
            show_default=False,
        ),
    ],
    address: Annotated[
        str, typer.Option("--address", help="Where to listen. Port 0 takes any free port.")
    ] = "tcp://127.0.0.1:7077",
    once: Annotated[
        int | None,
        typer.Option("--once", min=1, metavar="N", help="Stop when N members have the weights live."),
    ] = None,
    for_s: Annotated[
        float | None,
        typer.Option(
            "--for",
            min=0.0,
            metavar="SECONDS",
            help="Stop after SECONDS; with --once, fail if N is not reached.",
        ),
    ] = None,
    keys: KeysDirectory = None,
    insecure: Insecure = False,
    takeover: Annotated[
        bool,
        typer.Option("--takeover", help="Replace a publisher that is alive on this address, and fence it."),
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="What members see as the publisher's name.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Serve a checkpoint until Ctrl-C, to `weightsync pull` and to every `Subscriber`.

    The files are mapped, checked, and copied once into shared memory; they may change afterwards.

    Examples:

      weightsync publish ./Llama-3.2-1B

      weightsync publish model.safetensors --address tcp://127.0.0.1:0 --once 2 --for 600
    """
    with sigterm_as_interrupt():
        is_done = False
        try:
            _serve(path, address, once, for_s, keys, insecure, takeover, name)
            is_done = True
        except KeyboardInterrupt:
            print("stopped", flush=True)
        if not is_done and once is not None:
            raise typer.Exit(130)


def _serve(
    path: Path,
    address: str,
    once: int | None,
    for_s: float | None,
    keys: Path | None,
    insecure: bool,
    takeover: bool,
    name: str | None,
) -> None:
    import weightsync as ws
    from weightsync.cli.checkpoint_source import open_checkpoint

    tensors = open_checkpoint(path)
    total = sum(tensor.nbytes for tensor in tensors.values())
    print(f"{path}: {len(tensors)} tensors, {size_text(total)}", flush=True)
    with ws.Publisher(address, keys=keys, insecure=insecure, takeover=takeover, name=name) as publisher:
        publisher.register(tensors)
        started = time.monotonic()
        with busy(f"staging {size_text(total)}"):
            ticket = publisher.publish()
        staged_s = time.monotonic() - started
        print(f"version {ticket.version} staged in {staged_s:.2f} s, {rate_text(total, staged_s)}")
        print(f"serving at {publisher.address}")
        flags = f" --keys {keys}" if keys else " --insecure" if insecure else ""
        print(
            f"fetch it with: weightsync pull {publisher.address}{flags} --out {_pulled_name(path)}",
            flush=True,
        )
        _wait(publisher, ticket, once, for_s)


def _pulled_name(path: Path) -> str:
    return "pulled.safetensors" if path.suffix == ".safetensors" else "pulled"


class _Audience:
    """Who has one version live; members are remembered after they left."""

    def __init__(self, publisher: Publisher, ticket: Ticket) -> None:
        self._publisher = publisher
        self._ticket = ticket
        self.live: set[str] = set()
        self.present: list[str] = []
        self._refusals: dict[str, str] = {}

    def look(self) -> None:
        """Ask once more, and print what is new."""
        members = self._publisher.status().members
        self.present = [member.name for member in members]
        reports = self._ticket.report.members
        live = {member.name for member in members if (member.live_version or 0) >= self._ticket.version}
        live |= {name for name, report in reports.items() if report.live_s is not None}
        for name in sorted(live - self.live):
            print(f"{name}: version {self._ticket.version} is live", flush=True)
        self.live |= live
        errors = {member.name: member.error for member in members}
        errors |= {name: report.error for name, report in reports.items()}
        for name, error in errors.items():
            if error is not None and self._refusals.get(name) != error:
                self._refusals[name] = error
                print(f"{name}: refused: {error}", flush=True)


def _wait(publisher: Publisher, ticket: Ticket, once: int | None, for_s: float | None) -> None:
    """Tell what members do, until the wanted number have it live, the time is over, or a signal comes."""
    deadline = None if for_s is None else time.monotonic() + for_s
    audience = _Audience(publisher, ticket)
    while True:
        publisher.wait_for_members(0)  # returns at once; raises FencedError when another publisher took over
        audience.look()
        count = len(audience.live)
        if once is not None and count >= once:
            print(f"done: {count} of {once} members have version {ticket.version}")
            return
        if deadline is not None and time.monotonic() >= deadline:
            if once is None:
                return
            waiting = sorted(set(audience.present) - audience.live)
            raise SyncTimeoutError(
                f"{count} of {once} members had version {ticket.version} live after {for_s:g} s; "
                f"connected without it: {', '.join(waiting) or 'nobody'}"
            )
        time.sleep(POLL_S)
