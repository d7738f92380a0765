"""In which order a source stages its parcels, so that each reader finds what it needs in few contiguous ranges.

Parcels of one source with equal readers form a *group*, contiguous in the slot. Groups with many readers in common
lie next to each other. Where a reader would still need several ranges, and the bytes it shares with others are few,
it gets a copy of them beside its own: `range_cost_bytes` says how many more staged bytes one range less is worth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.moves import Int64s
from weightsync.wire.columns import Int32s
from weightsync.wire.patterns import RankSets

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Regions:
    """The slot's regions of one source in order: `readers` is a set of ranks, `group` and `region` say which groups
    each region holds, one row per pair (a group is in several regions if it is copied)."""

    readers: Int32s
    group: Int64s
    region: Int64s


def order_groups(group_readers: Int32s, sizes: Int64s, readers: RankSets, range_cost_bytes: int) -> Regions:
    """Order the groups of one source, given the reader set and the bytes of each."""
    if len(group_readers) == 1:
        return Regions(group_readers, np.zeros(1, np.int64), np.zeros(1, np.int64))
    ranks = np.unique(np.concatenate([readers[number] for number in group_readers.tolist()]))
    reads = np.zeros((len(group_readers), len(ranks)), bool)
    for row, number in enumerate(group_readers.tolist()):
        reads[row, np.searchsorted(ranks, readers[number])] = True
    order = _chain(reads)
    return _with_copies(reads[order], order, sizes[order], ranks, readers, range_cost_bytes)


def count_runs(reads: Bools) -> Int64s:
    """Contiguous runs of True in each column."""
    runs: Int64s = reads[0].astype(np.int64) + (reads[1:] & ~reads[:-1]).sum(axis=0)
    return runs


def _chain(reads: Bools) -> Int64s:
    """From the most read group outwards, at either end the group that shares most readers with it comes next."""
    weights = reads.astype(np.float32)
    common = weights @ weights.T
    sizes = np.diag(common).copy()
    score = common + sizes[None, :] / (sizes.max() * 2)
    start = int(np.argmax(sizes))
    ends, chains = [start, start], ([], [start])  # type: tuple[list[int], tuple[list[int], list[int]]]
    score[:, start] = -1.0
    for _ in range(len(reads) - 1):
        best = [int(np.argmax(score[end])) for end in ends]
        side = int(score[ends[1], best[1]] >= score[ends[0], best[0]])
        ends[side] = best[side]
        chains[side].append(best[side])
        score[:, best[side]] = -1.0
    return np.array([*reversed(chains[0]), *chains[1]], np.int64)


def _with_copies(
    reads: Bools, order: Int64s, sizes: Int64s, ranks: Int32s, readers: RankSets, range_cost_bytes: int
) -> Regions:
    """Regions for groups that are already in order."""
    _, sample, which = np.unique(reads, axis=1, return_index=True, return_inverse=True)
    which = which.reshape(-1)
    members = np.bincount(which)
    columns = reads[:, sample]
    is_own = columns & (reads.sum(axis=1)[:, None] == members[None, :])
    shared_bytes = (sizes[:, None] * (columns & ~is_own)).sum(axis=0)
    copied = (count_runs(columns) - 1) * members * range_cost_bytes > shared_bytes
    keep = reads & ~copied[which][None, :]
    rows: list[tuple[int, list[int]]] = []  # (reader set, groups)
    own_of = {
        int(np.flatnonzero(is_own[:, c])[0]): c for c in np.flatnonzero(copied & is_own.any(axis=0)).tolist()
    }
    for row in range(len(reads)):
        if row in own_of:
            rows.append(_copy_region(columns, own_of[row], which, ranks, readers))
        elif keep[row].any():
            rows.append((readers.number(ranks[keep[row]]), [row]))
    for c in np.flatnonzero(copied & ~is_own.any(axis=0)).tolist():
        rows.append(_copy_region(columns, c, which, ranks, readers))
    return Regions(
        np.array([number for number, _ in rows], np.int32),
        order[np.array([group for _, groups in rows for group in groups], np.int64)],
        np.repeat(np.arange(len(rows)), [len(groups) for _, groups in rows]),
    )


def _copy_region(
    columns: Bools, c: int, which: Int64s, ranks: Int32s, readers: RankSets
) -> tuple[int, list[int]]:
    return readers.number(ranks[which == c]), np.flatnonzero(columns[:, c]).tolist()
