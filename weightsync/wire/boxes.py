"""Arrays of boxes: intersect them, cut them into disjoint cells, subtract them.

Boxes are two int64 arrays `start`, `stop` of shape (boxes, dimensions); half-open, in elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightsync.moves import Int64s

_PAIRS_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Cells:
    """Disjoint boxes; cell `c` lies in the boxes `member[first[c] : first[c + 1]]` and in no other."""

    start: Int64s
    stop: Int64s
    first: Int64s
    member: Int64s


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Non-empty intersections of boxes `left` and `right` of two arrays, ordered by left, then right."""

    left: Int64s
    right: Int64s
    start: Int64s
    stop: Int64s


def volumes(start: Int64s, stop: Int64s) -> Int64s:
    """Elements of each box; the last axis is the dimension."""
    found: Int64s = np.prod(stop - start, axis=-1, dtype=np.int64)
    return found


def box_text(start: Int64s, stop: Int64s, ndim: int) -> str:
    """One box as users write it, `[0:4, 2:8]`."""
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(start[:ndim], stop[:ndim], strict=True)) + "]"


def intersect(a_start: Int64s, a_stop: Int64s, b_start: Int64s, b_stop: Int64s) -> Overlaps:
    """Every pair of boxes that share an element, and what they share."""
    step = max(1, _PAIRS_AT_ONCE // max(1, len(b_start)))
    lefts, rights = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for begin in range(0, len(a_start), step):
        some_start, some_stop = a_start[begin : begin + step, None], a_stop[begin : begin + step, None]
        hit = np.ones((some_start.shape[0], len(b_start)), bool)
        for d in range(a_start.shape[1]):
            low = np.maximum(some_start[..., d], b_start[None, :, d])
            hit &= low < np.minimum(some_stop[..., d], b_stop[None, :, d])
        left, right = np.nonzero(hit)
        lefts.append(left + begin)
        rights.append(right)
    left, right = np.concatenate(lefts), np.concatenate(rights)
    return Overlaps(
        left, right, np.maximum(a_start[left], b_start[right]), np.minimum(a_stop[left], b_stop[right])
    )


def cut_cells(start: Int64s, stop: Int64s) -> Cells:
    """Cut non-empty boxes into disjoint cells; boxes that overlap no other stay whole, in their order."""
    count = len(start)
    if len(intersect(start, stop, start, stop).left) == count:
        return Cells(start, stop, np.arange(count + 1), np.arange(count))
    found: list[tuple[list[int], list[int], Int64s]] = []
    _slice_cells(start, stop, np.arange(count), [], [], found)
    sizes = [len(members) for _, _, members in found]
    return Cells(
        np.array([low for low, _, _ in found], np.int64),
        np.array([high for _, high, _ in found], np.int64),
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        np.concatenate([members for _, _, members in found]),
    )


def _slice_cells(
    start: Int64s, stop: Int64s, boxes: Int64s, low: list[int], high: list[int],
    found: list[tuple[list[int], list[int], Int64s]],
) -> None:  # fmt: skip
    """Cut `boxes` along dimension `len(low)` at every border of theirs, then each slab along the next one."""
    d = len(low)
    if d == start.shape[1]:
        found.append((low, high, boxes))
        return
    cuts = np.unique(np.concatenate([start[boxes, d], stop[boxes, d]]))
    for a, b in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        inside = boxes[(start[boxes, d] <= a) & (stop[boxes, d] >= b)]
        if len(inside):
            _slice_cells(start, stop, inside, [*low, a], [*high, b], found)


def subtract(start: Int64s, stop: Int64s, hole_start: Int64s, hole_stop: Int64s) -> tuple[Int64s, Int64s]:
    """What is left of one box (1-d `start`, `stop`) without the holes, as disjoint boxes."""
    rest = [(start.copy(), stop.copy())]
    for low, high in zip(hole_start, hole_stop, strict=True):
        kept: list[tuple[Int64s, Int64s]] = []
        for a, b in rest:
            if (np.maximum(a, low) >= np.minimum(b, high)).any():
                kept.append((a, b))
                continue
            a, b = a.copy(), b.copy()
            for d in range(len(a)):
                if a[d] < low[d]:
                    kept.append((a.copy(), np.where(np.arange(len(a)) == d, low[d], b)))
                    a[d] = low[d]
                if high[d] < b[d]:
                    kept.append((np.where(np.arange(len(a)) == d, high[d], a), b.copy()))
                    b[d] = high[d]
        rest = kept
    shape = (len(rest), len(start))
    return (
        np.array([a for a, _ in rest], np.int64).reshape(shape),
        np.array([b for _, b in rest], np.int64).reshape(shape),
    )


def unfold(begins: Int64s, counts: Int64s) -> Int64s:
    """`begins[i], begins[i] + 1, ...` for `counts[i]` numbers, one run after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    numbers: Int64s = np.arange(total) + np.repeat(begins - (ends - counts), counts)
    return numbers
