"""The live picture of a run: training on top, the versions in the middle, one row per server below."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weightsync.cli.demo.numerals import MISSING, microseconds, milliseconds, pair, short
from weightsync.cli.demo.sparkline import smoothed, sparkline
from weightsync.cli.demo.tally import ServerTally, Tally
from weightsync.cli.progress import size_text

CURVE_WIDTH = 48


def draw_view(tally: Tally, now_s: float) -> RenderableType:
    """Everything worth watching, as of `now_s` on the monotonic clock."""
    return Group(
        Panel(_draw_header(tally, now_s), title="[bold]weightsync demo[/bold]", border_style="cyan"),
        Panel(_draw_sync(tally), title="one trainer", title_align="left", border_style="blue"),
        Panel(_draw_servers(tally), title=_servers_title(tally), title_align="left", border_style="green"),
        _draw_sample(tally),
    )


def describe_phase(tally: Tally, now_s: float) -> str:
    schedule = tally.schedule
    if schedule is None or now_s < schedule.begin_s:
        return "starting"
    if now_s >= schedule.end_s:
        return "finished" if tally.is_over else "finishing"
    return "syncing on" if schedule.is_syncing(now_s) else "syncing off"


def describe_model(tally: Tally) -> str:
    trainer = tally.trainer
    if trainer is None:
        return f"{tally.settings.model_size} GPT"
    return (
        f"{tally.settings.model_size} GPT, {trainer.parameters / 1e6:,.2f} M parameters, "
        f"{trainer.tensors} tensors, {size_text(trainer.size_bytes)} a version"
    )


def describe_replicas(tally: Tally) -> str:
    count = len(tally.servers)
    return "1 server" if count == 1 else f"{count} servers"


def describe_transport(tally: Tally) -> str:
    """The transport in use, and what was asked for where that differs."""
    asked = tally.settings.transport
    used = sorted({server.receipts.transport for server in tally.servers.values()} - {""})
    return asked if not used or used == [asked] else f"{', '.join(used)} ({asked})"


def _draw_header(tally: Tally, now_s: float) -> RenderableType:
    settings, schedule = tally.settings, tally.schedule
    elapsed_s = 0.0 if schedule is None else min(max(0.0, now_s - schedule.begin_s), settings.seconds)
    phase = describe_phase(tally, now_s)
    style = {"syncing on": "bold green", "syncing off": "bold yellow"}.get(phase, "dim")
    progress = Table.grid(padding=(0, 2), expand=True)
    progress.add_column(no_wrap=True)
    progress.add_column(ratio=1)
    progress.add_column(justify="right", no_wrap=True)
    progress.add_row(
        Text(phase, style=style),
        ProgressBar(total=settings.seconds, completed=elapsed_s),
        f"{elapsed_s:.0f} of {settings.seconds:g} s",
    )
    facts = f"{describe_model(tally)}  ·  transport {describe_transport(tally)}  ·  swap {settings.swap}"
    return Group(Text(facts, style="dim", no_wrap=True, overflow="ellipsis"), progress)


def _draw_sync(tally: Tally) -> RenderableType:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(no_wrap=True, ratio=1)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(no_wrap=True, ratio=1)
    grid.add_row(
        "versions published",
        f"{len(tally.published)}" + (f", {tally.skipped} skipped" if tally.skipped else ""),
        "publish() call",
        milliseconds(tally.publish_call_s),
    )
    grid.add_row("time to staged", milliseconds(tally.staged_s), "bytes received", describe_bytes(tally))
    grid.add_row(
        "time to all live",
        milliseconds(tally.live_s),
        "one read",
        MISSING if tally.gib_per_s is None else f"{short(tally.gib_per_s)} GiB/s",
    )
    return Group(_draw_loss(tally), grid)


def _draw_loss(tally: Tally) -> RenderableType:
    curve = smoothed([loss.value for loss in tally.losses])
    if not curve:
        return Text(f"training loss       {MISSING}", style="dim")
    return Text.assemble(
        ("training loss       ", "dim"),
        (sparkline(curve, CURVE_WIDTH), "magenta"),
        f"  {curve[0]:.2f} → {curve[-1]:.2f}",
        (f"  in {tally.losses[-1].step:,} optimizer steps", "dim"),
    )


def describe_bytes(tally: Tally) -> str:
    if tally.settings.swap == "adopt":
        return "none, pages are shared"
    return size_text(tally.bytes_received)


def _servers_title(tally: Tally) -> str:
    load = f", {short(tally.rate)} requests/s each" if tally.rate else ""
    return f"{describe_replicas(tally)}{load}"


def _draw_servers(tally: Tally) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, padding=(0, 1))
    table.add_column("", no_wrap=True)
    for heading in ("version\nlive", "lag", "held-out\nloss", "tokens/s", "request, ms\np50 / p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("swap pause, µs\np50 / p99", "passes", "re-\ndigested", "mixed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for server in tally.servers.values():
        table.add_row(*_server_row(tally, server))
    return Group(table, _draw_latency(tally))


def _server_row(tally: Tally, server: ServerTally) -> list[RenderableType]:
    heldout = MISSING if server.heldout_last is None else f"{server.heldout_last:.2f}"
    mixed = server.passes.mixed
    return [
        Text(server.name, style="bold"),
        Text(str(server.live_version), style="bold cyan"),
        str(tally.lag(server)),
        heldout,
        f"{server.recent_tokens_per_s:,.0f}",
        pair(tally.request_s(is_syncing=True, name=server.name), 1e3),
        pair(server.pause_s(tally.begin_s), 1e6),
        f"{server.passes.done:,}",
        f"{server.passes.checked:,}",
        Text(str(mixed), style="bold red" if mixed else "green"),
    ]


def _draw_latency(tally: Tally) -> RenderableType:
    on, off = tally.request_s(is_syncing=True), tally.request_s(is_syncing=False)
    return Text.assemble(
        ("request p50 / p99  ", "dim"),
        ("syncing on ", "green"),
        milliseconds(on),
        ("   syncing off ", "yellow"),
        milliseconds(off),
        ("   swap pause ", "dim"),
        microseconds(tally.pause_s),
    )


def _draw_sample(tally: Tally) -> RenderableType:
    """The newest answer of each server after the end of its prompt: gibberish at first, words after some versions."""
    lines = Text(no_wrap=True, overflow="ellipsis")
    for server in tally.servers.values():
        prompt, reply = (_printable(part) for part in server.sample)
        lines.append(f" {server.name} ", style="bold")
        lines.append(prompt, style="dim")
        lines.append(f"{reply}\n", style="bold magenta")
    lines.rstrip()
    return lines


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() and char.isascii() else "·" for char in text)
