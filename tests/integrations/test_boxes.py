"""Boxes of flattened intervals and of strided copies, against numpy that looks at every element."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.integrations.boxes import boxes_of_runs, interval_to_boxes, remainder, subtract
from weightsync.integrations.strided import Frame, Place, ScatteredError, cut
from weightsync.types import Box

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


@given(shapes, st.data())
def test_an_interval_is_its_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    boxes = interval_to_boxes(shape, start, stop)
    flat = np.arange(size).reshape(shape)
    got = [flat[slices(box)].reshape(-1) for box in boxes]
    assert np.concatenate([np.arange(0), *got]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_an_interval_outside_the_tensor_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"\[3, 7\) is no interval of a tensor of shape \[2, 3\] with 6 elements"
    ):
        interval_to_boxes((2, 3), 3, 7)


@st.composite
def inner_boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(start, tuple(draw(st.integers(a, n)) for a, n in zip(start, shape, strict=True)))


@given(shapes, st.data())
def test_what_is_left_of_a_box_is_exactly_the_rest(shape: tuple[int, ...], data: st.DataObject) -> None:
    holes = data.draw(st.lists(inner_boxes(shape), max_size=4))
    count = np.zeros(shape, int)
    for box in remainder(Box.whole(shape), holes):
        count[slices(box)] += 1
    want = np.ones(shape, int)
    for hole in holes:
        want[slices(hole)] = 0
    assert np.array_equal(count, want)


def test_nothing_is_left_of_a_box_without_itself() -> None:
    assert subtract(Box((1, 2), (3, 4)), Box((0, 0), (9, 9))) == []


def test_runs_of_two_axes_make_a_box_for_each_pair() -> None:
    pairs = list(boxes_of_runs([[(0, 2), (6, 7)], [(1, 3)]]))
    assert [str(whole) for whole, _ in pairs] == ["[0:2, 1:3]", "[6:7, 1:3]"]
    assert [str(local) for _, local in pairs] == ["[0:2, 0:2]", "[2:3, 0:2]"]


def views_of(tensor: torch.Tensor, data: st.DataObject) -> torch.Tensor:
    """A random chain of view operations."""
    for _ in range(data.draw(st.integers(0, 4))):
        kind = data.draw(
            st.sampled_from(["narrow", "step", "permute", "split", "flatten", "expand", "select"])
        )
        if tensor.dim() == 0:
            break
        axis = data.draw(st.integers(0, tensor.dim() - 1))
        n = tensor.shape[axis]
        if kind == "narrow":
            start = data.draw(st.integers(0, n - 1))
            tensor = tensor.narrow(axis, start, data.draw(st.integers(1, n - start)))
        elif kind == "step":
            tensor = tensor.unfold(axis, 1, 2).squeeze(-1)
        elif kind == "permute":
            tensor = tensor.permute(*data.draw(st.permutations(range(tensor.dim()))))
        elif kind == "split":
            divisors = [d for d in range(1, n + 1) if n % d == 0]
            tensor = tensor.unflatten(axis, (data.draw(st.sampled_from(divisors)), -1))
        elif kind == "expand":
            tensor = tensor.unsqueeze(axis).expand(*tensor.shape[:axis], 2, *tensor.shape[axis:])
        elif kind == "select":
            tensor = tensor.select(axis, data.draw(st.integers(0, n - 1)))
        else:
            try:
                tensor = tensor.view(-1)
            except RuntimeError:
                continue
    return tensor


@settings(max_examples=150, deadline=None)
@given(shapes, st.data())
def test_cuts_of_a_view_are_its_elements(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    order = data.draw(st.permutations(range(len(shape))))
    whole = whole.permute(*order) if shape else whole  # the frame itself need not be row-major
    view = views_of(whole, data)
    there = torch.full((view.numel() + 5,), -1)
    target = there[5:].view(view.shape)
    for part in cut(Frame.of(whole), view.shape, Place.of(view), Place.of(target)):
        got = there.as_strided(part.box.shape, part.there.strides, part.there.offset)
        assert (got == -1).all()
        got.copy_(whole[slices(part.box)])
    assert torch.equal(target, view)
    assert (there[:5] == -1).all()


def test_a_copy_that_leaves_the_frame_is_refused() -> None:
    base = torch.arange(24).reshape(4, 6)
    frame = Frame.of(base[:, 1:3])
    with pytest.raises(ScatteredError):
        cut(frame, (4, 3), Place.of(base[:, 1:4]), Place(0, (3, 1)))


def test_a_shuffle_of_too_many_boxes_is_refused() -> None:
    with pytest.raises(ScatteredError, match="more than 65536 boxes"):
        cut(Frame.contiguous((200_000,)), (100_000,), Place(0, (2,)), Place(0, (1,)))
