"""Options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any, Final

import typer

TYPER: Final[dict[str, Any]] = {
    "add_completion": False,
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
}
"""How every `typer.Typer` here is made."""

_VERBOSE = "weightsync.verbose"


def _remember(ctx: typer.Context, value: bool) -> bool:
    if value:
        ctx.meta[_VERBOSE] = True  # shared by the contexts of a whole command line
        logging.getLogger().setLevel(logging.INFO)
    return value


def is_verbose(ctx: Any) -> bool:
    """Whether `--verbose` was given, before or after the command's name."""
    return bool(ctx.meta.get(_VERBOSE, False))


Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", callback=_remember, is_eager=True, help="Show log lines, and tracebacks of errors."
    ),
]
Address = Annotated[
    str,
    typer.Argument(
        metavar="ADDRESS",
        show_default=False,
        help="Where the publisher listens: tcp://host:port, ipc:///path or ipc://@name.",
    ),
]
KeysDirectory = Annotated[
    Path | None,
    typer.Option(
        "--keys", metavar="DIR", help="Folder with CURVE keys (see [bold]weightsync keys new[/bold])."
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Allow an address that other hosts can reach without keys. Anyone may then read."
    ),
]
TimeoutS = Annotated[
    float, typer.Option("--timeout", min=0.0, metavar="SECONDS", help="Give up after this long.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
