"""One-off questions to a publisher: its status, its layout, or one whole version."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable

import torch

from weightsync.errors import ConfigError, SyncTimeoutError, TransportError
from weightsync.subscriber.subscriber import Subscriber
from weightsync.types import FleetStatus
from weightsync.versioning.slots import SlotTable
from weightsync.versioning.swap.direct import Direct
from weightsync.versioning.swap.mode import SwapMode
from weightsync.wire import messages as m
from weightsync.wire.address import Address, parse_address, require_safe
from weightsync.wire.keys import Keys, load_subscriber_keys
from weightsync.wire.layout import Catalogue
from weightsync.wire.query import ask

_ASK_AGAIN_S = 2.0  # a question before the publisher is complete is not kept
PathLike = str | os.PathLike[str]


def fetch_status(
    address: str, *, keys: PathLike | None = None, insecure: bool = False, timeout_s: float = 5.0
) -> FleetStatus:
    """Who publishes at `address`, which version, and how far each member is. Raises SyncTimeoutError."""
    reply = _ask(address, m.AskStatus(), keys, insecure, timeout_s)
    if not isinstance(reply, m.Status):
        raise TransportError(f"{address}: asked for its status, got {type(reply).__name__}")
    return reply.status


def fetch_layout(
    address: str, *, keys: PathLike | None = None, insecure: bool = False, timeout_s: float = 30.0
) -> Catalogue:
    """Names, dtypes and shapes of what is published at `address`. Raises SyncTimeoutError."""
    reply = _ask(address, m.AskLayout(), keys, insecure, timeout_s)
    if not isinstance(reply, m.Welcome):
        raise TransportError(f"{address}: asked for its layout, got {type(reply).__name__}")
    reply.catalogue.validate()
    return reply.catalogue


def pull(
    address: str,
    *,
    version: int = 1,
    transport: str = "auto",
    keys: PathLike | None = None,
    insecure: bool = False,
    timeout_s: float = 60.0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[int, dict[str, torch.Tensor]]:
    """The newest version at `address`, at least `version`, verified, as a state dict; returns (version, tensors).

    Tied tensors share memory. `progress(done_bytes, total_bytes)` is called now and then. Needs the memory of one copy
    of the model. Raises SyncTimeoutError if there is no such version in time, DigestError if what arrives is wrong.
    """
    layout = fetch_layout(address, keys=keys, insecure=insecure, timeout_s=timeout_s)
    whole = {spec.name for spec in layout.tensors}
    tensors = {
        spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in layout.tensors
    }
    subscriber = _Puller(
        address, tensors, transport=transport, keys=keys, insecure=insecure, timeout_s=timeout_s,
        name=f"pull:{os.getpid()}.{secrets.token_hex(2)}",
    )  # fmt: skip
    done = threading.Event()
    watcher = threading.Thread(
        target=_report, args=(subscriber, layout.size_bytes, progress, done), daemon=True
    )
    with subscriber:
        if progress is not None:
            watcher.start()
        try:
            got = subscriber.wait_for(version, timeout_s)
        finally:
            done.set()
    if progress is not None:
        watcher.join()
        progress(layout.size_bytes, layout.size_bytes)
    tensors.update({alias: tensors[name] for alias, name in layout.aliases.items() if name in whole})
    return got, tensors


class _Puller(Subscriber):
    """A subscriber that serves nobody, so versions land in its tensors directly."""

    def _make_mode(self, slots: int, swap: str, ignored: dict[str, torch.Tensor], threads: int) -> SwapMode:
        self._role = "pull"
        return Direct(self._entries, ignored, slots, threads)

    def _new_table(self, slots: int, initial_version: int | None) -> SlotTable:
        return SlotTable(1)


def _report(
    subscriber: Subscriber, total: int, progress: Callable[[int, int], None] | None, done: threading.Event
) -> None:
    while progress is not None and not done.wait(0.1):
        progress(min(subscriber.received_bytes, total), total)


def _ask(
    address: str, question: m.FromMember, keys: PathLike | None, insecure: bool, timeout_s: float
) -> m.ToMember:
    parsed: Address = parse_address(address)
    require_safe(parsed, has_keys=keys is not None, insecure=insecure)
    loaded: Keys | None = load_subscriber_keys(keys) if keys is not None else None
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        reply = ask(parsed, question, keys=loaded, timeout_s=min(left, _ASK_AGAIN_S))
        if isinstance(reply, m.Refused):
            raise ConfigError(f"{address}: refused: {reply.reason}")
        if reply is not None:
            return reply
    raise SyncTimeoutError(
        f"{address}: no publisher answered within {timeout_s:g} s; is one running there"
        + (", and does it know this key?" if loaded else ", and does it need keys=DIR?")
    )
