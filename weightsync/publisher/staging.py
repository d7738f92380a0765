"""Staging: the one pass that copies, casts and digests the trainer's tensors into a slot."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from weightsync import _native
from weightsync.config import HUGE_PAGE
from weightsync.errors import ConfigError, LayoutError, TransportError
from weightsync.moves import MoveRows, contiguous_strides
from weightsync.segment import Segment
from weightsync.tensors import Entry, dtype_name, why_unfit
from weightsync.types import DTYPES, DType
from weightsync.wire.layout import Layout, TensorSpec, lay_out
from weightsync.wire.transport import LocalSlot, SlotHeaders

_FACTS = attrgetter(
    "dtype", "shape", "is_cpu"
)  # with `map`, half the time of a comprehension over 10,000 tensors
WireDType = torch.dtype | Mapping[str, torch.dtype] | None


class Staging:
    """Slots and the compiled program that fills them. Not thread-safe: one `stage` at a time."""

    def __init__(self, entries: list[Entry], *, slots: int, wire_dtype: WireDType, threads: int) -> None:
        self._entries = entries
        self._threads = threads
        self._shapes = [tuple(entry.tensor.shape) for entry in entries]
        wires = [_wire_dtype(entry, wire_dtype) for entry in entries]
        self.layout = _layout_of(entries, wires)
        self._wires = wires
        self._offsets = np.array([shard.offset for shard in self.layout.shards], np.uint64)
        self._signature: list[Any] = []
        self._program: _native.Program | None = None
        self.slots = [_make_slot(f"weightsync-slot-{s}", self.layout.slot_bytes) for s in range(slots)]
        self.header = _make_slot("weightsync-header", HUGE_PAGE)
        self.headers = SlotHeaders(self.header.mapping)

    def stage(self, slot: int, generation: int) -> bytes:
        """Fill `slot` with the tensors as they are now; returns the digests of a Seal message.

        Raises LayoutError if a tensor changed its shape or dtype since it was registered, or lost its memory.
        """
        tensors: list[Any] = [entry.home.get(entry.key) for entry in self._entries]
        try:
            signature = list(zip(map(_FACTS, tensors), map(torch.Tensor.stride, tensors), strict=True))
        except (AttributeError, RuntimeError, TypeError):  # gone, or of a kind without strides
            self._refuse_unfit(tensors)
            raise
        if signature != self._signature:
            self._refuse_unfit(tensors)
            self._compile(tensors)
            self._signature = signature
        sources = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))
        if not sources.all():
            self._refuse_freed(tensors)
        digests = np.zeros(len(tensors), np.uint64)
        if self._program is None:
            raise TransportError("nothing is compiled")
        self._program.run(
            sources, self._offsets + np.uint64(self.slots[slot].mapping.address), digests,
            threads=self._threads, progress=self.headers.address(slot) + 8,
        )  # fmt: skip
        return digests.astype("<u8").tobytes()

    def close(self) -> None:
        """Give the slots back; readers that still map them keep their own reference."""
        for slot in (*self.slots, self.header):
            slot.segment.close()

    def _refuse_unfit(self, tensors: list[torch.Tensor]) -> None:
        problems = [
            f"{entry.names[0]}: {why}"
            for entry, tensor in zip(self._entries, tensors, strict=True)
            if (why := why_unfit(tensor))
        ]
        if problems:
            raise LayoutError("tensors can't be moved any more since register():\n  " + "\n  ".join(problems))

    def _refuse_freed(self, tensors: list[torch.Tensor]) -> None:
        self._refuse_unfit(tensors)
        freed = [
            entry.names[0]
            for entry, tensor in zip(self._entries, tensors, strict=True)
            if tensor.numel() and not tensor.data_ptr()
        ]
        if freed:
            raise LayoutError(
                f"the memory of these tensors was freed: {', '.join(freed)}; is the model sharded?"
            )

    def _refuse_reshaped(self, tensors: list[torch.Tensor]) -> None:
        if [tuple(tensor.shape) for tensor in tensors] == self._shapes:
            return
        changed = [
            f"{entry.names[0]}: registered as {list(shape)}, now {list(tensor.shape)}"
            for entry, shape, tensor in zip(self._entries, self._shapes, tensors, strict=True)
            if tuple(tensor.shape) != shape
        ]
        raise LayoutError("tensors changed their shape since register():\n  " + "\n  ".join(changed))

    def _compile(self, tensors: list[torch.Tensor]) -> None:
        self._refuse_reshaped(tensors)
        rows = MoveRows(len(tensors))
        for row, (entry, tensor, wire, shard) in enumerate(
            zip(self._entries, tensors, self._wires, self.layout.shards, strict=True)
        ):
            source = DTYPES[dtype_name(tensor.dtype)]
            _require_castable(entry.names[0], source, wire)
            strides = tuple(step * source.itemsize for step in tensor.stride())
            rows.fill(
                row, source, wire, entry.names[0], entry.shape, entry.box, shard.offset,
                src_strides=strides, dst_strides=contiguous_strides(entry.box.shape, wire.itemsize),
            )  # fmt: skip
        self._program = _native.Program(rows.table)


def _layout_of(entries: list[Entry], wires: list[DType]) -> Layout:
    tensors: dict[str, TensorSpec] = {}
    numbers: dict[str, int] = {}
    boxes = []
    aliases: dict[str, str] = {}
    for entry, wire in zip(entries, wires, strict=True):
        name = entry.names[0]
        spec = TensorSpec(name, wire.name, entry.shape)
        if tensors.setdefault(name, spec) != spec:
            raise LayoutError(f"{name}: its shards disagree: {spec} and {tensors[name]}")
        boxes.append((numbers.setdefault(name, len(numbers)), entry.box))
        aliases.update({other: name for other in entry.names[1:]})
    doubled = sorted(set(tensors) & set(aliases))
    if doubled:
        raise LayoutError(f"registered twice under one name: {', '.join(doubled)}")
    return lay_out(tensors.values(), boxes, aliases)


def _wire_dtype(entry: Entry, wanted: WireDType) -> DType:
    own = DTYPES[dtype_name(entry.tensor.dtype)]
    if isinstance(wanted, torch.dtype):
        chosen = wanted if own.float_code else None  # a cast is for floats, never for counters or masks
    else:
        chosen = next((d for p, d in (wanted or {}).items() if fnmatchcase(entry.names[0], p)), None)
    if chosen is None:
        return own
    wire = DTYPES.get(dtype_name(chosen))
    if wire is None:
        raise ConfigError(f"{entry.names[0]}: wire_dtype {chosen} is not one that can be moved")
    _require_castable(entry.names[0], own, wire)
    return wire


def _require_castable(name: str, source: DType, wire: DType) -> None:
    if source != wire and (source.float_code is None or wire.float_code is None):
        raise LayoutError(
            f"{name}: can't send {source.name} as {wire.name}; casts are between float16, bfloat16, float32 and float64"
        )


def _make_slot(name: str, size: int) -> LocalSlot:
    segment = Segment.create(name, size)
    return LocalSlot(segment, segment.map(writable=True))
