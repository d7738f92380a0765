"""`weightsync coordinator`: what keeps a fleet together, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from weightsync.cli.options import Insecure, KeysDirectory, Verbose
from weightsync.cli.signals import sigterm_as_interrupt
from weightsync.cli.status import document, render

if TYPE_CHECKING:
    from weightsync import FleetStatus

POLL_S = 0.1


def coordinator(
    address: Annotated[
        str, typer.Argument(metavar="[ADDRESS]", help="Where to listen. Port 0 takes any free port.")
    ] = "tcp://127.0.0.1:7077",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON document, as of weightsync status, for every change.")
    ] = False,
    keys: KeysDirectory = None,
    insecure: Insecure = False,
    takeover: Annotated[
        bool,
        typer.Option(
            "--takeover",
            help="Replace a coordinator or publisher that is alive on this address, and fence it.",
        ),
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="Who holds the address, until rank 0 of a trainer has come.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Hold the address that trainers publish through and servers follow, until Ctrl-C.

    A trainer made with [bold]Publisher(ADDRESS, coordinator="external")[/bold] can then end, crash and start again,
    and so can this command, while the servers go on: all come back by themselves, and version numbers keep growing.
    Weights never pass through here. With keys, this is the publisher's key folder.

    Examples:

      weightsync coordinator tcp://127.0.0.1:7077

      weightsync coordinator tcp://0.0.0.0:7077 --keys ~/fleet-keys
    """
    with sigterm_as_interrupt():
        try:
            _coordinate(address, as_json, keys, insecure, takeover, name)
        except KeyboardInterrupt:
            if not as_json:
                print("stopped", flush=True)


def _coordinate(
    address: str, as_json: bool, keys: Path | None, insecure: bool, takeover: bool, name: str | None
) -> None:
    from weightsync.wire.address import parse_address, require_safe
    from weightsync.wire.coordinator import Coordinator
    from weightsync.wire.keys import load_publisher_keys

    parsed = parse_address(address)
    require_safe(parsed, has_keys=keys is not None, insecure=insecure)
    held = Coordinator(
        parsed,
        publisher=name or f"{socket.gethostname()}:{os.getpid()}",
        epoch=time.time_ns() // 1_000_000,
        keys=load_publisher_keys(keys) if keys is not None else None,
        takeover=takeover,
        is_external=True,
    )
    with contextlib.closing(held), _shown(as_json) as show:
        while True:
            show(held.status())
            held.wait(POLL_S)  # raises FencedError when another one took over


@contextlib.contextmanager
def _shown(as_json: bool) -> Iterator[Callable[[FleetStatus], None]]:
    """How the state is shown: a live table on a terminal, else a line for each change."""
    console = Console()
    if as_json or not console.is_terminal:
        yield _Log(as_json)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda fleet: live.update(render(fleet), refresh=True)


class _Log:
    """Prints what has changed since it was called last."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._before: dict[str, str] = {}

    def __call__(self, fleet: FleetStatus) -> None:
        now = _facts(fleet)
        news = [line for what, line in now.items() if self._before.get(what) != line]
        news += [f"{what} is gone" for what in self._before if what not in now]
        self._before = now
        if news:
            print(json.dumps(document(fleet)) if self._as_json else "\n".join(news), flush=True)


def _facts(fleet: FleetStatus) -> dict[str, str]:
    """What is worth a line when it changes, by what it is about."""
    facts = {"address": f"coordinating at {fleet.address}"}
    if not fleet.missing_ranks:
        facts["publisher"] = (
            f"publisher {fleet.publisher}: all ranks are there ({fleet.ranks}), epoch {fleet.epoch}"
        )
    elif fleet.ranks:
        facts["publisher"] = f"publisher {fleet.publisher}: missing {', '.join(fleet.missing_ranks)}"
    if fleet.version:
        facts["version"] = f"version {fleet.version} is sealed"
    for member in fleet.members:
        serves = "joined" if member.live_version is None else f"version {member.live_version} is live"
        facts[member.name] = f"{member.name}: {f'refused: {member.error}' if member.error else serves}"
    return facts
