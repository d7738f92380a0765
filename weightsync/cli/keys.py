"""`weightsync keys`: make the CURVE keys that addresses reachable by other hosts need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightsync.cli.options import TYPER, Verbose
from weightsync.errors import ConfigError

keys = typer.Typer(no_args_is_help=True, **TYPER)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The key folder.", show_default=False)]


@keys.callback()
def group() -> None:
    """Make CURVE keys, which encrypt the traffic and say who may publish and who may read.

    Example:  weightsync keys new ~/fleet-keys
    """


@keys.command()
def new(directory: Directory, verbose: Verbose = False) -> None:
    """Make the publisher's and the subscribers' key pairs in DIR. Never overwrites a key.

    Example:  weightsync keys new ~/fleet-keys
    """
    from weightsync.wire.keys import new_keys

    try:
        paths = new_keys(directory)
    except OSError as error:
        raise ConfigError(f"can't write keys to {directory}: {error.strerror or error}") from error
    _list(paths)
    print(
        f"Trainers keep this folder and use keys={str(directory)!r} (or --keys {directory}).\n"
        "Servers need publisher.key, subscriber.key and subscriber.key_secret, and nothing else."
    )


@keys.command()
def add(
    directory: Directory,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Letters, digits, - and _.", show_default=False)
    ],
    verbose: Verbose = False,
) -> None:
    """Make one more subscriber's key pair. Deleting DIR/NAME.key at the publisher withdraws it alone.

    Example:  weightsync keys add ~/fleet-keys rollout-17
    """
    from weightsync.wire.keys import add_subscriber

    try:
        paths = add_subscriber(directory, name)
    except OSError as error:
        raise ConfigError(f"can't write keys to {directory}: {error.strerror or error}") from error
    _list(paths)
    print(
        f"Give {name}'s server three files in a folder of its own: publisher.key, {name}.key as\n"
        f"subscriber.key, and {name}.key_secret as subscriber.key_secret.\n"
        "The publisher reads its folder when it starts."
    )


def _list(paths: list[Path]) -> None:
    for path in paths:
        is_secret = path.suffix == ".key_secret"
        print(f"made {path}{'   (secret: never send it by mail or chat)' if is_secret else ''}")
