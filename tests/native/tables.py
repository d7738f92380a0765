"""Move tables for the tests: boxes of numpy arrays, and runs of a program on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from hypothesis import strategies as st

from weightsync._native import layout as col

BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
RAW = {1: col.RAW8, 2: col.RAW16, 4: col.RAW32, 8: col.RAW64}
SEED = 0xFEDCBA9876543210


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def row_of(
    src: np.ndarray, dst: np.ndarray | None = None, *, src_type: int | None = None, dst_type: int | None = None,
    seed: int = SEED, index: int = 0, steps: Sequence[int] | None = None, offset: int = 0,
) -> np.ndarray:  # fmt: skip
    """One move from `src` to `dst`, by default a whole tensor of that shape, bits as they are."""
    src_type = src_type or RAW[src.itemsize]
    row = np.zeros(col.COLUMNS, np.int64)
    row[col.SRC_TYPE], row[col.DST_TYPE] = src_type, dst_type or src_type
    row[col.SEED] = np.uint64(seed).astype(np.int64)
    row[col.INDEX], row[col.OFFSET], row[col.NDIM] = index, offset, src.ndim
    row[col.SHAPE :][: src.ndim] = src.shape
    row[col.SRC_STRIDE :][: src.ndim] = src.strides
    row[col.DST_STRIDE :][: src.ndim] = dst.strides if dst is not None else src.strides
    row[col.INDEX_STRIDE :][: src.ndim] = steps if steps is not None else steps_of(src.shape)
    return row


def steps_of(shape: Sequence[int]) -> list[int]:
    """Row-major strides in elements."""
    steps, step = [], 1
    for count in reversed(shape):
        steps.append(step)
        step *= count
    return steps[::-1]


def digest_of(core: ModuleType, array: np.ndarray, **row: Any) -> int:
    """The digest of an array's bits."""
    digests = u64(0)
    assert core.Program(row_of(array, **row)[None]).run(u64(array.ctypes.data), None, digests) == col.OK
    return int(digests[0])


def add(*digests: int) -> int:
    """The digest of a tensor from those of its parts: each half mod 2^32."""
    low = sum(d & 0xFFFFFFFF for d in digests) % 2**32
    high = sum(d >> 32 for d in digests) % 2**32
    return high << 32 | low


@dataclass(frozen=True)
class Case:
    """A move from a box of random bits to a box of zeros, each strided in its own way."""

    src_type: int
    dst_type: int
    src: np.ndarray
    dst: np.ndarray
    index: int
    steps: tuple[int, ...]

    @property
    def row(self) -> np.ndarray:
        return row_of(
            self.src, self.dst, src_type=self.src_type, dst_type=self.dst_type, index=self.index, steps=self.steps
        )  # fmt: skip


def _strided(draw: st.DrawFn, shape: tuple[int, ...], item: int) -> np.ndarray:
    """A view of `shape` into zeros: axes permuted, padded and reversed; perhaps not aligned."""
    order = draw(st.permutations(range(len(shape))))
    padded = [shape[axis] + draw(st.sampled_from([0, 0, 0, 1, 5])) for axis in order]
    shift = draw(st.sampled_from([0, 0, item, 1, 30]))
    size = int(np.prod(padded, dtype=np.int64)) * item
    base: Any = np.zeros(size + shift, np.uint8)[shift:].view(BITS[item]).reshape(padded)
    view = base.transpose(np.argsort(order).tolist())
    view = view[(..., *(slice(count) for count in shape))]
    return view[(..., *(slice(None, None, draw(st.sampled_from([1, 1, 1, -1]))) for _ in shape))]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ndim = draw(st.integers(0, 4))
    longest = [1, 20000, 200, 40, 12][ndim]
    shape = tuple(draw(st.lists(st.integers(0, longest), min_size=ndim, max_size=ndim)))
    src_type = draw(st.sampled_from(sorted(col.ITEM_BYTES)))
    others = col.FLOATS if src_type in col.FLOATS else {src_type}
    dst_type = draw(st.sampled_from(sorted(others)))
    src = _strided(draw, shape, col.ITEM_BYTES[src_type])
    dst = _strided(draw, shape, col.ITEM_BYTES[dst_type])
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    src[...] = random.integers(0, 2 ** (8 * src.itemsize) - 1, shape, src.dtype, endpoint=True)
    step, steps = draw(st.sampled_from([1, 1, 1, 3])), []
    for count in reversed(shape):
        steps.append(step)
        step *= max(count, 1) + draw(st.sampled_from([0, 0, 7, 4096]))
    return Case(src_type, dst_type, src, dst, draw(st.integers(0, 9000)), tuple(reversed(steps)))
