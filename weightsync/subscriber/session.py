"""One life of the publisher as this subscriber sees it: its layout, the plan made for it, and the data path."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightsync import _native
from weightsync._native import layout as col
from weightsync.errors import ConfigError, LayoutError, TransportError
from weightsync.tensors import Entry, dtype_name
from weightsync.versioning.swap.mode import SwapMode, find_doubled
from weightsync.wire import messages as m
from weightsync.wire.layout import Layout
from weightsync.wire.plan import Plan, Want, plan_moves
from weightsync.wire.registry import ladder, make_reader, transport_names
from weightsync.wire.transport import Environment, Reader

log = logging.getLogger("weightsync")
CONNECT_S = 10.0


@dataclass(slots=True)
class Session:
    """What it takes to receive a version. `verifier` digests a slot of ours (or live weights) as the plan lays it out."""

    epoch: int
    layout: Layout
    plan: Plan
    reader: Reader
    transport: str
    verifier: _native.Program

    def close(self) -> None:
        self.reader.close()


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user said about matching and transport."""

    transport: str
    allow_missing: tuple[str, ...]
    ignore: tuple[str, ...]


def open_session(
    welcome: m.Welcome, entries: list[Entry], mode: SwapMode, environment: Environment, choice: Choice
) -> Session:
    """Match layouts, choose a transport, take over the tensors. Raises LayoutError, TransportError, CapacityError."""
    welcome.layout.validate()
    plan = plan_moves(
        welcome.layout, _wants(entries, mode), allow_missing=choice.allow_missing, ignore=choice.ignore
    )
    doubled = find_doubled([entries[number] for number in plan.wants])
    if doubled:
        raise LayoutError(f"written twice, since their memory overlaps: {', '.join(doubled)}")
    reader, transport = _connect(welcome.offers, mode, environment, choice.transport)
    try:
        reader.prepare(plan)
        offsets = dict(zip(plan.wants.tolist(), plan.offsets.tolist(), strict=True))
        mode.bind(offsets, reader.slot_segments() if mode.borrows_slots else [])
    except BaseException:
        reader.close()
        raise
    return Session(welcome.epoch, welcome.layout, plan, reader, transport, verifier_of(plan))


def verifier_of(plan: Plan, strides: Sequence[tuple[int, ...]] | None = None) -> _native.Program:
    """A program that digests the plan's boxes where they lie here: in a slot, or in memory with these byte strides."""
    table = plan.table.copy()
    table[:, col.SRC_STRIDE : col.SRC_STRIDE + 8] = table[:, col.DST_STRIDE : col.DST_STRIDE + 8]
    if strides is not None:
        for row, steps in zip(table, strides, strict=True):
            row[col.SRC_STRIDE : col.SRC_STRIDE + len(steps)] = steps
    return _native.Program(table)


def mismatches(plan: Plan, found: np.ndarray, expected: np.ndarray) -> list[str]:
    """Names of the moves whose digests differ."""
    return [plan.names[number] for number in np.flatnonzero(found != expected)]


def _wants(entries: list[Entry], mode: SwapMode) -> list[Want]:
    return [
        Want(entry.names, dtype_name(entry.tensor.dtype), entry.shape, entry.box, strides)
        for entry, strides in zip(entries, mode.strides(), strict=True)
    ]


def _connect(
    offers: dict[str, dict[str, str]], mode: SwapMode, environment: Environment, wanted: str
) -> tuple[Reader, str]:
    """A connected and probed reader. `auto` walks the ladder; a transport asked for by name never falls back."""
    if wanted != "auto" and wanted not in transport_names():
        raise ConfigError(f"transport={wanted!r}: installed are auto, {', '.join(transport_names())}")
    if wanted != "auto" and wanted not in offers:
        raise TransportError(
            f"transport={wanted!r} was asked for, but the publisher offers {', '.join(offers)}"
        )
    skipped: list[str] = []
    for name in [wanted] if wanted != "auto" else ladder(list(offers)):
        reader = make_reader(name, environment)
        if mode.borrows_slots and not reader.caps.maps_slots:
            skipped.append(f"{name}: can't map slots, which swap={mode.name!r} needs")
            continue
        try:
            reader.connect(offers[name], CONNECT_S)
        except TransportError as error:
            reader.close()
            skipped.append(f"{name}: {error}")
            continue
        log.info(
            "transport %s chosen on %s%s",
            name,
            socket.gethostname(),
            f" (skipped {'; '.join(skipped)})" if skipped else "",
        )
        return reader, name
    raise TransportError(
        f"no data path to the publisher works: {'; '.join(skipped) or 'it offers none that is installed'}"
    )
