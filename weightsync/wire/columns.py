"""Layouts of many ranks as columns: what the fleet's planner reads. Rows are shards; no Python object per shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.errors import LayoutError
from weightsync.moves import Int64s
from weightsync.wire.boxes import box_text

Int32s = npt.NDArray[np.int32]
_MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class TensorTable:
    """Logical tensors by number. `shape` is int64 (tensors, dimensions), padded with ones to one width for all;
    `ndim` says how many of them are real; `itemsize` is bytes per element on the wire."""

    names: Sequence[str]
    shape: Int64s
    ndim: Int64s
    itemsize: Int64s

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, Sequence[int], int]]) -> TensorTable:
        """From (name, shape, itemsize) of each."""
        width = max((len(shape) for _, shape, _ in tensors), default=1) or 1
        padded = [[*shape, *([1] * (width - len(shape)))] for _, shape, _ in tensors]
        return cls(
            [name for name, _, _ in tensors],
            np.array(padded, np.int64).reshape(len(tensors), width),
            np.array([len(shape) for _, shape, _ in tensors], np.int64),
            np.array([itemsize for _, _, itemsize in tensors], np.int64),
        )


@dataclass(frozen=True, slots=True)
class ShardColumns:
    """Shards of the distinct layouts of one side, one row each, ordered by layout.

    `first[i] : first[i + 1]` are the rows of layout `i`; a shard's number is its row less `first`. Box columns are
    int64 (rows, dimensions), padded with `0:1` where the tensor has fewer dimensions. Empty boxes are allowed.
    """

    first: Int64s
    tensor: Int32s
    start: Int64s
    stop: Int64s

    @property
    def layout(self) -> Int32s:
        """The layout of each row."""
        return np.repeat(np.arange(len(self.first) - 1, dtype=np.int32), np.diff(self.first))

    @classmethod
    def of(
        cls, layouts: Sequence[Sequence[tuple[int, Sequence[int], Sequence[int]]]], width: int
    ) -> ShardColumns:
        """From (tensor, start, stop) of each shard of each layout; `width` is that of the tensor table."""
        rows = [row for layout in layouts for row in layout]
        return cls(
            np.cumsum([0, *map(len, layouts)]).astype(np.int64),
            np.array([tensor for tensor, _, _ in rows], np.int32),
            np.array([[*a, *([0] * (width - len(a)))] for _, a, _ in rows], np.int64).reshape(
                len(rows), width
            ),
            np.array([[*b, *([1] * (width - len(b)))] for _, _, b in rows], np.int64).reshape(
                len(rows), width
            ),
        )


@dataclass(frozen=True, slots=True)
class Side:
    """All ranks of one side. Ranks with equal layouts name the same one, so that replicas cost nothing to plan.

    `layout`, `process`, `host`, `rack`, `replica`: one number per rank. Equal numbers on both sides mean the same
    process, host or rack; `replica` is the group of ranks that switch together (or one life of the trainer).
    """

    shards: ShardColumns
    layout: Int32s
    process: Int32s
    host: Int32s
    rack: Int32s
    replica: Int32s

    @property
    def ranks(self) -> int:
        return len(self.layout)

    @classmethod
    def spread(
        cls, shards: ShardColumns, layout: npt.ArrayLike | None = None, *, ranks_per_host: int = 8,
        hosts_per_rack: int = 1, first_host: int = 0, replicas: int = 1,
    ) -> Side:  # fmt: skip
        """A side on hosts of its own, numbered from `first_host`, one process per rank, replicas of equal size; of
        racks nothing is known unless `hosts_per_rack` says it."""
        of_rank = np.arange(len(shards.first) - 1) if layout is None else np.asarray(layout)
        rank = np.arange(len(of_rank))
        host = rank // ranks_per_host + first_host
        columns = (
            of_rank,
            rank + first_host * ranks_per_host,
            host,
            host // hosts_per_rack,
            rank * replicas // max(len(rank), 1),
        )
        return cls(shards, *(column.astype(np.int32) for column in columns))


def join_sides(first: Side, second: Side) -> Side:
    """Both as one side, the ranks of `first` in front: trainers and verified replicas as sources together."""
    a, b = first.shards, second.shards
    shards = ShardColumns(
        np.concatenate([a.first, b.first[1:] + a.first[-1]]),
        np.concatenate([a.tensor, b.tensor]),
        np.concatenate([a.start, b.start]),
        np.concatenate([a.stop, b.stop]),
    )
    layouts, replicas = len(a.first) - 1, int(first.replica.max(initial=-1)) + 1
    return Side(
        shards,
        np.concatenate([first.layout, second.layout + np.int32(layouts)]),
        np.concatenate([first.process, second.process]),
        np.concatenate([first.host, second.host]),
        np.concatenate([first.rack, second.rack]),
        np.concatenate([first.replica, second.replica + np.int32(replicas)]),
    )


def refuse_outside(tensors: TensorTable, shards: ShardColumns, who: str) -> None:
    """Raise LayoutError that lists the boxes that do not lie inside their tensor."""
    unknown = (shards.tensor < 0) | (shards.tensor >= len(tensors.shape))
    if unknown.any():
        row = int(np.flatnonzero(unknown)[0])
        raise LayoutError(
            f"{who} layout {shards.layout[row]}: tensor number {shards.tensor[row]}, of {len(tensors.shape)}"
        )
    wrong = (shards.start < 0) | (shards.stop < shards.start) | (shards.stop > tensors.shape[shards.tensor])
    rows = np.flatnonzero(wrong.any(axis=1))
    if len(rows):
        layout = shards.layout
        lines = [
            f"{tensors.names[t]}: {who} layout {layout[row]} has {box_text(shards.start[row], shards.stop[row], n)}, "
            f"the shape is {tensors.shape[t][:n].tolist()}"
            for row in rows[:_MAX_LISTED].tolist()
            for t in [int(shards.tensor[row])]
            for n in [int(tensors.ndim[t])]
        ]
        raise LayoutError(f"{len(rows)} boxes lie outside their tensors:\n  " + "\n  ".join(lines))
