"""Matching names, making plans, and cutting them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync._native import layout as col
from weightsync.errors import LayoutError, ProtocolError
from weightsync.moves import contiguous_strides
from weightsync.types import DTYPES, Box
from weightsync.wire.layout import Boxes, Catalogue, TensorSpec, refuse_overlaps
from weightsync.wire.plan import Plan, Want, make_plan, match_names, split_moves


def catalogue_of(*specs: TensorSpec, aliases: dict[str, str] | None = None) -> Catalogue:
    return Catalogue(specs, aliases or {})


def want(*names: str, dtype: str = "float32", shape: tuple[int, ...] = (4, 6)) -> Want:
    return Want(names, dtype, shape, Box.whole(shape), contiguous_strides(shape, DTYPES[dtype].itemsize))


def whole_plan(catalogue: Catalogue, wants: list[Want], pieces: list[tuple[int, Box]] | None = None) -> Plan:
    """A plan that reads these boxes, by default each want at once, one after the other, from rank 0."""
    matches = match_names(catalogue, wants)
    boxes = pieces or [(number, wants[w].box) for number, w in enumerate(matches.wants.tolist())]
    reads = Boxes.of(((int(matches.tensors[n]), box) for n, box in boxes), catalogue.width)
    offsets = np.arange(len(boxes), dtype="<u8") * np.uint64(4096)
    numbers = np.array([n for n, _ in boxes], "<u4")
    return make_plan(
        catalogue, wants, matches, reads, bytes(4 * len(boxes)), numbers.tobytes(), offsets.tobytes()
    )


A, B = TensorSpec("a", "float32", (4, 6)), TensorSpec("b", "float32", (4, 6))


def test_every_disagreement_is_listed_in_one_error():
    catalogue = catalogue_of(A, B, TensorSpec("extra", "int8", (2,)), TensorSpec("d", "bfloat16", (4, 6)))
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
    found = match_names(catalogue_of(A, B), [want("a"), want("own.x")], allow_missing=["own.*"], ignore=["b"])
    assert found.wants.tolist() == [0]


def test_tensors_tied_at_the_publisher_serve_two_wants():
    found = match_names(catalogue_of(A, aliases={"head": "a"}), [want("a"), want("head")])
    assert found.tensors.tolist() == [0, 0]


def test_tensors_tied_here_need_only_one_of_their_names():
    assert match_names(catalogue_of(A), [want("a", "head")]).tensors.tolist() == [0]


def test_tensors_tied_here_but_sent_separately_are_an_error():
    with pytest.raises(LayoutError, match=r"a = b: tied here, but the publisher sends a, b separately"):
        match_names(catalogue_of(A, B), [want("a", "b")])


def test_overlapping_boxes_are_refused():
    catalogue = catalogue_of(A)
    boxes = Boxes.of([(0, Box((0, 0), (3, 6))), (0, Box((2, 0), (4, 6)))], 2)
    with pytest.raises(LayoutError, match="overlap"):
        refuse_overlaps(catalogue, boxes.columns(catalogue))


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, Box((0, 0), (3, 6)))],
        [(0, Box((0, 0), (4, 6))), (0, Box((0, 0), (1, 6)))],
        [(0, Box((0, 0), (2, 6))), (0, Box((0, 0), (2, 6)))],
        [(0, Box((0, 0), (2, 6))), (0, Box((1, 0), (3, 6)))],
    ],
)
def test_a_plan_that_does_not_fill_each_element_once_is_refused(pieces):
    with pytest.raises(ProtocolError):
        whole_plan(catalogue_of(A), [want("a")], pieces)


@pytest.mark.parametrize(
    "catalogue",
    [
        Catalogue((TensorSpec("a", "float128", (1,)),), {}),
        Catalogue((TensorSpec("a", "float32", (-1,)),), {}),
        Catalogue((A, A), {}),
    ],
)
def test_a_catalogue_that_lies_is_refused(catalogue):
    with pytest.raises(ProtocolError):
        catalogue.validate()


@pytest.mark.parametrize(("tensor", "stop"), [(1, (4, 6)), (0, (4, 7))])
def test_boxes_that_lie_outside_are_refused(tensor, stop):
    with pytest.raises(ProtocolError):
        Boxes.of([(tensor, Box((0, 0), stop))], 2).columns(catalogue_of(A))


def elements(table: np.ndarray, offsets: np.ndarray, targets: np.ndarray) -> dict[int, tuple[int, int]]:
    """For each element by global index: its byte in the slot, its byte at the destination."""
    found: dict[int, tuple[int, int]] = {}
    for row, offset, target in zip(table, offsets, targets, strict=True):
        count = int(row[col.NDIM])
        grid = np.indices(row[col.SHAPE : col.SHAPE + count]).reshape(count, -1)
        at = {c: (row[c : c + count] @ grid) for c in (col.SRC_STRIDE, col.DST_STRIDE, col.INDEX_STRIDE)}
        for s, d, i in zip(at[col.SRC_STRIDE], at[col.DST_STRIDE], at[col.INDEX_STRIDE], strict=True):
            key = int(i + row[col.INDEX])
            assert key not in found
            found[key] = (int(s + offset), int(d + target))
    return found


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    max_bytes=st.integers(4, 200),
    transposed=st.booleans(),
)
def test_cutting_moves_keeps_every_element_in_its_place(shape, max_bytes, transposed):
    catalogue = catalogue_of(TensorSpec("t", "float32", shape))
    strides = contiguous_strides(shape, 4)
    if transposed:
        strides = tuple(reversed(contiguous_strides(shape[::-1], 4)))
    plan = whole_plan(catalogue, [Want(("t",), "float32", shape, Box.whole(shape), strides)])
    split = split_moves(plan, max_bytes)
    assert (split.sizes <= max(max_bytes, 4)).all()
    whole = elements(plan.table, plan.offsets, np.zeros(1, np.int64))
    assert elements(split.table, split.offsets, split.deltas) == whole
