"""Which of several holders is read: the nearest, and among those so that the bytes leaving each are even."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.moves import Int64s
from weightsync.wire.boxes import unfold
from weightsync.wire.columns import Int32s, Side
from weightsync.wire.patterns import RankSets

_SWEEPS = 30
_SETTLED = 1e-3


@dataclass(frozen=True, slots=True)
class Parcels:
    """Boxes that leave a source, one row each: piece `piece` of `tensor`, `size` bytes, for the ranks `readers`."""

    source: Int32s
    tensor: Int32s
    piece: Int32s
    size: Int64s
    readers: Int32s


def distances(sources: Side, targets: Side) -> npt.NDArray[np.uint8]:
    """(targets, sources): 0 in one process, 1 on one host, 2 in one rack, 3 far."""
    tiers = np.full((targets.ranks, sources.ranks), 3, np.uint8)
    for tier, place in ((2, "rack"), (1, "host"), (0, "process")):
        tiers[getattr(targets, place)[:, None] == getattr(sources, place)[None, :]] = tier
    return tiers


def choose_holders(
    demand: Parcels, held_by: Int32s, holders: RankSets, readers: RankSets, tiers: npt.NDArray[np.uint8]
) -> tuple[Parcels, Int64s]:
    """One source for every parcel and reader, and the bytes that would leave each source if parcels could be cut at
    will: as even as the nearest holders allow. `demand.source` is ignored, `held_by` numbers each parcel's
    holders.

    A parcel whose readers are near to different holders, or that sits on a border of the balance, becomes several.
    Ties and borders fall by number, so that equal input gives equal output.
    """
    sizes = holders.sizes()
    first, flat = holders.flat()
    is_free = sizes[held_by] > 1
    fixed = np.flatnonzero(~is_free)
    settled = _take(demand, fixed, flat[first[held_by[fixed]]], demand.readers[fixed])
    free = np.flatnonzero(is_free)
    reader_counts = readers.sizes()
    load = np.bincount(
        settled.source, settled.size * reader_counts[settled.readers], minlength=tiers.shape[1]
    ).astype(np.float64)
    if not len(free):
        return settled, load.astype(np.int64)
    rows, candidates, subsets = _nearest(held_by[free], demand.readers[free], holders, readers, tiers)
    rows = free[rows]
    order = np.lexsort((rows, subsets, candidates))
    rows, candidates, subsets = rows[order], candidates[order], subsets[order]
    counts = readers.sizes()[subsets]
    work = demand.size[rows].astype(np.float64) * counts
    pools = np.split(np.arange(len(rows)), np.flatnonzero(np.diff(candidates)) + 1)
    shares = _even_shares(
        load, [holders[candidates[pool[0]]] for pool in pools], [work[pool].sum() for pool in pools]
    )
    parts = [settled]
    for pool, share in zip(pools, shares, strict=True):
        ranks = holders[candidates[pool[0]]]
        parts += _deal(_take(demand, rows[pool], 0, subsets[pool]), counts[pool], ranks, share, readers)
    return _joined(parts), load.astype(np.int64)


def _nearest(
    held_by: Int32s, wanted_by: Int32s, holders: RankSets, readers: RankSets, tiers: npt.NDArray[np.uint8]
) -> tuple[Int64s, Int32s, Int32s]:
    """Rows, nearest holders, and the readers that these are nearest to; a row may appear several times."""
    pairs, inverse = np.unique(held_by.astype(np.int64) << 32 | wanted_by, return_inverse=True)
    units: list[tuple[int, int]] = []
    first = [0]
    for pair in pairs.tolist():
        ranks, wanting = holders[pair >> 32], readers[pair & 0xFFFFFFFF]
        near = tiers[np.ix_(wanting, ranks)]
        is_nearest = near == near.min(axis=1, keepdims=True)
        if is_nearest.all():
            units.append((pair >> 32, pair & 0xFFFFFFFF))
        else:
            choices, which = np.unique(is_nearest, axis=0, return_inverse=True)
            which = which.reshape(-1)
            for number, choice in enumerate(choices):
                units.append((holders.number(ranks[choice]), readers.number(wanting[which == number])))
        first.append(len(units))
    table, begins = np.array(units, np.int32), np.array(first, np.int64)
    repeats = np.diff(begins)[inverse]
    rows = np.repeat(np.arange(len(inverse)), repeats)
    unit = unfold(begins[:-1][inverse], repeats)
    return rows, table[unit, 0], table[unit, 1]


def _even_shares(
    load: npt.NDArray[np.float64], pools: list[Int32s], work: list[float]
) -> list[npt.NDArray[np.float64]]:
    """How much of each pool's work each of its ranks does, so that the loads are as even as can be.

    Block coordinate descent on the sum of squares: each pool in turn is poured over its ranks like water.
    """
    shares = [np.zeros(len(ranks)) for ranks in pools]
    for _ in range(_SWEEPS):
        moved = 0.0
        for number in sorted(range(len(pools)), key=lambda n: len(pools[n])):
            ranks, before = pools[number], shares[number]
            load[ranks] -= before
            shares[number] = _pour(load[ranks], work[number])
            load[ranks] += shares[number]
            moved = max(moved, float(np.abs(shares[number] - before).max()))
        if moved <= _SETTLED * load.max(initial=1.0):
            break
    return shares


def _pour(levels: npt.NDArray[np.float64], amount: float) -> npt.NDArray[np.float64]:
    """What each vessel gets when `amount` is poured over them until the lowest are level."""
    ordered = np.sort(levels)
    tops = (np.cumsum(ordered) + amount) / np.arange(1, len(ordered) + 1)
    wet = int(np.flatnonzero(tops > ordered).max(initial=0))
    poured: npt.NDArray[np.float64] = np.maximum(tops[wet] - levels, 0.0)
    return poured


def _deal(
    parcels: Parcels, counts: Int64s, ranks: Int32s, share: npt.NDArray[np.float64], readers: RankSets
) -> list[Parcels]:
    """Hand out a pool in order, a run to each rank; a parcel on a border is cut between its readers."""
    ends = np.cumsum(share)
    begin = np.concatenate([[0.0], np.cumsum(parcels.size * counts)[:-1]])
    half = parcels.size / 2.0
    last = len(ranks) - 1
    low = np.minimum(np.searchsorted(ends, begin + half, side="right"), last)
    high = np.minimum(np.searchsorted(ends, begin + parcels.size * counts - half, side="right"), last)
    whole = np.flatnonzero(low == high)
    dealt = [_take(parcels, whole, ranks[low[whole]], parcels.readers[whole])]
    for row in np.flatnonzero(low != high).tolist():
        wanting = readers[int(parcels.readers[row])]
        middles = begin[row] + parcels.size[row] * (np.arange(len(wanting)) + 0.5)
        which = np.minimum(np.searchsorted(ends, middles, side="right"), last)
        for holder in np.unique(which).tolist():
            some = np.array([readers.number(wanting[which == holder])], np.int32)
            dealt.append(_take(parcels, np.array([row]), ranks[holder : holder + 1], some))
    return dealt


def _take(parcels: Parcels, rows: Int64s, source: Int32s | int, readers: Int32s) -> Parcels:
    sources = np.broadcast_to(np.asarray(source, np.int32), (len(rows),))
    return Parcels(sources, parcels.tensor[rows], parcels.piece[rows], parcels.size[rows], readers)


def _joined(parts: list[Parcels]) -> Parcels:
    return Parcels(
        np.concatenate([part.source for part in parts]),
        np.concatenate([part.tensor for part in parts]),
        np.concatenate([part.piece for part in parts]),
        np.concatenate([part.size for part in parts]),
        np.concatenate([part.readers for part in parts]),
    )
