"""`weightsync status`: what a publisher and its members are doing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weightsync.cli.options import Address, AsJson, Insecure, KeysDirectory, TimeoutS, Verbose
from weightsync.cli.progress import size_text
from weightsync.cli.signals import sigterm_as_interrupt
from weightsync.errors import SyncTimeoutError, TransportError

if TYPE_CHECKING:
    from weightsync import FleetStatus

PLAIN_WIDTH = 200


def status(
    address: Address,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="How often --watch asks.")
    ] = 1.0,
    keys: KeysDirectory = None,
    insecure: Insecure = False,
    timeout_s: TimeoutS = 5.0,
    verbose: Verbose = False,
) -> None:
    """Show the members of a fleet, the version live on each, and how many versions it lags behind.

    Example:  weightsync status tcp://127.0.0.1:7077 --watch

    [bold]--json[/bold] prints an object with the keys address, epoch, publisher, version (newest sealed, 0:
    none), slots, size_bytes, tensors, ranks (of the publisher), missing_ranks (those that are not there), and
    members: a list of objects with name, host, pid, role, transport,
    swap, state, live_version (null: none), lag (in versions), last_seen_s (seconds ago) and error (null:
    none). With [bold]--watch[/bold] it prints one such object a line.
    """
    ask = _Question(address, keys, insecure, timeout_s)
    if not watch:
        _show(ask(), as_json)
        return
    try:
        with sigterm_as_interrupt():
            _watch(ask, as_json, interval_s)
    except KeyboardInterrupt:
        pass


class _Question:
    """Asks one publisher for its status, each time it is called."""

    def __init__(self, address: str, keys: Path | None, insecure: bool, timeout_s: float) -> None:
        self.address = address
        self._keys = keys
        self._insecure = insecure
        self._timeout_s = timeout_s

    def __call__(self) -> FleetStatus:
        import weightsync as ws

        return ws.fetch_status(
            self.address, keys=self._keys, insecure=self._insecure, timeout_s=self._timeout_s
        )


def _watch(ask: _Question, as_json: bool, interval_s: float) -> None:
    console = Console()
    if as_json or not console.is_terminal:
        while True:
            answer = _try(ask)
            if isinstance(answer, str):
                typer.echo(answer, err=True)
            else:
                _show(answer, as_json)
            time.sleep(interval_s)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            answer = _try(ask)
            live.update(
                Text(answer, style="red") if isinstance(answer, str) else render(answer), refresh=True
            )
            time.sleep(interval_s)


def _try(ask: _Question) -> FleetStatus | str:
    """The status, or why there is none: a publisher may restart while it is watched."""
    try:
        return ask()
    except (SyncTimeoutError, TransportError) as error:
        return f"no answer: {error}"


def _show(fleet: FleetStatus, as_json: bool) -> None:
    if as_json:
        print(json.dumps(document(fleet)), flush=True)
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    console.print(render(fleet))


def document(fleet: FleetStatus) -> Any:
    """As JSON has it."""
    import msgspec

    return msgspec.to_builtins(fleet)


def render(fleet: FleetStatus) -> Group:
    """As a table."""
    version = f"version {fleet.version}" if fleet.version else "nothing published yet"
    title = Text(
        f"{fleet.publisher} at {fleet.address}: {version}, epoch {fleet.epoch}, {fleet.tensors} tensors, "
        f"{size_text(fleet.size_bytes)}, {fleet.slots} slots, {len(fleet.members)} members"
    )
    if fleet.missing_ranks:
        title.append(f"; missing: {', '.join(fleet.missing_ranks)}", style="yellow")
    if not fleet.members:
        return Group(title)
    table = Table("member", "host", "pid", "role", "transport", "swap", "state", box=None, pad_edge=False)
    for column in ("live", "lag", "seen"):
        table.add_column(column, justify="right")
    table.add_column("error", overflow="fold")
    for member in fleet.members:
        cells = (
            member.name,
            member.host,
            str(member.pid),
            member.role,
            member.transport,
            member.swap,
            member.state,
            "-" if member.live_version is None else str(member.live_version),
            "-" if member.lag is None else str(member.lag),
            f"{member.last_seen_s:.1f} s",
            member.error or "",
        )
        table.add_row(*map(Text, cells))  # as Text: what a peer sent is never markup
    return Group(title, table)
