"""`weightsync promote` and `weightsync rollback`: what a trainer may order, from a shell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightsync.cli.options import Address, Insecure, TimeoutS, Verbose
from weightsync.errors import SyncTimeoutError, TransportError, UsageError

if TYPE_CHECKING:
    from weightsync.wire import messages as m

Version = Annotated[
    int | None,
    typer.Argument(metavar="[VERSION]", min=1, show_default=False, help="The newest one if it is left out."),
]
PublisherKeys = Annotated[
    Path | None,
    typer.Option("--keys", metavar="DIR", help="The publisher's key folder, with its secret key."),
]


def promote(
    address: Address,
    version: Version = None,
    keys: PublisherKeys = None,
    insecure: Insecure = False,
    timeout_s: TimeoutS = 5.0,
    verbose: Verbose = False,
) -> None:
    """Let every server go to VERSION, with the policies canary=N and manual.

    Example:  weightsync promote tcp://127.0.0.1:7077 12
    """
    from weightsync.wire import messages as m

    done = _order(m.Promote, address, version, keys, insecure, timeout_s)
    print(f"version {done} is promoted: every server goes to it")


def rollback(
    address: Address,
    version: Version = None,
    keys: PublisherKeys = None,
    insecure: Insecure = False,
    timeout_s: TimeoutS = 5.0,
    verbose: Verbose = False,
) -> None:
    """Take VERSION back: servers that have it live go to the one before, and none makes it live any more.

    Example:  weightsync rollback tcp://127.0.0.1:7077
    """
    from weightsync.wire import messages as m

    done = _order(m.Rollback, address, version, keys, insecure, timeout_s)
    print(f"version {done} is rolled back: servers go to the one before, where they hold it")


def _order(
    kind: Callable[[int, int, int], m.Promote | m.Rollback],
    address: str,
    version: int | None,
    keys: Path | None,
    insecure: bool,
    timeout_s: float,
) -> int:
    """Returns the version that was meant."""
    from weightsync import errors
    from weightsync.wire import messages as m
    from weightsync.wire.address import parse_address, require_safe
    from weightsync.wire.keys import load_publisher_keys
    from weightsync.wire.query import ask

    parsed = parse_address(address)
    require_safe(parsed, has_keys=keys is not None, insecure=insecure)
    loaded = load_publisher_keys(keys) if keys is not None else None
    found = ask(parsed, m.AskStatus(), keys=loaded, timeout_s=timeout_s)
    if not isinstance(found, m.Status):
        raise SyncTimeoutError(
            f"{address}: no publisher answered within {timeout_s:g} s; does it need keys=DIR?"
        )
    version = version or found.status.version
    if not version:
        raise UsageError(f"{address}: nothing was published yet")
    answer = ask(parsed, kind(found.status.epoch, 1, version), keys=loaded, timeout_s=timeout_s)
    if not isinstance(answer, m.Answer):
        raise TransportError(
            f"{address}: version {version}: no answer, so it may have happened or not; ask again"
        )
    if answer.error is not None:
        error, text = answer.error
        raise getattr(errors, error, TransportError)(text)
    return version
