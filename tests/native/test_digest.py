"""Digests: pinned, additive, and changed by what must change them."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.tables import BITS, SEED, add, digest_of, steps_of
from weightsync._native import scalars

quick = settings(max_examples=60, deadline=None)

GOLDEN = {
    1: 0xD6CC9269DC7F3E47,
    2: 0xAC9291EBB5EB7F5D,
    4: 0x37A8D4A699BB5A96,
    8: 0x65ACF66883CE4C2C,
}
"""Digests of `sample`: trainers and servers of different releases must agree."""


def sample(item: int, count: int = 10_000) -> np.ndarray:
    numbers = np.arange(count, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15) + np.uint64(1)
    return (numbers >> np.uint64(64 - 8 * item)).astype(BITS[item])


def by_definition(array: np.ndarray, seed: int) -> int:
    """The digest in Python's own numbers, as `digest.h` defines it."""
    words = array.view(np.int16).tolist() if array.itemsize > 1 else array.tolist()
    halves = [0, 0]
    for number, word in enumerate(words):
        block, place = divmod(number, 4096)
        z = (seed + (block + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
        for half, (shift, first, second) in enumerate([(0x1B3D, 0x2D35, 0x5E6D), (0x4E6F, 0x6A4B, 0x3C97)]):
            x = (place + shift) % 2**15
            x = (x ^ x >> 7) * first % 2**15
            x = (x ^ x >> 6) * second % 2**15
            factor = 2 * (x ^ x >> 8) + 1
            factor -= 2**16 * (factor >= 2**15)
            halves[half] += word * factor * (z >> 32 * half & 0xFFFFFFFF | 1)
    return halves[1] % 2**32 << 32 | halves[0] % 2**32


@pytest.mark.parametrize("item", GOLDEN)
def test_golden_digests(core: ModuleType, item: int) -> None:
    assert hex(digest_of(core, sample(item))) == hex(GOLDEN[item])
    assert by_definition(sample(item), SEED) == GOLDEN[item]


def test_factors_are_odd_and_no_two_places_of_a_block_share_one() -> None:
    for factors in scalars.F:
        assert len(set(factors.tolist())) == len(factors) == 4096
        assert (factors % 2 == 1).all()


def test_no_two_places_have_equal_or_negated_factors_in_both_halves() -> None:
    # Or two equal words could become zeros, or change places with others, unnoticed.
    pairs = set(zip(*(factors.tolist() for factors in scalars.F), strict=True))
    assert len(pairs) == 4096
    assert not pairs & {(-low, -high) for low, high in pairs}


@quick
@given(data=st.data())
def test_parts_add_up_however_the_tensor_is_cut_into_boxes(core: ModuleType, data: st.DataObject) -> None:
    ndim = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.integers(1, [0, 20000, 150, 30][ndim])) for _ in range(ndim))
    item = data.draw(st.sampled_from([1, 2, 4, 8]))
    tensor = sample(item, int(np.prod(shape))).reshape(shape)
    cuts = [sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=3))}) for count in shape]
    steps = steps_of(shape)
    parts = []
    for place in np.ndindex(*(len(cut) - 1 for cut in cuts)):
        box = tuple(slice(*list(pairwise(cut))[i]) for cut, i in zip(cuts, place, strict=True))
        index = sum(side.start * step for side, step in zip(box, steps, strict=True))
        parts.append(digest_of(core, tensor[box], index=index, steps=steps))
    assert add(*parts) == digest_of(core, tensor)


@quick
@given(data=st.data(), item=st.sampled_from([1, 2, 4, 8]))
def test_any_flipped_bit_changes_both_halves(core: ModuleType, data: st.DataObject, item: int) -> None:
    tensor = sample(item)
    before = digest_of(core, tensor)
    place, bit = data.draw(st.integers(0, tensor.size - 1)), data.draw(st.integers(0, 8 * item - 1))
    tensor[place] ^= BITS[item](1 << bit)
    after = digest_of(core, tensor)
    assert before >> 32 != after >> 32
    assert before % 2**32 != after % 2**32


@quick
@given(data=st.data(), item=st.sampled_from([1, 2, 4, 8]))
def test_any_two_exchanged_elements_change_it(core: ModuleType, data: st.DataObject, item: int) -> None:
    tensor = sample(item)
    one, other = (data.draw(st.integers(0, tensor.size - 1)) for _ in range(2))
    before = digest_of(core, tensor)
    is_same = tensor[one] == tensor[other]
    tensor[[one, other]] = tensor[[other, one]]
    assert (digest_of(core, tensor) == before) == is_same


@pytest.mark.parametrize("distance", [1, 2, 4095, 4096, 8192])
def test_shifted_elements_change_it(core: ModuleType, distance: int) -> None:
    tensor = sample(2, 16384)
    assert digest_of(core, np.roll(tensor, distance)) != digest_of(core, tensor)


def test_exchanged_experts_and_names_change_it(core: ModuleType) -> None:
    experts = sample(2, 8 * 4096).reshape(8, 4096)
    exchanged = experts[[1, 0, *range(2, 8)]]
    assert digest_of(core, exchanged) != digest_of(core, experts)
    assert digest_of(core, experts, seed=SEED + 1) != digest_of(core, experts)


def test_nothing_has_digest_0_and_so_have_zeros(core: ModuleType) -> None:
    assert digest_of(core, np.zeros((3, 0, 4), np.uint16)) == 0
    assert digest_of(core, np.zeros(5000, np.uint16)) == 0
