"""Any sharding to any sharding: the plans of a whole fleet from the layouts of its ranks.

Pure and deterministic; numpy columns in, numpy columns out. Steps: tensors that are cut alike are found (`patterns`),
their boxes are cut into pieces once, a holder is chosen for every piece and reader (`holders`), and the pieces that
leave one source are put in an order that gives each reader few contiguous ranges (`slot_order`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weightsync.config import TENSOR_ALIGNMENT
from weightsync.errors import LayoutError
from weightsync.moves import Int64s
from weightsync.wire.boxes import box_text, cut_cells, intersect, subtract, unfold, volumes
from weightsync.wire.columns import Int32s, Side, TensorTable, refuse_outside
from weightsync.wire.holders import Parcels, choose_holders, distances
from weightsync.wire.patterns import Pattern, RankSets, cell_sets, find_patterns
from weightsync.wire.plans import Plans
from weightsync.wire.slot_order import order_groups

RANGE_COST_BYTES = 64 << 10
"""Staged bytes that one read less is worth: what a source copies in the few microseconds a read costs."""
_MAX_LISTED = 1000


def plan_fleet(
    tensors: TensorTable, sources: Side, targets: Side, *, range_cost_bytes: int = RANGE_COST_BYTES,
    spare: int | None = None,
) -> Plans:  # fmt: skip
    """Every element that a destination wants, from exactly one source. `spare`: a destination that gets only what no
    other wants.

    Both sides must hold and want bytes of the same element size (`tensors.itemsize`). Raises LayoutError for boxes
    outside their tensors, and one LayoutError that lists all boxes wanted but held by nobody.
    """
    refuse_outside(tensors, sources.shards, "source")
    refuse_outside(tensors, targets.shards, "destination")
    holders, readers = RankSets(), RankSets()
    cut = _cut_pieces(tensors, sources, targets, holders, readers)
    if spare is not None:
        wanted_by = _unless_shared(spare, readers)[cut.demand.readers]
        cut = replace(cut, demand=replace(cut.demand, readers=wanted_by))
    tiers = distances(sources, targets)
    chosen, even_bytes = choose_holders(cut.demand, cut.held_by, holders, readers, tiers)
    return _lay_out(tensors, sources, targets, cut, chosen, even_bytes, readers, range_cost_bytes)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Pieces of all patterns, the demand for them, and who holds each row of it."""

    start: Int64s
    stop: Int64s
    demand: Parcels
    held_by: Int32s
    patterns: int
    distinct_bytes: int


def _unless_shared(rank: int, sets: RankSets) -> Int32s:
    """The number that each set has without `rank`; a set of this rank alone stays."""
    all_sets = [sets[number] for number in range(len(sets))]
    return np.array(
        [
            sets.number(ranks[ranks != rank]) if len(ranks) > 1 else number
            for number, ranks in enumerate(all_sets)
        ],
        np.int32,
    )


def _cut_pieces(
    tensors: TensorTable, sources: Side, targets: Side, holders: RankSets, readers: RankSets
) -> _Cut:
    width = tensors.shape.shape[1]
    starts, stops = [np.zeros((0, width), np.int64)], [np.zeros((0, width), np.int64)]
    none = np.zeros(0, np.int32)
    rows: list[tuple[Int32s, Int32s, Int64s, Int32s, Int32s]] = [
        (none, none, none.astype(np.int64), none, none)
    ]
    gaps: list[str] = []
    pieces = count = distinct = 0
    for pattern in find_patterns(tensors, sources, targets, holders, readers):
        count += 1
        wanted = cut_cells(pattern.wanted.start, pattern.wanted.stop)
        wanted_by = cell_sets(wanted, pattern.wanted, readers)
        sizes = volumes(wanted.start, wanted.stop)
        distinct += int(sizes.sum()) * pattern.itemsize * len(pattern.tensors)
        held = cut_cells(pattern.held.start, pattern.held.stop)
        held_by = cell_sets(held, pattern.held, holders)
        both = intersect(held.start, held.stop, wanted.start, wanted.stop)
        parts = volumes(both.start, both.stop)
        found = np.zeros(len(sizes), np.int64)
        np.add.at(found, both.right, parts)
        for cell in np.flatnonzero(found != sizes).tolist():
            hit = both.right == cell
            missing = subtract(wanted.start[cell], wanted.stop[cell], both.start[hit], both.stop[hit])
            gaps += _gap_lines(tensors, pattern, wanted_by[:, cell], missing, holders, readers)
        members, each = len(pattern.tensors), len(parts)
        rows.append((
            np.repeat(pattern.tensors.astype(np.int32), each),
            np.tile(np.arange(pieces, pieces + each, dtype=np.int32), members),
            np.tile(parts * pattern.itemsize, members),
            held_by[:, both.left].reshape(-1),
            wanted_by[:, both.right].reshape(-1),
        ))  # fmt: skip
        starts.append(both.start)
        stops.append(both.stop)
        pieces += each
    if gaps:
        more = f"\n  and {len(gaps) - _MAX_LISTED} more" if len(gaps) > _MAX_LISTED else ""
        raise LayoutError(
            f"{len(gaps)} boxes are wanted, but nobody holds them:\n  "
            + "\n  ".join(gaps[:_MAX_LISTED])
            + more
        )
    tensor, piece, size, held_rows, wanted_rows = (
        np.concatenate(column) for column in zip(*rows, strict=True)
    )
    del rows
    demand = Parcels(np.zeros(0, np.int32), tensor, piece, size.astype(np.int64), wanted_rows)
    return _Cut(
        np.concatenate(starts), np.concatenate(stops), demand, held_rows, count, distinct
    )  # fmt: skip


def _gap_lines(
    tensors: TensorTable, pattern: Pattern, wanted_by: Int32s, missing: tuple[Int64s, Int64s], holders: RankSets,
    readers: RankSets,
) -> list[str]:  # fmt: skip
    lines = []
    for number, tensor in enumerate(pattern.tensors.tolist()):
        ndim = int(tensors.ndim[tensor])
        ranks = readers[int(wanted_by[number])]
        others = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        for start, stop in zip(*missing, strict=True):
            if len(pattern.held.start):
                apart = np.maximum(pattern.held.start - stop, start - pattern.held.stop).clip(0).sum(axis=1)
                box = int(np.argmin(apart))
                held = box_text(pattern.held.start[box], pattern.held.stop[box], ndim)
                nearest = f"the nearest holder is rank {holders[int(pattern.held.sets[number, box])][0]} with {held}"
            else:
                nearest = "nobody holds any of this tensor"
            lines.append(
                f"{tensors.names[tensor]}: rank {ranks[0]}{others} wants {box_text(start, stop, ndim)}; {nearest}"
            )
    return lines


def _lay_out(
    tensors: TensorTable,
    sources: Side,
    targets: Side,
    cut: _Cut,
    chosen: Parcels,
    even_bytes: Int64s,
    readers: RankSets,
    range_cost: int,
) -> Plans:
    """Put parcels into regions, regions into slots. Each parcel starts where streaming stores may."""
    key = chosen.source.astype(np.int64) * len(readers) + chosen.readers
    groups, group_of = _distinct(key, sources.ranks * len(readers))
    source, wanted_by = groups // len(readers), (groups % len(readers)).astype(np.int32)
    sizes = np.bincount(group_of, chosen.size, minlength=len(groups)).astype(np.int64)
    borders = np.searchsorted(source, np.arange(sources.ranks + 1))
    region_readers, region_source, group_rows, region_rows, count = [], [], [], [], 0
    for rank in range(sources.ranks):
        some = slice(int(borders[rank]), int(borders[rank + 1]))
        if some.start == some.stop:
            continue
        regions = order_groups(wanted_by[some], sizes[some], readers, range_cost)
        region_readers.append(regions.readers)
        region_source.append(np.full(len(regions.readers), rank, np.int32))
        group_rows.append(regions.group + some.start)
        region_rows.append(regions.region + count)
        count += len(regions.readers)
    empty = np.zeros(0, np.int64)
    numbers = np.concatenate([empty.astype(np.int32), *region_readers])
    rank_of = np.concatenate([empty.astype(np.int32), *region_source])
    parcel, region = _spread(
        group_of, len(groups), np.concatenate([empty, *group_rows]), np.concatenate([empty, *region_rows])
    )
    by_box = np.empty(len(cut.start), np.int64)
    by_box[np.lexsort(cut.start.T[::-1])] = np.arange(len(cut.start))
    order = _slot_order(region, chosen.tensor[parcel], by_box[chosen.piece[parcel]])
    parcel, region = parcel[order], region[order]
    size = chosen.size[parcel]
    first = np.searchsorted(region, np.arange(count + 1)).astype(np.int64)
    total = np.concatenate([[0], np.cumsum(size)])
    begins = np.concatenate([[0], np.cumsum(-(-size // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT)])
    slot_begin = begins[first[np.searchsorted(rank_of, np.arange(sources.ranks + 1))]]
    offset = begins[:-1] - slot_begin[rank_of[region]]
    last = first[1:] - 1
    bytes_needed = int((readers.sizes()[cut.demand.readers] * cut.demand.size).sum())
    wanted_first, wanted_regions = _regions_per_target(numbers, readers, targets.ranks)
    return Plans(
        tensors, sources, targets, cut.start, cut.stop, chosen.tensor[parcel], chosen.piece[parcel], size,
        offset, first, rank_of, offset[first[:-1]], offset[last] + size[last], total[first[1:]] - total[first[:-1]],
        numbers, readers, wanted_first, wanted_regions, np.diff(slot_begin), cut.patterns, bytes_needed,
        cut.distinct_bytes, even_bytes,
    )  # fmt: skip


def _distinct(key: Int64s, limit: int) -> tuple[Int64s, Int64s]:
    """Sorted distinct keys and the number of each; without sorting where the keys are dense."""
    if limit > max(1 << 24, 4 * len(key)):
        values, inverse = np.unique(key, return_inverse=True)
        return values, inverse.astype(np.int64)
    is_used = np.zeros(limit, bool)
    is_used[key] = True
    values = np.flatnonzero(is_used)
    number = np.zeros(limit, np.int32)
    number[values] = np.arange(len(values), dtype=np.int32)
    return values.astype(np.int64), number[key].astype(np.int64)


def _spread(group_of: Int64s, groups: int, group_rows: Int64s, region_rows: Int64s) -> tuple[Int64s, Int64s]:
    """Parcels and the region of each; a parcel of a copied group appears once per copy."""
    order = np.argsort(group_rows, kind="stable")
    region_rows = region_rows[order]
    counts = np.bincount(group_rows, minlength=groups)
    first = np.cumsum(counts) - counts
    if (counts == 1).all():
        return np.arange(len(group_of)), region_rows[group_of]
    repeats = counts[group_of]
    return np.repeat(np.arange(len(group_of)), repeats), region_rows[unfold(first[group_of], repeats)]


def _slot_order(region: Int64s, tensor: Int32s, box: Int64s) -> npt.NDArray[np.int64]:
    """By region, then by tensor and box."""
    limits = [int(column.max(initial=0)) + 1 for column in (region, tensor, box)]
    if limits[0] * limits[1] * limits[2] < 1 << 63:
        return np.argsort((region * limits[1] + tensor) * limits[2] + box, kind="stable")
    return np.lexsort((box, tensor, region))


def _regions_per_target(numbers: Int32s, readers: RankSets, targets: int) -> tuple[Int64s, Int64s]:
    first, flat = readers.flat()
    counts = first[numbers + 1] - first[numbers]
    region = np.repeat(np.arange(len(numbers)), counts)
    target = flat[unfold(first[numbers], counts)]
    order = np.argsort(target, kind="stable")
    return np.searchsorted(target[order], np.arange(targets + 1)).astype(np.int64), region[order]
