"""The command line as a whole: which commands there are, global options, and how errors are shown."""

from __future__ import annotations

import logging
import sys
import traceback
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from weightsync import __version__
from weightsync.cli.options import TYPER, Verbose, is_verbose
from weightsync.errors import WeightSyncError

COMMANDS = {
    "demo": "weightsync.cli.demo.command:demo",
    "publish": "weightsync.cli.publish:publish",
    "pull": "weightsync.cli.pull:pull",
    "status": "weightsync.cli.status:status",
    "coordinator": "weightsync.cli.coordinator:coordinator",
    "promote": "weightsync.cli.orders:promote",
    "rollback": "weightsync.cli.orders:rollback",
    "bench": "weightsync.cli.bench.command:bench",
    "plan": "weightsync.cli.plan:plan",
    "doctor": "weightsync.cli.doctor.command:doctor",
    "keys": "weightsync.cli.keys:keys",
}
"""Command name to `module:object`; the object is a function, or a `typer.Typer` for a group."""


class Commands(TyperGroup):
    """A group that imports a command when it is named, and turns refusals into one line."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        home = COMMANDS.get(cmd_name)
        if home is None:
            return None
        module, _, attribute = home.partition(":")
        target = getattr(import_module(module), attribute)
        if not isinstance(target, typer.Typer):
            single = typer.Typer(**TYPER)
            single.command(cmd_name)(target)
            target = single
        command = typer.main.get_command(target)
        command.name = cmd_name
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except WeightSyncError as error:
            if is_verbose(ctx):
                traceback.print_exc()
            else:
                print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from error


app = typer.Typer(cls=Commands, no_args_is_help=True, **TYPER)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"weightsync {__version__}")
        raise typer.Exit


@app.callback()
def weightsync(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Move model weights from trainers to inference servers, and switch to them atomically while serving.

    [bold]weightsync demo[/bold] shows it all on this machine.
    [bold]weightsync doctor[/bold] tells what works here.
    """
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(name)s: %(message)s")


def main() -> None:
    """Run the command line of this process; never returns."""
    app(prog_name="weightsync")
