"""`weightsync demo`: options in, a run watched live, verdicts and files out."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightsync.cli.demo.crew import ChildFailedError
from weightsync.cli.demo.outputs import Outputs
from weightsync.cli.demo.performance import Performance
from weightsync.cli.demo.screen import Screen, print_summary
from weightsync.cli.demo.settings import ModelSize, Settings, Swap, Transport
from weightsync.cli.demo.summary import has_failed, judge_run
from weightsync.cli.options import Verbose
from weightsync.cli.signals import sigterm_as_interrupt

PLAIN_WIDTH = 110
INTERRUPTED = 130  # what shells report after Ctrl-C


def demo(
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to measure, once all processes are up.")
    ] = 30.0,
    replicas: Annotated[
        int, typer.Option(metavar="N", help="Server processes, each with its own weights.")
    ] = 2,
    model_size: Annotated[
        ModelSize,
        typer.Option(
            help="GPT to train and serve: 0.1, 0.8, 5, 25 or 85 million parameters. The larger, the more bytes a "
            "version has and the fewer optimizer steps fit into the run."
        ),
    ] = "small",
    transport: Annotated[
        Transport,
        typer.Option(help="Way of the bytes: [bold]auto[/bold] picks shared memory on one host, zmq is TCP."),
    ] = "auto",
    swap: Annotated[
        Swap,
        typer.Option(
            help="How a verified version becomes the live one: [bold]remap[/bold] exchanges page tables, "
            "[bold]copy[/bold] copies in place, [bold]flip[/bold] rebinds the tensors, "
            "[bold]adopt[/bold] maps the trainer's own pages and moves nothing."
        ),
    ] = "remap",
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="PER_SECOND",
            help="Requests per second and server. Default: well below what a server can do, as measured at the start.",
        ),
    ] = None,
    publish_every: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS", help="Optimizer steps between two versions. Default: depends on the size."
        ),
    ] = None,
    check_every: Annotated[
        int,
        typer.Option(
            metavar="PASSES",
            help="Re-digest the live weights in one of this many forward passes, to prove that none mixes versions.",
        ),
    ] = 8,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Save a timeline: loss, versions, requests, pauses. Needs matplotlib."
        ),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the live view as an SVG picture.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Save all measurements as JSON.")] = None,
    verbose: Verbose = False,
) -> None:
    """Train a small GPT and serve it with fresh weights, on this machine, for half a minute.

    One process trains on text that ships with Python and publishes its
    weights every few optimizer steps. The servers answer a steady stream of
    requests meanwhile, and switch to each new version between two forward
    passes. For a third of the run the trainer keeps its weights to itself,
    which shows what syncing costs the requests.

    Every few passes the live weights are digested again while they are
    pinned, and compared with what the trainer published under the version
    that the server claims. The exit code is 0 only if no pass mixed versions,
    every digest matched and every server switched while serving.

    [dim]weightsync demo --seconds 60 --replicas 3 --plot timeline.png
    weightsync demo --model-size large --swap adopt --json out.json[/dim]
    """
    _require(0 < seconds < math.inf, "--seconds", "must be a number above 0")
    _require(replicas >= 1, "--replicas", "at least one server is needed")
    _require(rate is None or 0 < rate < math.inf, "--rate", "must be a number above 0")
    _require(publish_every is None or publish_every >= 1, "--publish-every", "must be at least 1")
    _require(check_every >= 1, "--check-every", "must be at least 1")
    outputs = Outputs(json, plot, svg)
    outputs.check()
    settings = Settings(seconds, replicas, model_size, transport, swap, rate, publish_every, check_every)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    exit_code = perform(settings, outputs, console)
    if exit_code:
        raise typer.Exit(exit_code)


def perform(settings: Settings, outputs: Outputs, console: Console) -> int:
    """Run, show and save; returns the exit code of the command."""
    failure = None
    screen = Screen(console)
    performance = Performance(settings, screen.show)
    tally = performance.tally
    with sigterm_as_interrupt():
        try:
            with screen:
                performance.run()
                screen.show_last(tally)
        except ChildFailedError as error:
            failure = str(error)
        except KeyboardInterrupt:  # pressed again while winding down
            performance.was_interrupted = True
    claims = judge_run(tally)
    is_complete = failure is None and not performance.was_interrupted
    if tally.schedule is not None:
        print_summary(console, tally, claims)
    for path in outputs.write(tally, claims, time.monotonic(), is_complete=is_complete):
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    if failure is not None:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    if performance.was_interrupted:
        console.print("interrupted before the end: the figures cover the time until then")
        return INTERRUPTED
    return 1 if has_failed(claims) else 0


def _require(is_ok: bool, option: str, text: str) -> None:
    if not is_ok:
        raise typer.BadParameter(text, param_hint=option)
