"""What the ranks of a publisher stage, cut so that whatever a destination wants is a sum of whole pieces.

A *cell* is a box staged contiguously in the slot of one rank, with a digest of its own. Pure and deterministic, in numpy
columns. Two cells are equal, disjoint, or one lies in the other: `plan_cells` cuts what is held once, `extend_cells`
appends boxes that respect every border so far. So the largest cells inside a want are disjoint, and they fill it
whenever any choice of cells does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weightsync.config import TENSOR_ALIGNMENT
from weightsync.moves import Int64s
from weightsync.wire.boxes import unfold, volumes
from weightsync.wire.columns import Int32s, ShardColumns, Side, TensorTable, join_sides, refuse_outside
from weightsync.wire.planner import plan_fleet
from weightsync.wire.plans import Plans

Bools = npt.NDArray[np.bool_]

_PAIRS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of all ranks, one row each: rows `first[r] : first[r + 1]` are those of rank `r`, by rising offset.

    `tensor`, `start`, `stop` as in `ShardColumns`. `offset`, `size`: bytes in the rank's slot, row-major; offsets are
    multiples of 64. `parent`: number of the shard, in the rank's own layout, that contains the box.
    """

    first: Int64s
    tensor: Int32s
    start: Int64s
    stop: Int64s
    offset: Int64s
    size: Int64s
    parent: Int64s

    @property
    def ranks(self) -> int:
        return len(self.first) - 1

    @property
    def slot_bytes(self) -> Int64s:
        """What the slot of each rank takes: a multiple of 64, at least 64."""
        found = np.full(self.ranks, TENSOR_ALIGNMENT, np.int64)
        some = np.flatnonzero(np.diff(self.first))
        last = self.first[some + 1] - 1
        found[some] = _aligned(self.offset[last] + self.size[last])
        return found


@dataclass(frozen=True, slots=True)
class Reads:
    """What one destination reads, ordered by rank, then by offset; one row per move.

    `cell`: row of the cell within the rank. `want`: number of the wanted shard that it is a part of.
    """

    rank: Int32s
    cell: Int64s
    want: Int64s


def plan_cells(table: TensorTable, sources: Side, targets: Side) -> Cells:
    """Every element that a source holds, also where no destination wants it; every want is a sum of whole cells.

    An element is staged by several ranks only where destinations are near to different holders. In a slot, what the
    same destinations read lies together, by tensor, then by box. Raises LayoutError as `plan_fleet` does.
    """
    everything = _everything(sources, targets)
    plans = plan_fleet(
        table, sources, join_sides(targets, everything), range_cost_bytes=0, spare=targets.ranks
    )
    return _staged_by_all(plans)


def extend_cells(table: TensorTable, sources: Side, cells: Cells, targets: Side) -> tuple[Cells, Int64s]:
    """The same cells, and behind those of each rank what these destinations want that is no sum of whole cells.

    Also gives `origin`, one row per appended cell in order of rank and offset: the row, within its rank, of a given cell
    that contains the box, so that it can be copied out of a sealed slot. Raises LayoutError as `plan_fleet` does.
    """
    refuse_outside(table, targets.shards, "destination")
    boxes = _distinct(cells, np.zeros(cells.ranks, np.int64))
    used = np.bincount(targets.layout, minlength=len(targets.shards.first) - 1)[targets.shards.layout] > 0
    cover = _cover(table, boxes, targets.shards)
    missing = np.flatnonzero(used & ~cover.is_whole)
    if not len(missing):
        return cells, np.zeros(0, np.int64)
    parts = _partial(boxes, cover.outer, targets.shards, missing)
    if not parts.fills_all:
        plan_fleet(table, _side_of(sources, cells), targets)  # names what nobody holds
    return _append(table, sources, cells, targets, boxes, cover.outer, parts)


def match_cells(
    table: TensorTable, cells: Cells, wants: ShardColumns, near: npt.ArrayLike | None = None
) -> Reads | None:
    """Whole cells that make up each want of one layout exactly, as few as can be; None if a want is no sum of cells.

    A box staged by several ranks is read from the one with the least `near` (a number per rank), then from the lowest
    rank. Raises LayoutError for wants outside their tensors.
    """
    refuse_outside(table, wants, "destination")
    tiers = np.zeros(cells.ranks, np.int64) if near is None else np.asarray(near, np.int64)
    boxes = _distinct(cells, tiers)
    cover = _cover(table, boxes, wants)
    if not cover.is_whole.all():
        return None
    row = boxes.row[cover.box]
    order = np.lexsort((cover.want, row))
    row = row[order]
    rank = np.searchsorted(cells.first, row, side="right") - 1
    return Reads(rank.astype(np.int32), row - cells.first[rank], cover.want[order])


def _aligned(size: Int64s) -> Int64s:
    return -(-size // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT


def _staged_by_all(plans: Plans) -> Cells:
    staged = [plans.staging(rank) for rank in range(plans.sources.ranks)]
    names = ("tensor", "start", "stop", "offset", "size", "shard")
    columns = [np.concatenate([getattr(one, name) for one in staged]) for name in names]
    return Cells(np.cumsum([0, *(len(one.tensor) for one in staged)]).astype(np.int64), *columns)


def _everything(sources: Side, targets: Side) -> Side:
    """A destination far from all that wants every box of every rank."""
    shards = sources.shards
    rows = np.flatnonzero(np.bincount(sources.layout, minlength=len(shards.first) - 1)[shards.layout])
    first, alone = np.array([0, len(rows)], np.int64), np.zeros(1, np.int32)
    process, host, rack = (
        np.array([min(int(column.min(initial=0)) for column in columns) - 1], np.int32)
        for columns in (
            (sources.process, targets.process),
            (sources.host, targets.host),
            (sources.rack, targets.rack),
        )
    )
    wants = ShardColumns(first, shards.tensor[rows], shards.start[rows], shards.stop[rows])
    return Side(wants, alone, process, host, rack, alone)


def _side_of(sources: Side, cells: Cells) -> Side:
    """The ranks with their cells as shards."""
    shards = ShardColumns(cells.first, cells.tensor, cells.start, cells.stop)
    return replace(sources, shards=shards, layout=np.arange(cells.ranks, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class _Boxes:
    """Distinct boxes of cells, by tensor; `row` is the cell to read, `volume` the elements. `of_row`: the box of each
    cell."""

    tensor: Int32s
    start: Int64s
    stop: Int64s
    row: Int64s
    volume: Int64s
    of_row: Int64s


def _distinct(cells: Cells, tiers: Int64s) -> _Boxes:
    tier = np.repeat(tiers, np.diff(cells.first))
    row = np.lexsort((tier, *cells.stop.T, *cells.start.T, cells.tensor))
    columns = (cells.tensor[row, None], cells.start[row], cells.stop[row])
    is_new = np.ones(len(row), bool)
    is_new[1:] = np.logical_or.reduce([(column[1:] != column[:-1]).any(axis=1) for column in columns])
    of_row = np.empty(len(row), np.int64)
    of_row[row] = np.cumsum(is_new) - 1
    row = row[is_new]
    start, stop = cells.start[row], cells.stop[row]
    return _Boxes(cells.tensor[row], start, stop, row, volumes(start, stop), of_row)


@dataclass(frozen=True, slots=True)
class _Cover:
    """The largest boxes inside each want, one row per pair; `is_whole`: which wants these fill. `outer`: for each box,
    the least that contains it, or -1."""

    want: Int64s
    box: Int64s
    is_whole: Bools
    outer: Int64s


def _cover(table: TensorTable, boxes: _Boxes, wants: ShardColumns) -> _Cover:
    outer = _outer(table, boxes)
    wanted = volumes(wants.start, wants.stop)
    some = np.flatnonzero(wanted)
    want, box = _inside(table, boxes, wants.tensor[some], wants.start[some], wants.stop[some])
    want, around = some[want], outer[box]
    is_largest = (around < 0) | ~_contains(
        wants.start[want], wants.stop[want], boxes.start[around], boxes.stop[around]
    )
    want, box = want[is_largest], box[is_largest]
    filled = np.zeros(len(wanted), np.int64)
    np.add.at(filled, want, boxes.volume[box])
    return _Cover(want, box, filled == wanted, outer)


def _outer(table: TensorTable, boxes: _Boxes) -> Int64s:
    around, box = _inside(table, boxes, boxes.tensor, boxes.start, boxes.stop)
    around, box = around[around != box], box[around != box]
    order = np.lexsort((boxes.volume[around], box))
    inner, least = np.unique(box[order], return_index=True)
    found = np.full(len(boxes.row), -1, np.int64)
    found[inner] = around[order][least]
    return found


def _contains(start: Int64s, stop: Int64s, inner_start: Int64s, inner_stop: Int64s) -> Bools:
    inside: Bools = (start <= inner_start) & (inner_stop <= stop)
    found: Bools = np.all(inside, axis=1)
    return found


def _inside(
    table: TensorTable, boxes: _Boxes, tensor: Int32s, start: Int64s, stop: Int64s
) -> tuple[Int64s, Int64s]:
    """(number, box) of each box that lies in one of the given. Looked up along the dimension that is cut most."""
    reach = int(table.shape.max(initial=1)) + 1
    cuts = np.stack([
        np.bincount(np.unique(boxes.tensor.astype(np.int64) * reach + column) // reach, minlength=len(table.shape))
        for column in boxes.start.T
    ])  # fmt: skip
    axis = np.argmax(cuts, axis=0)
    key = boxes.tensor * np.int64(reach) + boxes.start[np.arange(len(boxes.row)), axis[boxes.tensor]]
    order = np.argsort(key, kind="stable")
    along, at = axis[tensor], np.arange(len(tensor))
    low, high = (
        np.searchsorted(key[order], tensor * np.int64(reach) + ends[at, along]) for ends in (start, stop)
    )
    number, box = np.repeat(at, high - low), order[unfold(low, high - low)]
    hit = _contains(start[number], stop[number], boxes.start[box], boxes.stop[box])
    return number[hit], box[hit]


@dataclass(frozen=True, slots=True)
class _Parts:
    """What wants take of outermost boxes that they cut through: rows of the wants, boxes and where these start, and what
    they share. `fills_all`: with whole boxes, these make up every want."""

    want: Int64s
    top: Int64s
    corner: Int64s
    start: Int64s
    stop: Int64s
    fills_all: bool


def _partial(boxes: _Boxes, outer: Int64s, wants: ShardColumns, missing: Int64s) -> _Parts:
    tops = np.flatnonzero(outer < 0)  # ordered by tensor
    tensor = wants.tensor[missing].astype(np.int64)
    low, high = (np.searchsorted(boxes.tensor[tops], number) for number in (tensor, tensor + 1))
    counts = high - low
    found = [(missing[:0], tops[:0])]
    for some in np.split(np.arange(len(missing)), _borders(counts)):
        want, top = np.repeat(missing[some], counts[some]), tops[unfold(low[some], counts[some])]
        meets = (wants.start[want] < boxes.stop[top]) & (boxes.start[top] < wants.stop[want])
        hit = np.flatnonzero(np.all(meets, axis=1))
        found.append((want[hit], top[hit]))
    want, top = (np.concatenate(column) for column in zip(*found, strict=True))
    start = np.maximum(wants.start[want], boxes.start[top])
    stop = np.minimum(wants.stop[want], boxes.stop[top])
    sizes = volumes(start, stop)
    filled = np.zeros(len(wants.tensor), np.int64)
    np.add.at(filled, want, sizes)
    fills_all = bool((filled[missing] == volumes(wants.start[missing], wants.stop[missing])).all())
    cut = sizes != boxes.volume[top]
    return _Parts(want[cut], top[cut], boxes.start[top[cut]], start[cut], stop[cut], fills_all)


def _borders(counts: Int64s) -> Int64s:
    """Where to cut a list so that the counts of each part sum up to about _PAIRS_AT_ONCE at most."""
    return np.flatnonzero(np.diff(np.cumsum(counts) // _PAIRS_AT_ONCE)) + 1


def _append(
    table: TensorTable, sources: Side, cells: Cells, targets: Side, boxes: _Boxes, outer: Int64s, parts: _Parts
) -> tuple[Cells, Int64s]:  # fmt: skip
    """Plan the parts with each outermost box as a tensor of its own, so that cuts in one do not reach into another."""
    tops = np.unique(parts.top)
    corner, tensor = boxes.start[tops], boxes.tensor[tops]
    small = TensorTable(
        [table.names[number] for number in tensor.tolist()],
        boxes.stop[tops] - corner, table.ndim[tensor], table.itemsize[tensor],
    )  # fmt: skip
    known, rows = _within(cells, boxes, outer, tops)
    plans = plan_fleet(
        small, _side_of(sources, known), _side_wanting(small, known, targets, parts, tops), range_cost_bytes=0
    )
    staged = _staged_by_all(plans)
    is_new = ~_are_among(staged, known)
    rank = np.repeat(np.arange(cells.ranks), np.diff(staged.first))[is_new]
    number, size = staged.tensor[is_new], staged.size[is_new]
    origin = rows[known.first[rank] + staged.parent[is_new]]
    first = np.searchsorted(rank, np.arange(cells.ranks + 1)).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(_aligned(size))])
    added = Cells(
        first, tensor[number], staged.start[is_new] + corner[number], staged.stop[is_new] + corner[number],
        cells.slot_bytes[rank] + ends[:-1] - ends[first[rank]], size, cells.parent[origin],
    )  # fmt: skip
    return _joined(cells, added), origin - cells.first[rank]


def _within(cells: Cells, boxes: _Boxes, outer: Int64s, tops: Int64s) -> tuple[Cells, Int64s]:
    """The cells that lie in these outermost boxes, as tensors numbered by them, and the row of each."""
    top = np.where(outer < 0, np.arange(len(outer)), outer)
    while (outer[top] >= 0).any():
        top = np.where(outer[top] < 0, top, outer[top])
    rows = np.flatnonzero(np.isin(top[boxes.of_row], tops))
    number = np.searchsorted(tops, top[boxes.of_row[rows]])
    corner = boxes.start[tops][number]
    return Cells(
        np.searchsorted(rows, cells.first).astype(np.int64), number.astype(np.int32), cells.start[rows] - corner,
        cells.stop[rows] - corner, cells.offset[rows], cells.size[rows], cells.parent[rows],
    ), rows  # fmt: skip


def _side_wanting(small: TensorTable, known: Cells, targets: Side, parts: _Parts, tops: Int64s) -> Side:
    """The destinations with those parts as shards that are no sum of known cells."""
    order = np.argsort(parts.want, kind="stable")
    number = np.searchsorted(tops, parts.top[order])
    corner = parts.corner[order]
    want, start, stop = parts.want[order], parts.start[order] - corner, parts.stop[order] - corner
    ends = np.array([0, len(want)], np.int64)
    wanted = ShardColumns(ends, number.astype(np.int32), start, stop)
    boxes = _distinct(known, np.zeros(known.ranks, np.int64))
    cut = ~_cover(small, boxes, wanted).is_whole
    first = np.searchsorted(want[cut], targets.shards.first).astype(np.int64)
    return replace(targets, shards=ShardColumns(first, wanted.tensor[cut], start[cut], stop[cut]))


def _are_among(some: Cells, known: Cells) -> Bools:
    """Which boxes of `some` are boxes of `known`."""
    both = [np.column_stack([cells.tensor, cells.start, cells.stop]) for cells in (known, some)]
    _, number = np.unique(np.concatenate(both), axis=0, return_inverse=True)
    number = number.reshape(-1)
    return np.isin(number[len(both[0]) :], number[: len(both[0])])


def _joined(cells: Cells, added: Cells) -> Cells:
    """The rows of both, rank by rank, those of `added` behind."""
    ranks = np.arange(cells.ranks)
    rank = np.concatenate([np.repeat(ranks, np.diff(one.first)) for one in (cells, added)])
    order = np.argsort(rank, kind="stable")
    columns = (
        np.concatenate([getattr(cells, name), getattr(added, name)])[order]
        for name in ("tensor", "start", "stop", "offset", "size", "parent")
    )
    return Cells(cells.first + added.first, *columns)
