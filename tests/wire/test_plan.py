"""Matching layouts, and cutting plans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync._native import layout as col
from weightsync.errors import LayoutError, ProtocolError
from weightsync.moves import contiguous_strides
from weightsync.types import DTYPES, Box
from weightsync.wire.layout import Layout, ShardSpec, TensorSpec, lay_out
from weightsync.wire.plan import Want, plan_moves, split_moves


def layout_of(*specs: TensorSpec, aliases: dict[str, str] | None = None) -> Layout:
    return lay_out(specs, [(n, Box.whole(s.shape)) for n, s in enumerate(specs)], aliases or {})


def want(*names: str, dtype: str = "float32", shape: tuple[int, ...] = (4, 6)) -> Want:
    return Want(names, dtype, shape, Box.whole(shape), contiguous_strides(shape, DTYPES[dtype].itemsize))


A, B = TensorSpec("a", "float32", (4, 6)), TensorSpec("b", "float32", (4, 6))


def test_moves_are_in_slot_order_whatever_the_order_of_the_wants():
    plan = plan_moves(layout_of(A, B), [want("b"), want("a")])
    assert plan.names == ("a", "b")
    assert plan.wants.tolist() == [1, 0]
    assert plan.size_bytes == 2 * 96


def test_every_disagreement_is_listed_in_one_error():
    layout = layout_of(A, B, TensorSpec("extra", "int8", (2,)), TensorSpec("d", "bfloat16", (4, 6)))
    wants = [
        want("a", shape=(4, 5)),
        want("b", dtype="float16"),
        want("missing"),
        want("d", dtype="bfloat16"),
    ]
    with pytest.raises(LayoutError) as caught:
        plan_moves(layout, wants)
    text = str(caught.value)
    assert text.startswith("4 tensors do not match")
    for fragment in ("a: the publisher's shape is [4, 6], here it is [4, 5]", "b: the publisher sends float32",
                     "missing: wanted here", "extra: published, but nothing here takes it"):  # fmt: skip
        assert fragment in text


def test_patterns_allow_what_is_missing_and_ignore_what_is_extra():
    plan = plan_moves(layout_of(A, B), [want("a"), want("own.x")], allow_missing=["own.*"], ignore=["b"])
    assert plan.names == ("a",)


def test_tensors_tied_at_the_publisher_serve_two_wants():
    plan = plan_moves(layout_of(A, aliases={"head": "a"}), [want("a"), want("head")])
    assert plan.shards.tolist() == [0, 0]


def test_tensors_tied_here_need_only_one_of_their_names():
    assert plan_moves(layout_of(A), [want("a", "head")]).names == ("a",)


def test_tensors_tied_here_but_sent_separately_are_an_error():
    with pytest.raises(LayoutError, match=r"a = b: tied here, but the publisher sends a, b separately"):
        plan_moves(layout_of(A, B), [want("a", "b")])


def test_overlapping_boxes_are_refused():
    with pytest.raises(LayoutError, match="overlap"):
        lay_out([A], [(0, Box((0, 0), (3, 6))), (0, Box((2, 0), (4, 6)))], {})


@pytest.mark.parametrize(
    "layout",
    [
        Layout((TensorSpec("a", "float128", (1,)),), (), {}, 64),
        Layout((TensorSpec("a", "float32", (-1,)),), (), {}, 64),
        Layout((A,), (ShardSpec(1, (0, 0), (4, 6), 0),), {}, 128),
        Layout((A,), (ShardSpec(0, (0, 0), (4, 7), 0),), {}, 128),
        Layout((A,), (ShardSpec(0, (0, 0), (4, 6), 64),), {}, 128),
        Layout((A,), (ShardSpec(0, (0,), (4,), 0),), {}, 128),
    ],
)
def test_a_layout_that_lies_is_refused(layout):
    with pytest.raises(ProtocolError):
        layout.validate()


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
    layout = layout_of(TensorSpec("t", "float32", shape))
    strides = contiguous_strides(shape, 4)
    if transposed:
        strides = tuple(reversed(contiguous_strides(shape[::-1], 4)))
    plan = plan_moves(layout, [Want(("t",), "float32", shape, Box.whole(shape), strides)])
    split = split_moves(plan, max_bytes)
    assert (split.sizes <= max(max_bytes, 4)).all()
    whole = elements(plan.table, plan.offsets, np.zeros(1, np.int64))
    assert elements(split.table, split.offsets, split.deltas) == whole
