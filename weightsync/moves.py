"""Tables of moves in the form that the native core compiles: which box of which tensor goes from where to where."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weightsync._native import layout as col
from weightsync.types import Box, DType

Int64s = npt.NDArray[np.int64]


def seed_of(name: str) -> int:
    """The digest key of a tensor: 8 bytes of BLAKE2b of its name, so that exchanged tensors never match."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


class MoveRows:
    """A table of moves under construction, in the form that the native core compiles."""

    def __init__(self, count: int) -> None:
        self.table: Int64s = np.zeros((count, col.COLUMNS), np.int64)

    def fill(
        self, row: int, src: DType, dst: DType, name: str, shape: tuple[int, ...], box: Box, offset: int, *,
        src_strides: tuple[int, ...], dst_strides: tuple[int, ...],
    ) -> None:  # fmt: skip
        """Write one move of `box` of the tensor `name`; strides in bytes, `offset` is the box's place in the slot."""
        entry = self.table[row]
        if src == dst:
            entry[col.SRC_TYPE] = entry[col.DST_TYPE] = src.raw_code
        else:
            entry[col.SRC_TYPE], entry[col.DST_TYPE] = src.float_code or 0, dst.float_code or 0
        strides = contiguous_strides(shape, 1)
        entry[col.SEED] = np.uint64(seed_of(name)).astype(np.int64)
        entry[col.INDEX] = sum(a * s for a, s in zip(box.start, strides, strict=True))
        entry[col.OFFSET] = offset
        count = len(shape)
        entry[col.NDIM] = count
        entry[col.SHAPE : col.SHAPE + count] = box.shape
        entry[col.SRC_STRIDE : col.SRC_STRIDE + count] = src_strides
        entry[col.DST_STRIDE : col.DST_STRIDE + count] = dst_strides
        entry[col.INDEX_STRIDE : col.INDEX_STRIDE + count] = strides


def contiguous_strides(shape: Sequence[int], unit: int) -> tuple[int, ...]:
    """Row-major strides of `shape` in multiples of `unit`."""
    strides: list[int] = []
    step = unit
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
