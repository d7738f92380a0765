"""Matching names, checking plans that a coordinator sent, and cutting them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.moved import elements
from tests.wire.scene import layout_of, rows, whole
from weightsync.errors import LayoutError, ProtocolError
from weightsync.moves import contiguous_strides
from weightsync.types import DTYPES, Box
from weightsync.wire.arrangement import Arrangement
from weightsync.wire.columns import ShardColumns
from weightsync.wire.layout import Boxes, Catalogue, TensorSpec, refuse_overlaps
from weightsync.wire.plan import Matches, Plan, Want, make_plan, match_names, split_moves


def want(
    *names: str, dtype: str = "float32", shape: tuple[int, ...] = (4, 6), box: Box | None = None
) -> Want:
    box = box or Box.whole(shape)
    return Want(names, dtype, shape, box, contiguous_strides(box.shape, DTYPES[dtype].itemsize))


A, B = TensorSpec("a", "float32", (4, 6)), TensorSpec("b", "float32", (4, 6))
AB = Catalogue((A, B), {})


def plan_of(specs: list[TensorSpec], wants: list[Want], aliases: dict[str, str] | None = None) -> Plan:
    """What one rank with whole tensors and one member agree on."""
    arrangement = Arrangement([layout_of(whole(*specs), aliases)], ["here"])
    matches = match_names(arrangement.catalogue, wants)
    number = arrangement.want(matches.boxes, "here")
    arrangement.arrange(keep=False)
    said = arrangement.plan(1, number)
    return make_plan(arrangement.catalogue, wants, matches, said.boxes, said.ranks, said.wants, said.offsets)


def test_moves_are_in_slot_order_whatever_the_order_of_the_wants():
    plan = plan_of([A, B], [want("b"), want("a")])
    assert plan.names == ("a", "b")
    assert plan.wants.tolist() == [1, 0]
    assert plan.size_bytes == 2 * 96


def test_every_disagreement_is_listed_in_one_error():
    catalogue = Catalogue((A, B, TensorSpec("extra", "int8", (2,)), TensorSpec("d", "bfloat16", (4, 6))), {})
    wants = [
        want("a", shape=(4, 5)),
        want("b", dtype="float16"),
        want("missing"),
        want("d", dtype="bfloat16"),
    ]
    with pytest.raises(LayoutError) as caught:
        match_names(catalogue, wants)
    text = str(caught.value)
    assert text.startswith("4 tensors do not match")
    for fragment in ("a: the publisher's shape is [4, 6], here it is [4, 5]", "b: the publisher sends float32",
                     "missing: wanted here", "extra: published, but nothing here takes it"):  # fmt: skip
        assert fragment in text


def test_patterns_allow_what_is_missing_and_ignore_what_is_extra():
    found = match_names(AB, [want("own.x"), want("a")], allow_missing=["own.*"], ignore=["b"])
    assert (found.wants.tolist(), found.tensors.tolist()) == ([1], [0])


def test_tensors_tied_at_the_publisher_serve_two_wants():
    found = match_names(Catalogue((A,), {"head": "a"}), [want("a"), want("head")])
    assert (found.wants.tolist(), found.tensors.tolist()) == ([0, 1], [0, 0])
    plan = plan_of([A], [want("a"), want("head")], {"head": "a"})
    assert plan.offsets.tolist() == [0, 0] and plan.wants.tolist() == [0, 1]


def test_tensors_tied_here_need_only_one_of_their_names():
    assert match_names(Catalogue((A,), {}), [want("a", "head")]).tensors.tolist() == [0]


def test_tensors_tied_here_but_sent_separately_are_an_error():
    with pytest.raises(LayoutError, match=r"a = b: tied here, but the publisher sends a, b separately"):
        match_names(AB, [want("a", "b")])


def test_overlapping_boxes_are_refused():
    held = layout_of([rows(0, 3, A), rows(2, 4, A)])
    with pytest.raises(LayoutError, match=r"a: boxes \[0:3, 0:6\] and \[2:4, 0:6\] overlap"):
        refuse_overlaps(held.catalogue, held.boxes.columns(held.catalogue))


@pytest.mark.parametrize(
    "spec",
    [TensorSpec("a", "float128", (1,)), TensorSpec("a", "float32", (-1,)), TensorSpec("a", "int8", (1,) * 9),
     TensorSpec("a", "int8", (2**31, 2**31))],
)  # fmt: skip
def test_a_tensor_that_can_not_be_is_refused(spec):
    with pytest.raises(ProtocolError):
        Catalogue((spec,), {}).validate()


def test_a_name_that_comes_twice_is_refused():
    with pytest.raises(ProtocolError, match="twice"):
        Catalogue((A, A), {}).validate()


def raw(tensor: int, start: list[int], stop: list[int]) -> Boxes:
    columns = np.array([start], np.int64), np.array([stop], np.int64)
    return Boxes.pack(ShardColumns(np.array([0, 1]), np.array([tensor], np.int32), *columns))


GOOD = raw(0, [0, 0], [4, 6])


@pytest.mark.parametrize(
    ("boxes", "text"),
    [
        (raw(2, [0, 0], [4, 6]), "not one of 2"),
        (raw(-1, [0, 0], [4, 6]), "not one of 2"),
        (raw(0, [0, 0], [4, 7]), "outside"),
        (raw(0, [-1, 0], [4, 6]), "outside"),
        (raw(0, [3, 0], [2, 6]), "outside"),
        (raw(0, [0], [4]), "1 dimensions, the catalogue has 2"),
        (Boxes(-2, GOOD.tensor, GOOD.start, GOOD.stop), "differ in length"),
        (Boxes(0, b"", b"", b""), "0 dimensions, the catalogue has 2"),
        (Boxes(2, GOOD.tensor, GOOD.start, GOOD.stop[:-8]), "differ in length"),
        (Boxes(2, GOOD.tensor, GOOD.start[:-1], GOOD.stop), "differ in length"),
        (Boxes(2, GOOD.tensor + b"\0", GOOD.start, GOOD.stop), "differ in length"),
    ],
)
def test_boxes_that_lie_are_refused(boxes, text):
    with pytest.raises(ProtocolError, match=text):
        boxes.columns(AB)


@dataclass(frozen=True)
class Said:
    """A plan as a coordinator says it, in columns that a test can spoil."""

    tensor: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    rank: np.ndarray
    want: np.ndarray
    offset: np.ndarray

    def make(self, catalogue: Catalogue, wants: list[Want], matches: Matches) -> Plan:
        columns = np.array([0, len(self.tensor)]), self.tensor.astype(np.int32), self.start, self.stop
        return make_plan(
            catalogue, wants, matches, Boxes.pack(ShardColumns(*columns)), self.rank.astype("<u4").tobytes(),
            self.want.astype("<u4").tobytes(), self.offset.astype("<u8").tobytes(),
        )  # fmt: skip

    def at(self, rows: list[int]) -> Said:
        return Said(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


C = TensorSpec("c", "int16", (5,))
CATALOGUE = Catalogue((A, B, C), {})
WANTS = [
    want("b"),
    want("c", dtype="int16", shape=(5,), box=Box((1,), (4,))),
    want("a", box=Box((1, 0), (4, 3))),
    want("a", box=Box((0, 0), (2, 6))),
]
MATCHES = match_names(CATALOGUE, WANTS)
VALID = Said(
    tensor=np.array([1, 0, 2, 0, 1, 0]),
    start=np.array([[0, 0], [1, 0], [1, 0], [0, 0], [0, 3], [3, 0]]),
    stop=np.array([[4, 3], [3, 3], [4, 1], [2, 6], [4, 6], [4, 3]]),
    rank=np.array([0, 0, 0, 1, 1, 1]),
    want=np.array([0, 2, 1, 3, 0, 2]),
    offset=np.array([0, 64, 128, 0, 64, 128]),
)


def fills(said: Said) -> bool:
    """Whether every wanted element is written exactly once and nothing else, looked at one by one."""
    counts = [np.zeros(w.shape, int) for w in WANTS]
    for row in range(len(said.tensor)):
        number, tensor = int(said.want[row]), int(said.tensor[row])
        if not 0 <= number < len(WANTS) or tensor != MATCHES.tensors[number]:
            return False
        ndim = len(WANTS[number].shape)
        start, stop = said.start[row].tolist(), said.stop[row].tolist()
        if any(
            a < 0 or b < a or b > n for a, b, n in zip(start, stop, [*WANTS[number].shape, 1], strict=False)
        ):
            return False
        region = tuple(slice(a, b) for a, b in zip(start[:ndim], stop[:ndim], strict=True))
        inside = all(
            a >= low and b <= high
            for a, b, low, high in zip(
                start, stop, WANTS[number].box.start, WANTS[number].box.stop, strict=False
            )
        )
        if not inside and counts[number][region].size:
            return False
        counts[number][region] += 1
    wanted = [np.zeros(w.shape, int) for w in WANTS]
    for region, w in zip(wanted, WANTS, strict=True):
        region[tuple(slice(a, b) for a, b in zip(w.box.start, w.box.stop, strict=True))] = 1
    return all(np.array_equal(a, b) for a, b in zip(counts, wanted, strict=True))


def written(plan: Plan) -> list[tuple[int, int, int]]:
    """(want, global index, byte of the want's memory) of each element, sorted."""
    found = []
    for row in range(len(plan.table)):
        some = slice(row, row + 1)
        found += [
            (int(plan.wants[row]), index, place)
            for index, _, place in elements(plan.table[some], plan.offsets[some], plan.deltas[some])
        ]
    return sorted(found)


def test_a_plan_that_fills_is_taken():
    assert fills(VALID)
    plan = VALID.make(CATALOGUE, WANTS, MATCHES)
    assert plan.size_bytes == 96 + 6 + 36 + 48
    expected = []
    for number, w in enumerate(WANTS):
        index = np.arange(np.prod(w.shape)).reshape(w.shape)
        box = tuple(slice(a, b) for a, b in zip(w.box.start, w.box.stop, strict=True))
        flat = index[box].reshape(-1).tolist()
        expected += [(number, index, at * DTYPES[w.dtype].itemsize) for at, index in enumerate(flat)]
    assert written(plan) == sorted(expected)


@pytest.mark.parametrize(
    ("spoiled", "text"),
    [
        (VALID.at([0, 1, 2, 3, 4]), "does not fill"),
        (VALID.at([0, 1, 2, 3, 4, 5, 5]), "does not fill"),
        (replace(VALID, start=VALID.start + (np.arange(6) == 4)[:, None] * [0, -1],
                 stop=VALID.stop + (np.arange(6) == 4)[:, None] * [0, -1]), "fills a box twice"),
        (replace(VALID, start=VALID.start + (np.arange(6) == 5)[:, None] * [-3, 0],
                 stop=VALID.stop + (np.arange(6) == 5)[:, None] * [-3, 0]), "does not fill"),
        (replace(VALID, tensor=np.array([1, 0, 2, 1, 1, 0])), "one tensor to another"),
        (replace(VALID, want=np.array([0, 3, 1, 3, 0, 2])), "does not fill"),
        (replace(VALID, want=np.array([0, 2, 1, 4, 0, 2])), "not in order"),
        (replace(VALID, rank=np.array([0, 0, 1, 0, 1, 1])), "not in order"),
        (replace(VALID, offset=VALID.offset - 64), "not in order"),
    ],
    ids=["a gap", "a move that comes twice", "a move over another", "outside of the box", "another tensor",
         "another box", "no such box", "ranks that jump", "before the slot"],
)  # fmt: skip
def test_a_plan_that_does_not_fill_is_refused(spoiled, text):
    assert not fills(spoiled) or text == "not in order"
    with pytest.raises(ProtocolError, match=text):
        spoiled.make(CATALOGUE, WANTS, MATCHES)


def test_columns_of_a_plan_that_differ_in_length_are_refused():
    boxes = Boxes.pack(ShardColumns(np.array([0, 6]), VALID.tensor.astype(np.int32), VALID.start, VALID.stop))
    columns = [VALID.rank.astype("<u4"), VALID.want.astype("<u4"), VALID.offset.astype("<u8")]
    for short in range(3):
        with pytest.raises(ProtocolError, match="differ in length"):
            make_plan(
                CATALOGUE, WANTS, MATCHES, boxes,
                *(column.tobytes()[: -1 if n == short else None] for n, column in enumerate(columns)),
            )  # fmt: skip


@st.composite
def corrupted(draw: st.DrawFn) -> Said:
    """The valid plan with up to four changes; some cancel each other out, or change nothing that counts."""
    said = VALID
    for _ in range(draw(st.integers(1, 4))):
        count = len(said.tensor)
        row = draw(st.integers(0, max(0, count - 1)))
        what = draw(st.sampled_from(["number", "drop", "double", "swap", "split", "shift"]))
        if not count:
            break
        if what == "number":
            name = draw(st.sampled_from(["tensor", "rank", "want", "start", "stop"]))
            column = getattr(said, name).copy()
            if column.ndim == 2:
                column[row, draw(st.integers(0, 1))] = draw(st.integers(-1, 7))
            else:
                column[row] = draw(st.integers(0, 5))
            said = replace(said, **{name: column})
        elif what == "drop":
            said = said.at([n for n in range(count) if n != row])
        elif what == "double":
            said = said.at([*range(row + 1), *range(row, count)])
        elif what == "swap":
            other = draw(st.integers(0, count - 1))
            start, stop = said.start.copy(), said.stop.copy()
            start[[row, other]], stop[[row, other]] = start[[other, row]], stop[[other, row]]
            said = replace(said, start=start, stop=stop)
        elif what == "split":
            axis = draw(st.integers(0, 1))
            low, high = sorted((int(said.start[row, axis]), int(said.stop[row, axis])))
            cut = draw(st.integers(low, high))
            said = said.at([*range(row + 1), *range(row, count)])
            said.stop[row, axis] = said.start[row + 1, axis] = cut
        else:
            axis, step = draw(st.integers(0, 1)), draw(st.sampled_from([-1, 1]))
            start, stop = said.start.copy(), said.stop.copy()
            start[row, axis] += step
            stop[row, axis] += step
            said = replace(said, start=start, stop=stop)
    said = replace(said, start=said.start.copy(), stop=said.stop.copy())
    is_flat = said.tensor == 2
    said.start[is_flat, 1], said.stop[is_flat, 1] = 0, 1
    return said


@settings(max_examples=400, deadline=None)
@given(said=corrupted())
def test_a_corrupted_plan_is_refused_or_equal_in_effect(said):
    try:
        plan = said.make(CATALOGUE, WANTS, MATCHES)
    except ProtocolError:
        has_empty_boxes = (said.start == said.stop).any()  # these may lie where they do nothing
        is_ordered = (np.diff(said.rank) >= 0).all()
        assert not (fills(said) and is_ordered) or has_empty_boxes, "nothing was wrong with it"
        return
    assert fills(said)
    assert written(plan) == written(VALID.make(CATALOGUE, WANTS, MATCHES))


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    max_bytes=st.integers(4, 200),
    transposed=st.booleans(),
)
def test_cutting_moves_keeps_every_element_in_its_place(shape, max_bytes, transposed):
    strides = contiguous_strides(shape, 4)
    if transposed:
        strides = tuple(reversed(contiguous_strides(shape[::-1], 4)))
    plan = plan_of(
        [TensorSpec("t", "float32", shape)], [Want(("t",), "float32", shape, Box.whole(shape), strides)]
    )
    split = split_moves(plan, max_bytes)
    assert (split.sizes <= max(max_bytes, 4)).all()
    whole_moves = elements(plan.table, plan.offsets, np.zeros(1, np.int64))
    parts = elements(split.table, split.offsets, split.deltas)
    assert sorted(parts) == sorted(whole_moves)
