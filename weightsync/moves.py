"""Tables of moves in the form that the native core compiles: which box of which tensor goes from where to where."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync._native import layout as col
from weightsync.types import Box, DType

Int64s = npt.NDArray[np.int64]


def seed_of(name: str) -> int:
    """The digest key of a tensor: 8 bytes of BLAKE2b of its name, so that exchanged tensors never match."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class View:
    """One strided view of a box: the tensor's name (or the one it is tied to), its whole shape, the box, byte strides."""

    name: str
    shape: tuple[int, ...]
    box: Box
    strides: tuple[int, ...]


class ViewTable:
    """Views in columns, from which tables of moves between them and slots are made without a loop over moves."""

    def __init__(self, views: Sequence[View]) -> None:
        count = len(views)
        self.seed: Int64s = np.array([seed_of(view.name) for view in views], np.uint64).astype(np.int64)
        self.ndim: Int64s = np.array([len(view.shape) for view in views], np.int64)
        self.start, self.stop, self.strides, self.index_strides = (
            np.zeros((count, col.MAX_NDIM), np.int64) for _ in range(4)
        )
        self.stop[:] = 1
        for row, view in enumerate(views):
            n = len(view.shape)
            self.start[row, :n] = view.box.start
            self.stop[row, :n] = view.box.stop
            self.strides[row, :n] = view.strides
            self.index_strides[row, :n] = contiguous_strides(view.shape, 1)

    def into_slot(
        self, view: Int64s, start: Int64s, stop: Int64s, offset: Int64s, *, source: Sequence[DType],
        wire: Sequence[DType],
    ) -> tuple[Int64s, Int64s]:  # fmt: skip
        """Moves of boxes (global) of `views[view]` to byte `offset` of a slot, row-major: the table, and how many bytes after
        the view's first element each begins. `source`, `wire`: dtype of each view, and of its elements in the slot."""
        table, delta = self._moves(view, start, stop, offset, [dtype.itemsize for dtype in wire])
        codes = [
            (a.raw_code, a.raw_code) if a == b else (a.float_code or 0, b.float_code or 0)
            for a, b in zip(source, wire, strict=True)
        ]
        table[:, [col.SRC_TYPE, col.DST_TYPE]] = np.array(codes, np.int64).reshape(-1, 2)[view]
        return table, delta

    def out_of_slot(
        self, view: Int64s, start: Int64s, stop: Int64s, offset: Int64s, *, wire: Sequence[DType]
    ) -> tuple[Int64s, Int64s]:
        """The reverse: from byte `offset` of a slot to boxes of the views, without a cast."""
        table, delta = self._moves(view, start, stop, offset, [dtype.itemsize for dtype in wire])
        dense = table[:, col.DST_STRIDE : col.DST_STRIDE + col.MAX_NDIM].copy()
        table[:, col.DST_STRIDE : col.DST_STRIDE + col.MAX_NDIM] = table[
            :, col.SRC_STRIDE : col.SRC_STRIDE + col.MAX_NDIM
        ]
        table[:, col.SRC_STRIDE : col.SRC_STRIDE + col.MAX_NDIM] = dense
        table[:, [col.SRC_TYPE, col.DST_TYPE]] = np.array([dtype.raw_code for dtype in wire], np.int64)[view][
            :, None
        ]
        return table, delta

    def _moves(
        self, view: Int64s, start: Int64s, stop: Int64s, offset: Int64s, itemsize: Sequence[int]
    ) -> tuple[Int64s, Int64s]:
        """From the views (strided) to a slot (dense)."""
        width, last = start.shape[1], col.MAX_NDIM
        first, shape = np.zeros((len(view), last), np.int64), np.ones((len(view), last), np.int64)
        first[:, :width], shape[:, :width] = start, stop - start
        is_real = np.arange(last)[None, :] < self.ndim[view][:, None]
        dense = np.ones((len(view), last), np.int64)
        # `shape` is 1 beyond the last real dimension, so the product runs over real ones only
        dense[:, :-1] = np.cumprod(np.maximum(shape, 1)[:, :0:-1], axis=1)[:, ::-1]
        dense *= np.array(itemsize, np.int64)[view][:, None]
        table: Int64s = np.zeros((len(view), col.COLUMNS), np.int64)
        table[:, col.SEED] = self.seed[view]
        table[:, col.INDEX] = (first * self.index_strides[view]).sum(axis=1)
        table[:, col.OFFSET] = offset
        table[:, col.NDIM] = self.ndim[view]
        table[:, col.SHAPE : col.SHAPE + last] = np.where(is_real, shape, 0)
        table[:, col.SRC_STRIDE : col.SRC_STRIDE + last] = self.strides[view]
        table[:, col.DST_STRIDE : col.DST_STRIDE + last] = np.where(is_real, dense, 0)
        table[:, col.INDEX_STRIDE : col.INDEX_STRIDE + last] = self.index_strides[view]
        delta: Int64s = ((first - self.start[view]) * self.strides[view]).sum(axis=1)
        return table, delta


def contiguous_strides(shape: Sequence[int], unit: int) -> tuple[int, ...]:
    """Row-major strides of `shape` in multiples of `unit`."""
    strides: list[int] = []
    step = unit
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
