"""What each side holds or wants, without the memory: tensors by name, and boxes of them in columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from weightsync._native.layout import MAX_NDIM
from weightsync.errors import LayoutError, ProtocolError
from weightsync.moves import Int64s
from weightsync.types import DTYPES, Box
from weightsync.wire.boxes import box_text, intersect
from weightsync.wire.columns import Int32s, ShardColumns, TensorTable

_MAX_ELEMENTS = 2**62
MAX_SLOT_BYTES = 2**56
"""More than any address space; offsets beyond it are lies, and sums with them could overflow."""


class TensorSpec(msgspec.Struct, array_like=True, frozen=True):
    """A logical tensor: its checkpoint name, its dtype on the wire, its whole shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All tensors that a publisher sends. `aliases` maps tied names to the name that is sent."""

    tensors: tuple[TensorSpec, ...]
    aliases: dict[str, str]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, each counted whole and once."""
        return sum(spec.size_bytes for spec in self.tensors)

    @property
    def width(self) -> int:
        """Dimensions to which box columns are padded."""
        return max((len(spec.shape) for spec in self.tensors), default=1) or 1

    def table(self) -> TensorTable:
        """As the planner reads it."""
        return TensorTable.of([(spec.name, spec.shape, DTYPES[spec.dtype].itemsize) for spec in self.tensors])

    def validate(self) -> None:
        """Raise ProtocolError for tensors that can't be. Peers are not trusted."""
        names = [spec.name for spec in self.tensors]
        if len(set(names)) != len(names):
            raise ProtocolError("a tensor is named twice")
        for spec in self.tensors:
            if spec.dtype not in DTYPES:
                raise ProtocolError(
                    f"{spec.name}: dtype {spec.dtype!r} is unknown here; install the same release"
                )
            is_possible = all(n >= 0 for n in spec.shape) and math.prod(spec.shape) < _MAX_ELEMENTS
            if not is_possible or len(spec.shape) > MAX_NDIM:
                raise ProtocolError(f"{spec.name}: impossible shape {spec.shape}")


class Boxes(msgspec.Struct, array_like=True, frozen=True):
    """Boxes of a catalogue's tensors in columns, little-endian: `tensor` i32, `start` and `stop` i64 padded to `width`
    dimensions with 0:1."""

    width: int
    tensor: bytes
    start: bytes
    stop: bytes

    @classmethod
    def of(cls, boxes: Iterable[tuple[int, Box]], width: int) -> Boxes:
        """From (tensor number, box) of each."""
        rows = [(tensor, box.start, box.stop) for tensor, box in boxes]
        return cls.pack(ShardColumns.of([rows], width))

    @classmethod
    def pack(cls, columns: ShardColumns) -> Boxes:
        """From columns; layouts are joined to one."""
        return cls(
            columns.start.shape[1],
            columns.tensor.astype("<i4").tobytes(),
            columns.start.astype("<i8").tobytes(),
            columns.stop.astype("<i8").tobytes(),
        )

    def columns(self, catalogue: Catalogue) -> ShardColumns:
        """One layout. Raises ProtocolError unless every box lies inside its tensor."""
        count = len(self.tensor) // 4
        size = 8 * count * self.width
        if len(self.tensor) % 4 or len(self.start) != size or len(self.stop) != size:
            raise ProtocolError("columns of boxes differ in length")
        if self.width != catalogue.width:
            raise ProtocolError(f"boxes have {self.width} dimensions, the catalogue has {catalogue.width}")
        tensor: Int32s = np.frombuffer(self.tensor, "<i4").astype(np.int32)
        start: Int64s = np.frombuffer(self.start, "<i8").astype(np.int64).reshape(count, self.width)
        stop: Int64s = np.frombuffer(self.stop, "<i8").astype(np.int64).reshape(count, self.width)
        if count and not 0 <= int(tensor.min()) <= int(tensor.max()) < len(catalogue.tensors):
            raise ProtocolError(f"a box of a tensor that is not one of {len(catalogue.tensors)}")
        shape = catalogue.table().shape[tensor]
        if ((start < 0) | (stop < start) | (stop > shape)).any():
            raise ProtocolError("a box lies outside its tensor")
        is_padding = np.arange(self.width)[None, :] >= catalogue.table().ndim[tensor][:, None]
        if ((start != 0) & is_padding).any() or ((stop != 1) & is_padding).any():
            raise ProtocolError("a box is padded with something else than 0:1")
        return ShardColumns(np.array([0, count], np.int64), tensor, start, stop)


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All shards of one publisher rank: the tensors it knows, and the boxes of them that it holds."""

    tensors: tuple[TensorSpec, ...]
    aliases: dict[str, str]
    boxes: Boxes

    @property
    def catalogue(self) -> Catalogue:
        return Catalogue(self.tensors, self.aliases)


def refuse_overlaps(catalogue: Catalogue, shards: ShardColumns) -> None:
    """Raise LayoutError if two boxes of one tensor share an element."""
    order = np.argsort(shards.tensor, kind="stable")
    borders = np.searchsorted(shards.tensor[order], np.arange(len(catalogue.tensors) + 1))
    for tensor in np.flatnonzero(np.diff(borders) > 1).tolist():
        rows = order[borders[tensor] : borders[tensor + 1]]
        start, stop = shards.start[rows], shards.stop[rows]
        both = intersect(start, stop, start, stop)
        hit = np.flatnonzero(both.left != both.right)
        if len(hit):
            spec, (one, other) = catalogue.tensors[tensor], (both.left[hit[0]], both.right[hit[0]])
            texts = [box_text(start[row], stop[row], len(spec.shape)) for row in (one, other)]
            raise LayoutError(
                f"{spec.name}: boxes {texts[0]} and {texts[1]} overlap; register each element once"
            )


def merge_layouts(layouts: Sequence[Layout]) -> tuple[Catalogue, list[ShardColumns]]:
    """One catalogue for all ranks, and each rank's shards with its tensor numbers. Raises LayoutError that lists every
    tensor on whose shape or dtype the ranks disagree."""
    specs: dict[str, TensorSpec] = {}
    aliases: dict[str, str] = {}
    problems: list[str] = []
    for rank, layout in enumerate(layouts):
        layout.catalogue.validate()
        for spec in layout.tensors:
            known = specs.setdefault(spec.name, spec)
            if known != spec:
                problems.append(
                    f"{spec.name}: rank {rank} has {spec.dtype} {list(spec.shape)}, "
                    f"another rank {known.dtype} {list(known.shape)}"
                )
        aliases.update(layout.aliases)
    problems += [
        f"{name}: one rank sends it, another ties it to {aliases[name]}"
        for name in sorted(set(specs) & set(aliases))
    ]
    if problems:
        raise LayoutError(f"{len(problems)} tensors differ between ranks:\n  " + "\n  ".join(problems[:20]))
    catalogue = Catalogue(tuple(specs.values()), aliases)
    numbers = {name: number for number, name in enumerate(specs)}
    merged = []
    for layout in layouts:
        own = layout.boxes.columns(layout.catalogue)
        renumbered = np.array([numbers[spec.name] for spec in layout.tensors], np.int32)
        merged.append(
            ShardColumns(
                own.first,
                renumbered[own.tensor],
                _widen(own.start, catalogue.width, 0),
                _widen(own.stop, catalogue.width, 1),
            )
        )
    return catalogue, merged


def _widen(column: Int64s, width: int, fill: int) -> Int64s:
    wide = np.full((len(column), width), fill, np.int64)
    wide[:, : column.shape[1]] = column
    return wide
