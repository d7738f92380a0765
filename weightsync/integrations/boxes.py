"""Arithmetic of boxes: what two share, what is left of one, and the boxes of an interval of a flattened tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from weightsync.types import Box

Interval = tuple[int, int]


def intersect(a: Box, b: Box) -> Box | None:
    """The elements that are in both; None if there are none."""
    start = tuple(max(x, y) for x, y in zip(a.start, b.start, strict=True))
    stop = tuple(min(x, y) for x, y in zip(a.stop, b.stop, strict=True))
    return Box(start, stop) if all(x < y for x, y in zip(start, stop, strict=True)) else None


def subtract(box: Box, hole: Box) -> list[Box]:
    """`box` without `hole`, as disjoint boxes; at most two for each dimension."""
    shared = intersect(box, hole)
    if shared is None:
        return [box] if box.size else []
    left: list[Box] = []
    start, stop = list(box.start), list(box.stop)
    for axis in range(len(start)):
        if start[axis] < shared.start[axis]:
            left.append(Box(tuple(start), (*stop[:axis], shared.start[axis], *stop[axis + 1 :])))
        if shared.stop[axis] < stop[axis]:
            left.append(Box((*start[:axis], shared.stop[axis], *start[axis + 1 :]), tuple(stop)))
        start[axis], stop[axis] = shared.start[axis], shared.stop[axis]
    return left


def remainder(box: Box, holes: Iterable[Box]) -> list[Box]:
    """`box` without any of `holes`, as disjoint boxes."""
    left = [box] if box.size else []
    for hole in holes:
        left = [piece for whole in left for piece in subtract(whole, hole)]
    return left


def boxes_of_runs(runs: Sequence[Sequence[Interval]]) -> Iterator[tuple[Box, Box]]:
    """The boxes that a local tensor holds whose axis `d` is the concatenation of the global intervals `runs[d]`.

    Yields (box in the whole tensor, box in the local tensor); one pair for each combination of intervals.
    """
    placed: list[list[tuple[Interval, Interval]]] = []
    for axis in runs:
        at, here = 0, []
        for a, b in axis:
            here.append(((a, b), (at, at + b - a)))
            at += b - a
        placed.append(here)
    for combination in product(*placed):
        yield (
            Box(tuple(g[0] for g, _ in combination), tuple(g[1] for g, _ in combination)),
            Box(tuple(h[0] for _, h in combination), tuple(h[1] for _, h in combination)),
        )


def interval_to_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements `[start, stop)` of a row-major flattened tensor of `shape`, as the fewest boxes, in flat order.

    Each box is contiguous in the flattened tensor. An N-d tensor needs at most 2N - 1. Raises ValueError for an
    interval outside the tensor.
    """
    shape = tuple(shape)
    size = math.prod(shape)
    if not 0 <= start <= stop <= size:
        raise ValueError(
            f"[{start}, {stop}) is no interval of a tensor of shape {list(shape)} with {size} elements"
        )
    if start == stop:
        return []
    if not shape or (start == 0 and stop == size):
        return [Box.whole(shape)]
    row = size // shape[0]
    first, last = start // row, (stop - 1) // row
    if first == last:
        return _in_row(shape, first, start - first * row, stop - first * row)
    boxes: list[Box] = []
    if start % row:
        boxes += _in_row(shape, first, start % row, row)
        first += 1
    full = last + 1 if stop % row == 0 else last
    if first < full:
        boxes.append(Box((first, *(0,) * (len(shape) - 1)), (full, *shape[1:])))
    if stop % row:
        boxes += _in_row(shape, last, 0, stop % row)
    return boxes


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> list[Box]:
    inner = interval_to_boxes(shape[1:], start, stop)
    return [Box((index, *box.start), (index + 1, *box.stop)) for box in inner]
