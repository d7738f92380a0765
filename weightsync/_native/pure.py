"""The native core in numpy and ctypes: slower, equal byte for byte. `_core.pyi` has the contract of each name."""

from __future__ import annotations

import ctypes
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync._native import layout as col
from weightsync._native.pages import exchange, populate
from weightsync._native.scalars import add_halves, cast_bits, digest_at, digest_run

__all__ = ["Program", "exchange", "features", "memory_copy", "populate"]

UInts = npt.NDArray[np.unsignedinteger]
_UNIT_BYTES = 1 << 20
_MAX = 1 << 61
_BITS: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class _Axis:
    count: int
    src: int
    dst: int
    index: int


@dataclass(frozen=True, slots=True)
class _Move:
    row: int
    src_type: int
    dst_type: int
    seed: int
    index: int
    offset: int
    axes: tuple[_Axis, ...]
    elements: int
    src_is_dense: bool
    dst_is_dense: bool


@dataclass(frozen=True, slots=True)
class _Unit:
    """A box of one move: the element to start at on every axis, how many on every axis, and its place in the move."""

    move: _Move
    start: tuple[int, ...]
    shape: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _View:
    __array_interface__: dict[str, object]


class _Stop(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


class Program:
    """A table of strided moves, compiled once and replayed for every version."""

    def __init__(self, moves: npt.NDArray[np.int64]) -> None:
        if not isinstance(moves, np.ndarray) or moves.dtype != np.int64 or moves.ndim != 2:
            raise ValueError("moves: expected an int64 array of two dimensions")
        if moves.shape[1] != col.COLUMNS:
            raise ValueError(f"moves: expected {col.COLUMNS} columns, got {moves.shape[1]}")
        self._moves = [_compile(row, values) for row, values in enumerate(moves.tolist())]
        self._units = [unit for move in self._moves for unit in _split(move)]

    @property
    def moves(self) -> int:
        return len(self._moves)

    @property
    def size_bytes(self) -> int:
        return sum(move.elements * col.ITEM_BYTES[move.dst_type] for move in self._moves)

    @property
    def units(self) -> int:
        return len(self._units)

    def run(
        self,
        src: npt.NDArray[np.uint64],
        dst: npt.NDArray[np.uint64] | None,
        digests: npt.NDArray[np.uint64] | None,
        *,
        threads: int = 1,
        progress: int = 0,
        follow: int = 0,
        generation: int = 0,
        timeout_s: float = 30.0,
        cancel: int = 0,
    ) -> int:
        for name, array in (("src", src), ("dst", dst), ("digests", digests)):
            _require_u64(name, array, len(self._moves))
        if digests is not None and not digests.flags.writeable:
            raise ValueError("digests: the array is read-only")
        if threads < 1:
            raise ValueError(f"threads: expected at least 1, got {threads}")
        if math.isnan(timeout_s):
            raise ValueError("timeout_s: not a number")
        for name, address, alignment in (
            ("progress", progress, 8),
            ("follow", follow, 8),
            ("cancel", cancel, 4),
        ):
            if address % alignment:
                raise ValueError(f"{name}: the address is not aligned")
        sources = src.tolist()
        targets = None if dst is None else dst.tolist()
        sums = [0] * len(self._moves)
        watermarks = self._watermarks(bool(follow), dst is None)
        leader = _Leader(follow, generation, timeout_s, cancel)
        try:
            leader.check()
            for number, unit in enumerate(self._units):
                leader.wait_until(_slot_end(unit))
                row = unit.move.row
                part = _run_unit(unit, sources[row], targets and targets[row], digests is not None)
                sums[row] = add_halves(sums[row], part)
                if progress:
                    ctypes.c_uint64.from_address(progress).value = watermarks[number + 1]
            leader.check()
        except _Stop as stop:
            return stop.status
        if progress and not self._units:
            ctypes.c_uint64.from_address(progress).value = watermarks[-1]
        if digests is not None:
            digests[:] = np.array(sums, np.uint64)
        return col.OK

    def _watermarks(self, slot_is_src: bool, is_digest: bool) -> list[int]:
        """Slot bytes that are done before each unit, and after the last."""
        use_src = slot_is_src or is_digest
        ends = [
            move.offset + move.elements * col.ITEM_BYTES[move.src_type if use_src else move.dst_type]
            for move in self._moves
        ]
        marks = [max(ends, default=0)]
        for unit in reversed(self._units):
            move = unit.move
            is_dense = move.src_is_dense if use_src else move.dst_is_dense
            item = col.ITEM_BYTES[move.src_type if use_src else move.dst_type]
            marks.append(min(marks[-1], move.offset + (unit.first * item if is_dense else 0)))
        return marks[::-1]


class _Leader:
    """Who is ahead of us: the watermark that we follow, and whoever may cancel."""

    def __init__(self, follow: int, generation: int, timeout_s: float, cancel: int) -> None:
        self._head = (ctypes.c_uint64 * 2).from_address(follow) if follow else None
        self._generation = generation
        self._timeout_s = timeout_s
        self._cancel = ctypes.c_uint32.from_address(cancel) if cancel else None

    def check(self) -> None:
        if self._cancel is not None and self._cancel.value:
            raise _Stop(col.CANCELLED)
        if self._head is not None and self._head[0] > self._generation:
            raise _Stop(col.EVICTED)

    def wait_until(self, end: int) -> None:
        seen: int | None = None
        deadline = time.monotonic() + self._timeout_s
        while True:
            self.check()
            mark = self._watermark(end)
            if mark is not None and mark >= end:
                return
            now = time.monotonic()
            if mark != seen:
                seen = mark
                deadline = now + self._timeout_s
            elif now >= deadline:
                raise _Stop(col.TIMEOUT)
            time.sleep(50e-6)

    def _watermark(self, end: int) -> int | None:
        """None while the slot is not open. The generation is read first, so that the watermark is of no older use."""
        if self._head is None:
            return end
        return self._head[1] if self._head[0] >= self._generation else None


def memory_copy(dst: int, src: int, size: int, threads: int = 1) -> None:
    """A plain copy. `threads` is ignored."""
    ctypes.memmove(dst, src, size)


def features() -> dict[str, bool]:
    """No fast paths here."""
    return {"avx2": False}


def _require_u64(name: str, array: npt.NDArray[np.uint64] | None, count: int) -> None:
    if array is None and name != "src":
        return
    if not isinstance(array, np.ndarray) or array.dtype != np.uint64 or array.shape != (count,):
        raise ValueError(f"{name}: expected a uint64 array of length {count}")


def _compile(row: int, values: list[int]) -> _Move:
    src_type, dst_type, seed, index, offset, ndim = values[: col.SHAPE]
    is_cast = src_type in col.FLOATS and dst_type in col.FLOATS
    if src_type not in col.ITEM_BYTES or not (src_type == dst_type or is_cast):
        raise ValueError(f"row {row}: can't move type {src_type} to type {dst_type}")
    if not 0 <= ndim <= col.MAX_NDIM:
        raise ValueError(f"row {row}: expected 0 to {col.MAX_NDIM} dimensions, got {ndim}")
    shape = values[col.SHAPE : col.SHAPE + ndim]
    src = values[col.SRC_STRIDE : col.SRC_STRIDE + ndim]
    dst = values[col.DST_STRIDE : col.DST_STRIDE + ndim]
    steps = values[col.INDEX_STRIDE : col.INDEX_STRIDE + ndim]
    if any(n < 0 for n in shape):
        raise ValueError(f"row {row}: negative shape {shape}")
    if offset < 0 or index < 0:
        raise ValueError(f"row {row}: negative offset {offset} or index {index}")
    elements = math.prod(shape)
    reach = [
        sum(abs(s) * (n - 1) for s, n in zip(side, shape, strict=True) if n) for side in (src, dst, steps)
    ]
    below = sum(s * (n - 1) for s, n in zip(steps, shape, strict=True) if s < 0 and n)
    if math.prod(n or 1 for n in shape) * 8 > _MAX or max(reach) > _MAX or index > _MAX or offset > _MAX:
        raise ValueError(f"row {row}: shape {shape} with these strides, offset and index is too large")
    if elements and index + below < 0:
        raise ValueError(f"row {row}: index strides {steps} reach below index 0")
    axes = _merge([_Axis(*axis) for axis in zip(shape, src, dst, steps, strict=True) if axis[0] != 1])
    return _Move(
        row, src_type, dst_type, seed % 2**64, index, offset, axes, elements,
        _is_dense(shape, src, col.ITEM_BYTES[src_type]), _is_dense(shape, dst, col.ITEM_BYTES[dst_type]),
    )  # fmt: skip


def _is_dense(shape: list[int], strides: list[int], step: int) -> bool:
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != step:
            return False
        step *= n
    return True


def _merge(axes: list[_Axis]) -> tuple[_Axis, ...]:
    """Join neighbours that are one run in the source, in the destination and in the index."""
    merged: list[_Axis] = []
    for axis in axes:
        last = merged[-1] if merged else None
        steps = (axis.src * axis.count, axis.dst * axis.count, axis.index * axis.count)
        if last and (last.src, last.dst, last.index) == steps:
            merged[-1] = _Axis(last.count * axis.count, axis.src, axis.dst, axis.index)
        else:
            merged.append(axis)
    return tuple(merged)


def _split(move: _Move) -> Iterator[_Unit]:
    """Boxes of about a MiB that cover the move in row-major order; single runs are cut where digest blocks end."""
    if not move.elements:
        return
    limit = _UNIT_BYTES // col.ITEM_BYTES[move.dst_type]
    counts = [axis.count for axis in move.axes] or [1]
    cut = len(counts) - 1  # the axis that is cut: all inner axes fit into a unit
    inner = 1
    while cut > 0 and inner * counts[cut] <= limit:
        inner *= counts[cut]
        cut -= 1
    step = max(limit // inner, 1)
    ahead = -move.index % col.BLOCK if move.axes and move.axes[-1].index == 1 and inner == 1 else 0
    bounds = sorted({0, *range(ahead or step, counts[cut], step), counts[cut]})
    first = 0
    for outer in np.ndindex(*counts[:cut]):
        for low, high in itertools.pairwise(bounds):
            shape = (1,) * cut + (high - low, *counts[cut + 1 :])
            last = first + (high - low) * inner
            yield _Unit(move, (*outer, low) + (0,) * (len(counts) - cut - 1), shape, first, last)
            first = last


def _slot_end(unit: _Unit) -> int:
    item = col.ITEM_BYTES[unit.move.src_type]
    return unit.move.offset + item * (unit.last if unit.move.src_is_dense else unit.move.elements)


def _view(address: int, item: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> UInts:
    kind = np.dtype(_BITS[item]).str
    return np.asarray(
        _View({"data": (address, False), "shape": shape, "strides": strides, "typestr": kind, "version": 3})
    )


def _run_unit(unit: _Unit, source: int, target: int | None, with_digest: bool) -> int:
    move, axes = unit.move, unit.move.axes or (_Axis(1, 0, 0, 1),)
    src_start = sum(s * axis.src for s, axis in zip(unit.start, axes, strict=True))
    src_item, dst_item = col.ITEM_BYTES[move.src_type], col.ITEM_BYTES[move.dst_type]
    bits = _view(source + src_start, src_item, unit.shape, tuple(axis.src for axis in axes))
    if move.src_type != move.dst_type:
        bits = cast_bits(bits, move.src_type, move.dst_type)
    elif with_digest and target is not None:
        bits = bits.copy()  # the digest is of what was written, even if the source changes meanwhile
    if target is not None:
        dst_start = sum(s * axis.dst for s, axis in zip(unit.start, axes, strict=True))
        _view(target + dst_start, dst_item, unit.shape, tuple(axis.dst for axis in axes))[...] = bits
    if not with_digest:
        return 0
    index = move.index + sum(s * axis.index for s, axis in zip(unit.start, axes, strict=True))
    steps = tuple(axis.index for axis in axes)
    if len(axes) == 1 and steps[0] == 1:
        return digest_run(bits, move.seed, index)
    return digest_at(bits, move.seed, index, steps)
