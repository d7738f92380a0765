"""Tables of moves between views and slots, next to a loop over elements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.moved import elements
from weightsync import _native
from weightsync._native import layout as col
from weightsync.moves import View, ViewTable, contiguous_strides, seed_of
from weightsync.types import DTYPES, Box, DType

NAMES = ("int8", "bfloat16", "float32", "float64", "int64")


@dataclass(frozen=True)
class Case:
    """Views of tensors, and moves of boxes inside them to or from a slot."""

    views: list[View]
    dtypes: list[DType]
    numbers: np.ndarray
    boxes: list[Box]
    offsets: np.ndarray
    width: int

    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """The boxes, padded with 0:1."""
        start = np.zeros((len(self.boxes), self.width), np.int64)
        stop = np.ones((len(self.boxes), self.width), np.int64)
        for row, box in enumerate(self.boxes):
            start[row, : len(box.start)], stop[row, : len(box.stop)] = box.start, box.stop
        return start, stop

    def naive(self, row: int) -> list[tuple[int, int, int]]:
        """For each element of a move: global index, byte in the view, byte in the slot."""
        view, box = self.views[int(self.numbers[row])], self.boxes[row]
        item = self.dtypes[int(self.numbers[row])].itemsize
        found = []
        for at, place in enumerate(np.ndindex(*box.shape)):
            point = [p + a for p, a in zip(place, box.start, strict=True)]
            index = sum(p * n for p, n in zip(point, contiguous_strides(view.shape, 1), strict=True))
            inside = sum((p - a) * n for p, a, n in zip(point, view.box.start, view.strides, strict=True))
            found.append((index, inside, int(self.offsets[row]) + at * item))
        return found


def some_box(draw: st.DrawFn, start: list[int], stop: list[int]) -> Box:
    ends = [
        sorted((draw(st.integers(a, b)), draw(st.integers(a, b)))) for a, b in zip(start, stop, strict=True)
    ]
    return Box(tuple(low for low, _ in ends), tuple(high for _, high in ends))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    views, dtypes = [], []
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 5), max_size=4))
        box = some_box(draw, [0] * len(shape), shape)
        dtype = DTYPES[draw(st.sampled_from(NAMES))]
        order = draw(st.permutations(range(len(shape))))
        dense = contiguous_strides(
            [box.shape[axis] + draw(st.integers(0, 2)) for axis in order], dtype.itemsize
        )
        strides = tuple(dense[order.index(axis)] for axis in range(len(shape)))
        views.append(View(f"t{number}", tuple(shape), box, strides))
        dtypes.append(dtype)
    numbers = draw(st.lists(st.integers(0, len(views) - 1), max_size=6))
    boxes = [some_box(draw, list(views[n].box.start), list(views[n].box.stop)) for n in numbers]
    sizes = [-(-box.size * dtypes[n].itemsize // 64) * 64 for n, box in zip(numbers, boxes, strict=True)]
    offsets = np.cumsum([64 * draw(st.integers(0, 2)), *sizes])[:-1].astype(np.int64)
    width = max(len(view.shape) for view in views)
    return Case(
        views, dtypes, np.array(numbers, np.int64), boxes, offsets, max(1, width) + draw(st.integers(0, 1))
    )


@settings(deadline=None)
@given(case=cases())
def test_every_element_of_every_move_goes_where_a_loop_would_put_it(case):
    start, stop = case.columns()
    table = ViewTable(case.views)
    into, after = table.into_slot(
        case.numbers, start, stop, case.offsets, source=case.dtypes, wire=case.dtypes
    )
    out, back = table.out_of_slot(case.numbers, start, stop, case.offsets, wire=case.dtypes)
    for row, number in enumerate(case.numbers.tolist()):
        naive, one = case.naive(row), slice(row, row + 1)
        assert elements(into[one], after[one], case.offsets[one]) == naive
        assert elements(out[one], case.offsets[one], back[one]) == [(i, s, v) for i, v, s in naive]
        for made in (into, out):
            assert made[row, col.SEED] == np.uint64(seed_of(case.views[number].name)).astype(np.int64)
            assert made[row, col.OFFSET] == case.offsets[row]
            assert made[row, col.SRC_TYPE] == made[row, col.DST_TYPE] == case.dtypes[number].raw_code


@settings(deadline=None)
@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_what_goes_into_a_slot_comes_out_of_it_with_the_same_digests(case, seed):
    start, stop = case.columns()
    table = ViewTable(case.views)
    random = np.random.default_rng(seed)
    spans = [
        sum((n - 1) * step for n, step in zip(view.box.shape, view.strides, strict=True) if n)
        + dtype.itemsize
        for view, dtype in zip(case.views, case.dtypes, strict=True)
    ]
    sources = [random.integers(0, 256, span, np.uint8) for span in spans]
    targets = [np.zeros(span, np.uint8) for span in spans]
    slot = np.zeros(int(case.offsets.max(initial=0)) + 64 * 64 * 8, np.uint8)
    in_slot = case.offsets.astype(np.uint64) + np.uint64(slot.ctypes.data)

    def places(arrays, deltas):
        base = np.array([array.ctypes.data for array in arrays], np.uint64)
        return base[case.numbers] + deltas.astype(np.uint64)

    digests = np.zeros((2, len(case.numbers)), np.uint64)
    into, deltas = table.into_slot(
        case.numbers, start, stop, case.offsets, source=case.dtypes, wire=case.dtypes
    )
    assert _native.Program(into).run(places(sources, deltas), in_slot, digests[0]) == col.OK
    out, deltas = table.out_of_slot(case.numbers, start, stop, case.offsets, wire=case.dtypes)
    assert _native.Program(out).run(in_slot, places(targets, deltas), digests[1]) == col.OK
    assert np.array_equal(digests[0], digests[1])
    for row, number in enumerate(case.numbers.tolist()):
        for _, at, _ in case.naive(row):
            some = slice(at, at + case.dtypes[number].itemsize)
            assert np.array_equal(targets[number][some], sources[number][some])


def test_a_cast_is_told_by_the_codes_of_both_types_and_the_slot_has_the_wire_s_strides():
    wide, short = DTYPES["float32"], DTYPES["bfloat16"]
    views = [View("w", (2, 3), Box.whole((2, 3)), (12, 4)), View("n", (3,), Box.whole((3,)), (8,))]
    int64 = DTYPES["int64"]
    table, deltas = ViewTable(views).into_slot(
        np.array([1, 0]), np.array([[1, 0], [0, 1]]), np.array([[3, 1], [2, 3]]), np.array([0, 64]),
        source=[wide, int64], wire=[short, int64],
    )  # fmt: skip
    assert table[:, [col.SRC_TYPE, col.DST_TYPE]].tolist() == [[col.RAW64, col.RAW64], [col.F32, col.BF16]]
    assert deltas.tolist() == [8, 4]
    assert table[1, col.SRC_STRIDE :][:2].tolist() == [12, 4]
    assert table[1, col.DST_STRIDE :][:2].tolist() == [4, 2]


def test_the_digest_key_of_a_tensor_is_that_of_its_name():
    assert seed_of("w") == 0x20925082A2286B9E
