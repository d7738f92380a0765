"""Staging: the one pass that copies, casts and digests the trainer's tensors into a slot."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightsync import _native
from weightsync.config import HUGE_PAGE
from weightsync.errors import CapacityError, ConfigError, LayoutError, ProtocolError
from weightsync.moves import Int64s, View, ViewTable, contiguous_strides
from weightsync.segment import Segment, check_memory
from weightsync.tensors import Entry, dtype_name, why_unfit
from weightsync.types import DTYPES, Box, DType
from weightsync.wire import messages as m
from weightsync.wire.boxes import volumes
from weightsync.wire.layout import MAX_SLOT_BYTES, Boxes, Catalogue, Layout, TensorSpec, refuse_overlaps
from weightsync.wire.transport import LocalSlot, SlotHeaders

_FACTS = attrgetter(
    "dtype", "shape", "is_cpu"
)  # with `map`, half the time of a comprehension over 10,000 tensors
_HEADROOM, _ROOM = 4, 64 << 20
"""Address space of a slot, in copies of the rank's shards, and beyond: other fleets' orders go there."""
WireDType = torch.dtype | Mapping[str, torch.dtype] | None


class Staging:
    """Slots and the compiled program that fills them. Not thread-safe: one call at a time."""

    def __init__(self, entries: list[Entry], *, slots: int, wire_dtype: WireDType, threads: int) -> None:
        self._entries = entries
        self._threads = threads
        self._count = slots
        self._shapes = [tuple(entry.tensor.shape) for entry in entries]
        self._wires = [_wire_dtype(entry, wire_dtype) for entry in entries]
        self.layout, self._numbers = _layout_of(entries, self._wires)
        self._signature: list[Any] = []
        self._program: _native.Program | None = None
        self._stage: m.Stage | None = None
        self._digests: dict[int, npt.NDArray[np.uint64]] = {}
        self.slots: list[LocalSlot] = []

    def follow(self, stage: m.Stage) -> None:
        """Stage these cells from now on; allocates slots for them. Raises CapacityError, and ProtocolError if they are not
        of this rank's shards."""
        if stage == self._stage:
            return
        columns = stage.boxes.columns(self.layout.catalogue)
        count = len(columns.tensor)
        if len(stage.offsets) != 8 * count or len(stage.parents) != 4 * count:
            raise ProtocolError("the columns of a stage order differ in length")
        parents = np.frombuffer(stage.parents, "<u4").astype(np.int64)
        if count and (
            parents.max() >= len(self._entries) or (self._numbers[parents] != columns.tensor).any()
        ):
            raise ProtocolError("a stage order for shards that are not held here")
        offsets = np.frombuffer(stage.offsets, "<u8").astype(np.int64)
        own = self.layout.boxes.columns(self.layout.catalogue)
        if (columns.start < own.start[parents]).any() or (columns.stop > own.stop[parents]).any():
            raise ProtocolError("a stage order for boxes that are not held here")
        if (offsets < 0).any() or (offsets >= MAX_SLOT_BYTES).any():
            raise ProtocolError("a stage order for bytes outside the slot")
        wires = np.array([wire.itemsize for wire in self._wires], np.int64)
        sizes = volumes(columns.start, columns.stop) * wires[parents]
        self._allocate(int((offsets + sizes).max(initial=0)))
        self._columns, self._parents, self._cell_offsets = columns, parents, offsets
        self._cell_sizes = sizes
        self._stage, self._program = stage, None

    def stage(self, slot: int, generation: int) -> bytes:
        """Fill `slot` with the tensors as they are now; returns the digests of a Sealed message.

        Raises LayoutError if a tensor changed its shape or dtype since it was registered, or lost its memory.
        """
        tensors: list[Any] = [entry.home.get(entry.key) for entry in self._entries]
        try:
            signature = list(zip(map(_FACTS, tensors), map(torch.Tensor.stride, tensors), strict=True))
        except (AttributeError, RuntimeError, TypeError):  # gone, or of a kind without strides
            self._refuse_unfit(tensors)
            raise
        program = self._program
        if program is None or signature != self._signature:
            self._refuse_unfit(tensors)
            program = self._compile(tensors)
            self._signature = signature
        sources = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))
        if not sources.all():
            self._refuse_freed(tensors)
        digests = np.zeros(len(self._parents), np.uint64)
        program.run(
            sources[self._parents] + self._deltas, self._targets(slot, self._cell_offsets), digests,
            threads=self._threads, progress=self.headers.address(slot) + 8,
        )  # fmt: skip
        self._digests[slot] = digests
        return digests.astype("<u8").tobytes()

    def extend(self, order: m.Extend) -> bytes | None:
        """Make the cells that were added since a slot was sealed, out of its own cells; returns the digests of all.

        None: the slot holds another version by now, or its bytes are not those that were sealed.
        """
        digests = self._digests.get(order.slot)
        first, count = order.first, len(self._parents)
        origins = np.frombuffer(order.origins, "<u4").astype(np.int64)
        is_held = digests is not None and self.headers.generation(order.slot) == order.generation
        if not is_held or digests is None or len(digests) != first or len(origins) != count - first:
            return None
        columns, added = self._columns, np.arange(first, count)
        if (origins >= first).any() or (
            (columns.tensor[origins] != columns.tensor[added]).any()
            or (columns.start[added] < columns.start[origins]).any()
            or (columns.stop[added] > columns.stop[origins]).any()
        ):
            raise ProtocolError("an order to make cells out of cells that do not hold them")
        used = np.unique(origins)
        table, _ = self._between(used, used)
        found = np.zeros(len(used), np.uint64)
        _native.Program(table).run(
            self._targets(order.slot, self._cell_offsets[used]), None, found, threads=self._threads
        )
        if (found != digests[used]).any():
            return None
        made = np.zeros(count - first, np.uint64)
        table, delta = self._between(added, origins)
        starts = self._targets(order.slot, self._cell_offsets[origins]) + delta.astype(np.uint64)
        _native.Program(table).run(
            starts, self._targets(order.slot, self._cell_offsets[added]), made, threads=self._threads
        )
        self.headers.raise_watermark(order.slot, int((self._cell_offsets + self._cell_sizes).max(initial=0)))
        self._digests[order.slot] = whole = np.concatenate([digests, made])
        return whole.astype("<u8").tobytes()

    def generation(self, slot: int) -> int:
        """Of the newest use of the slot; 0 before the first."""
        return self.headers.generation(slot) if self.slots else 0

    def close(self) -> None:
        """Give the slots back; readers that still map them keep their own reference."""
        for slot in (*self.slots, self.header) if self.slots else ():
            slot.segment.close()

    def _targets(self, slot: int, offsets: Int64s) -> npt.NDArray[np.uint64]:
        return offsets.astype(np.uint64) + np.uint64(self.slots[slot].mapping.address)

    def _allocate(self, size: int) -> None:
        if not self.slots:
            own = sum(
                entry.tensor.numel() * wire.itemsize
                for entry, wire in zip(self._entries, self._wires, strict=True)
            )
            capacity = _HEADROOM * own + _ROOM
            self.slots = [_make_slot(f"weightsync-slot-{s}", size, capacity) for s in range(self._count)]
            self.header = _make_slot("weightsync-header", HUGE_PAGE)
            self.headers = SlotHeaders(self.header.mapping)
            self._used = size
        elif size > self._used:
            if size > self.slots[0].segment.size:
                raise CapacityError(
                    f"the orders of all layouts need {size} bytes of each slot, it can grow to {self.slots[0].segment.size}"
                )
            check_memory((size - self._used) * self._count, "the orders of further layouts")
            self._used = size
            for slot in self.slots:
                slot.used = size

    def _between(self, cells: Int64s, origins: Int64s) -> tuple[Int64s, Int64s]:
        """Moves of cells out of the cells that hold them, both in one slot."""
        columns, tensors = self._columns, self.layout.tensors
        views = []
        for origin in origins.tolist():
            spec = tensors[int(columns.tensor[origin])]
            n = len(spec.shape)
            box = Box(tuple(columns.start[origin, :n].tolist()), tuple(columns.stop[origin, :n].tolist()))
            views.append(
                View(spec.name, spec.shape, box, contiguous_strides(box.shape, DTYPES[spec.dtype].itemsize))
            )
        wires = [DTYPES[tensors[int(columns.tensor[origin])].dtype] for origin in origins.tolist()]
        return ViewTable(views).into_slot(
            np.arange(len(cells)), columns.start[cells], columns.stop[cells], self._cell_offsets[cells],
            source=wires, wire=wires,
        )  # fmt: skip

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

    def _compile(self, tensors: list[torch.Tensor]) -> _native.Program:
        self._refuse_reshaped(tensors)
        sources = [DTYPES[dtype_name(tensor.dtype)] for tensor in tensors]
        views = []
        for entry, tensor, source, wire in zip(self._entries, tensors, sources, self._wires, strict=True):
            _require_castable(entry.names[0], source, wire)
            strides = tuple(step * source.itemsize for step in tensor.stride())
            views.append(View(entry.names[0], entry.shape, entry.box, strides))
        table, deltas = ViewTable(views).into_slot(
            self._parents,
            self._columns.start,
            self._columns.stop,
            self._cell_offsets,
            source=sources,
            wire=self._wires,
        )
        program = self._program = _native.Program(table)
        self._deltas = deltas.astype(np.uint64)
        return program


def _layout_of(entries: list[Entry], wires: list[DType]) -> tuple[Layout, npt.NDArray[np.int32]]:
    """The layout, and the number of each entry's tensor in it."""
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
    catalogue = Catalogue(tuple(tensors.values()), aliases)
    packed = Boxes.of(boxes, catalogue.width)
    refuse_overlaps(catalogue, packed.columns(catalogue))
    return Layout(catalogue.tensors, aliases, packed), np.array([tensor for tensor, _ in boxes], np.int32)


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


def _make_slot(name: str, size: int, capacity: int = 0) -> LocalSlot:
    """`size` bytes with their pages, and room to grow in address space."""
    segment = Segment.create(name, size, capacity=capacity)
    return LocalSlot(segment, segment.map(writable=True, populate=max(size, 1)), size)
