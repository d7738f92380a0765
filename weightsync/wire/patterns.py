"""Tensors that are cut the same way on both sides are planned once: layers, experts, replicas.

A *pattern* is the set of distinct boxes that sources hold and the set that destinations want, whoever they are. Who
holds or wants each box is a number per tensor and box, into a table of rank sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.moves import Int64s
from weightsync.wire.boxes import Cells, volumes
from weightsync.wire.columns import Int32s, Side, TensorTable

UInt64s = npt.NDArray[np.uint64]


class RankSets:
    """Numbers for sets of ranks; equal sets have equal numbers. Numbers follow the order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._sets: list[Int32s] = []

    def __len__(self) -> int:
        return len(self._sets)

    def __getitem__(self, number: int) -> Int32s:
        """The ranks of one set, ascending."""
        return self._sets[number]

    def number(self, ranks: npt.NDArray[np.integer]) -> int:
        """The number of this set; the ranks need not be sorted or distinct."""
        distinct = np.unique(ranks).astype(np.int32)
        key = distinct.tobytes()
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self._sets)
            self._sets.append(distinct)
        return found

    def union(self, numbers: npt.NDArray[np.integer]) -> int:
        """The number of the union of several sets."""
        if len(numbers) == 1:
            return int(numbers[0])
        return self.number(np.concatenate([self._sets[number] for number in numbers.tolist()]))

    def sizes(self) -> Int64s:
        return np.array([len(ranks) for ranks in self._sets], np.int64)

    def flat(self) -> tuple[Int64s, Int32s]:
        """All sets one after the other: `first` of each (one more than sets) and the ranks."""
        first = np.concatenate([[0], np.cumsum(self.sizes())]).astype(np.int64)
        return first, np.concatenate([np.zeros(0, np.int32), *self._sets])


@dataclass(frozen=True, slots=True)
class Boxes:
    """Distinct boxes of one side of a pattern; `sets` is int32 (tensors, boxes): which ranks have each."""

    start: Int64s
    stop: Int64s
    sets: Int32s


@dataclass(frozen=True, slots=True)
class Pattern:
    """`tensors` (ascending) with equal shape, element size and boxes."""

    tensors: Int64s
    itemsize: int
    held: Boxes
    wanted: Boxes


def find_patterns(
    tensors: TensorTable, sources: Side, targets: Side, holders: RankSets, readers: RankSets
) -> Iterator[Pattern]:
    """Patterns of all wanted tensors, by first tensor. Rank sets are entered into `holders` and `readers`."""
    count = len(tensors.shape)
    held = _distinct_boxes(sources, count, holders)
    wanted = _distinct_boxes(targets, count, readers)
    signature = _mix(tensors.itemsize.astype(np.uint64)) ^ _signature(held) ^ _mix(_signature(wanted))
    chosen = np.flatnonzero(np.diff(wanted.first))
    _, group = np.unique(signature[chosen], return_inverse=True)
    order = np.argsort(group, kind="stable")
    members = np.split(chosen[order], np.flatnonzero(np.diff(group[order])) + 1)
    for candidates in sorted(members, key=lambda some: int(some[0]) if len(some) else -1):
        rest = candidates
        while len(rest):  # a signature may collide, equality can't
            same = _equal_boxes(held, rest) & _equal_boxes(wanted, rest)
            same &= tensors.itemsize[rest] == tensors.itemsize[rest[0]]
            some = rest[same]
            yield Pattern(some, int(tensors.itemsize[some[0]]), held.of(some), wanted.of(some))
            rest = rest[~same]


def cell_sets(cells: Cells, boxes: Boxes, sets: RankSets) -> Int32s:
    """Which ranks have each cell: int32 (tensors, cells)."""
    if len(cells.member) == len(cells.start):
        return boxes.sets[:, cells.member]
    found = np.empty((len(boxes.sets), len(cells.start)), np.int32)
    for cell in range(len(cells.start)):
        members = boxes.sets[:, cells.member[cells.first[cell] : cells.first[cell + 1]]]
        distinct, inverse = np.unique(members, axis=0, return_inverse=True)
        numbers = np.array([sets.union(row) for row in distinct], np.int32)
        found[:, cell] = numbers[inverse.reshape(-1)]
    return found


@dataclass(frozen=True, slots=True)
class _Distinct:
    """Distinct boxes of each tensor: rows `first[t] : first[t + 1]`, in an order that depends on boxes alone."""

    first: Int64s
    start: Int64s
    stop: Int64s
    mixed: UInt64s
    sets: Int32s

    def of(self, tensors: Int64s) -> Boxes:
        """Boxes of tensors that have the same ones."""
        begin, end = self.first[tensors[0]], self.first[tensors[0] + 1]
        rows = self.first[tensors][:, None] + np.arange(end - begin)
        return Boxes(self.start[begin:end], self.stop[begin:end], self.sets[rows])


def _equal_boxes(side: _Distinct, tensors: Int64s) -> npt.NDArray[np.bool_]:
    """Which of `tensors` have exactly the boxes of the first one."""
    counts = side.first[tensors + 1] - side.first[tensors]
    equal: npt.NDArray[np.bool_] = counts == counts[0]
    rows = side.first[tensors[equal]][:, None] + np.arange(counts[0])
    same = (side.start[rows] == side.start[rows[0]]) & (side.stop[rows] == side.stop[rows[0]])
    equal[equal] = same.all(axis=(1, 2))
    return equal


def _distinct_boxes(side: Side, count: int, sets: RankSets) -> _Distinct:
    shards = side.shards
    mixed = _mix_boxes(shards.start, shards.stop)
    bits = np.uint64(max(1, count.bit_length()))
    key = (shards.tensor.astype(np.uint64) << (np.uint64(64) - bits)) | (mixed >> bits)
    rows = np.argsort(key, kind="stable")
    is_used = _ranks_per_layout(side)[shards.layout] > 0
    rows = rows[(volumes(shards.start[rows], shards.stop[rows]) > 0) & is_used[rows]]
    tensor, start, stop = shards.tensor[rows], shards.start[rows], shards.stop[rows]
    is_new = np.ones(len(rows), bool)
    is_new[1:] = (tensor[1:] != tensor[:-1]) | ((start[1:] != start[:-1]) | (stop[1:] != stop[:-1])).any(
        axis=1
    )
    begins = np.flatnonzero(is_new)
    first = np.searchsorted(tensor[begins], np.arange(count + 1)).astype(np.int64)
    return _Distinct(
        first,
        start[begins],
        stop[begins],
        mixed[rows[begins]],
        _number_sets(side, shards.layout[rows], begins, sets),
    )


def _number_sets(side: Side, layouts: Int32s, begins: Int64s, sets: RankSets) -> Int32s:
    """The rank set of each run of `layouts` that begins at `begins`."""
    order = np.argsort(side.layout, kind="stable")
    ranks_of = np.split(order, np.cumsum(_ranks_per_layout(side))[:-1])
    one = np.array([sets.number(ranks) for ranks in ranks_of], np.int32)
    numbers = one[layouts[begins]]
    ends = np.append(begins[1:], len(layouts))
    known: dict[bytes, int] = {}
    for row in np.flatnonzero(ends - begins > 1).tolist():
        some = layouts[begins[row] : ends[row]]
        key = some.tobytes()
        if key not in known:
            known[key] = sets.number(np.concatenate([ranks_of[layout] for layout in set(some.tolist())]))
        numbers[row] = known[key]
    return numbers


def _ranks_per_layout(side: Side) -> Int64s:
    return np.bincount(side.layout, minlength=len(side.shards.first) - 1)


def _signature(side: _Distinct) -> UInt64s:
    """One value per tensor: a sum over its boxes."""
    total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mix(side.mixed), dtype=np.uint64)])
    return _mix(total[side.first[1:]] - total[side.first[:-1]])


def _mix_boxes(start: Int64s, stop: Int64s) -> UInt64s:
    value = np.full(len(start), 0x9E3779B97F4A7C15, np.uint64)
    for d in range(start.shape[1]):
        for column in (start[:, d], stop[:, d]):
            value = _mix(value ^ column.astype(np.uint64))
    return value


def _mix(value: UInt64s) -> UInt64s:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64s = value ^ (value >> np.uint64(31))
    return mixed
