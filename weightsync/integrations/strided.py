"""Strided copies between two storages, cut into boxes of the tensor on one side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from weightsync.moves import contiguous_strides
from weightsync.types import Box

MAX_CUTS = 1 << 16
"""More boxes than this for one copy is an error: such a copy is a shuffle, not a layout."""


class ScatteredError(ValueError):
    """A strided copy leaves the tensor's frame, or falls into more than MAX_CUTS boxes of it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the elements of a view lie in a storage: element `i` at `offset + sum(i * strides)`, in elements."""

    offset: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        return cls(int(tensor.storage_offset()), tuple(tensor.stride()))

    def at(self, index: Sequence[int]) -> int:
        """Position of the element `index`."""
        return self.offset + sum(i * s for i, s in zip(index, self.strides, strict=True))


@dataclass(frozen=True)
class Frame:
    """The index space of one tensor and where it lies in its storage. Its elements must not share memory."""

    shape: tuple[int, ...]
    place: Place

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Frame:
        return cls(tuple(tensor.shape), Place.of(tensor))

    @classmethod
    def contiguous(cls, shape: Sequence[int]) -> Frame:
        """A row-major tensor of `shape` at the start of its storage."""
        return cls(tuple(shape), Place(0, contiguous_strides(shape, 1)))

    @cached_property
    def axes(self) -> dict[int, int]:
        """Axis by stride, widest first, without those of length one."""
        strides = self.place.strides
        wide = [axis for axis, n in enumerate(self.shape) if n > 1]
        return {strides[axis]: axis for axis in sorted(wide, key=lambda axis: -strides[axis])}

    def index(self, position: int) -> tuple[int, ...]:
        """The element at `position` of the storage. Raises ScatteredError if none of this tensor is there."""
        left = position - self.place.offset
        found = [0] * len(self.shape)
        for stride, axis in self.axes.items():
            found[axis], left = divmod(left, stride) if stride > 0 else (0, left)
            if not 0 <= found[axis] < self.shape[axis]:
                raise ScatteredError(f"position {position} is outside")
        if left:
            raise ScatteredError(f"position {position} is outside")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Cut:
    """One box of a frame, and where the elements that belong to it lie in the other storage."""

    box: Box
    there: Place

    def within(self, box: Box) -> Cut:
        """The part of it that is `box`, which must lie inside."""
        start = tuple(a - b for a, b in zip(box.start, self.box.start, strict=True))
        return Cut(box, Place(self.there.at(start), self.there.strides))


_Dim = tuple[int, int, int]  # length, stride here, stride there


def cut(frame: Frame, shape: Sequence[int], here: Place, there: Place) -> list[Cut]:
    """Express a strided copy as boxes of `frame`, whose storage is the one of `here`.

    The copy has `shape`; its element `i` is at `here.at(i)` on this side and at `there.at(i)` on the other. A dimension
    that is not an axis of the frame (a step, a broadcast, half of a split axis) becomes one cut for each index. Raises
    ScatteredError when the copy leaves the frame, or after MAX_CUTS.
    """
    if 0 in shape:
        return []
    dims = [d for d in zip(shape, here.strides, there.strides, strict=True) if d[0] != 1]
    cuts: list[Cut] = []
    _cut(frame, here.offset, there.offset, _merged(dims), cuts)
    return cuts


def _merged(dims: list[_Dim]) -> list[_Dim]:
    """Neighbours that are one dimension on both sides, joined."""
    joined: list[_Dim] = []
    for n, p, q in sorted(dims, key=lambda d: -d[1]):
        if joined and joined[-1][1] == n * p and joined[-1][2] == n * q and p > 0:
            joined[-1] = (joined[-1][0] * n, p, q)
        else:
            joined.append((n, p, q))
    return joined


def _cut(frame: Frame, here: int, there: int, dims: list[_Dim], cuts: list[Cut]) -> None:
    first = frame.index(here)
    placed: dict[int, tuple[int, int]] = {}
    for number, (n, p, q) in enumerate(dims):
        rest = dims[:number] + dims[number + 1 :]
        axis = frame.axes.get(p)
        if axis is None or axis in placed:
            for i in range(n):
                _cut(frame, here + i * p, there + i * q, rest, cuts)
            return
        size = frame.shape[axis]
        if first[axis] + n <= size:
            placed[axis] = (n, q)
        elif first[axis] == 0 and n % size == 0:
            _cut(frame, here, there, [*rest, (n // size, p * size, q * size), (size, p, q)], cuts)
            return
        else:
            head = (size - first[axis]) % size
            full = (n - head) // size * size
            begin = 0
            for length in (head, full, n - head - full):
                if length:
                    _cut(frame, here + begin * p, there + begin * q, [*rest, (length, p, q)], cuts)
                begin += length
            return
    if len(cuts) >= MAX_CUTS:
        raise ScatteredError(f"it falls into more than {MAX_CUTS} boxes")
    stop = tuple(i + placed.get(axis, (1, 0))[0] for axis, i in enumerate(first))
    strides = tuple(placed.get(axis, (1, 0))[1] for axis in range(len(first)))
    cuts.append(Cut(Box(first, stop), Place(there, strides)))
