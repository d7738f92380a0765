"""Copies and casts: what arrives, on both twins."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.native.tables import BITS, Case, add, cases, digest_of, row_of, u64
from weightsync._native import layout as col

quick = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
FLOATS = {col.F16: torch.float16, col.BF16: torch.bfloat16, col.F32: torch.float32, col.F64: torch.float64}
SIGNED = {2: np.int16, 4: np.int32, 8: np.int64}


def as_float(bits: np.ndarray, code: int) -> torch.Tensor:
    return torch.from_numpy(bits.view(SIGNED[bits.itemsize])).view(FLOATS[code])


def as_bits(values: torch.Tensor) -> np.ndarray:
    item = values.element_size()
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[item]).numpy().view(BITS[item])


def cast(core: ModuleType, bits: np.ndarray, src: int, dst: int) -> np.ndarray:
    out = np.zeros(bits.shape, BITS[col.ITEM_BYTES[dst]])
    program = core.Program(row_of(bits, out, src_type=src, dst_type=dst)[None])
    assert program.run(u64(bits.ctypes.data), u64(out.ctypes.data), u64(0)) == col.OK
    return out


def hard_values(code: int) -> np.ndarray:
    """Bits of a format: all of the short ones; of the long ones random bits, values of every scale, and those at and
    next to the middle between two short floats."""
    if col.ITEM_BYTES[code] == 2:
        return np.arange(2**16, dtype=np.uint16)
    random = np.random.default_rng(5)
    bits = BITS[col.ITEM_BYTES[code]]
    anything = random.integers(0, np.iinfo(bits).max, 20000, bits, endpoint=True)
    scales = torch.from_numpy(random.standard_normal(20000) * np.exp(random.uniform(-110, 110, 20000)))
    middles = []
    for short in (torch.float16, torch.bfloat16):
        values = torch.arange(2**15, dtype=torch.int16).view(short).double()
        middle = as_bits(((values[:-1] + values[1:]) / 2).to(FLOATS[code]))
        middles += [middle, middle + bits(1), middle - bits(1)]
    return np.concatenate([anything, as_bits(scales.to(FLOATS[code])), *middles])


@quick
@given(case=cases())
def test_raw_elements_arrive_as_they_are_wherever_they_lie(core: ModuleType, case: Case) -> None:
    assume(case.src.itemsize == case.dst.itemsize)
    raw = row_of(case.src, case.dst, index=case.index, steps=case.steps)
    for with_digest in (True, False):
        case.dst[...] = 0
        run = core.Program(raw[None]).run
        status = run(u64(case.src.ctypes.data), u64(case.dst.ctypes.data), u64(0) if with_digest else None)
        assert status == col.OK
        np.testing.assert_array_equal(case.dst, case.src)


@quick
@given(case=cases(), writes=st.booleans(), digests=st.booleans())
def test_both_twins_write_the_same_bytes_and_digests(
    compiled: ModuleType, pure: ModuleType, case: Case, writes: bool, digests: bool
) -> None:
    found = []
    for core in (compiled, pure):
        case.dst[...] = 0
        sums = u64(1)
        status = core.Program(case.row[None]).run(
            u64(case.src.ctypes.data),
            u64(case.dst.ctypes.data) if writes else None,
            sums if digests else None,
        )
        assert status == col.OK
        found.append((case.dst.tobytes(), int(sums[0])))
    assert found[0] == found[1]


@pytest.mark.parametrize(("src", "dst"), [(s, d) for s in FLOATS for d in FLOATS if s != d])
def test_casts_are_those_of_torch(core: ModuleType, src: int, dst: int) -> None:
    bits = hard_values(src)
    is_nan = torch.isnan(as_float(bits, src)).numpy()
    found = cast(core, bits, src, dst)
    assert torch.isnan(as_float(found[is_nan], dst)).all()
    bits, found = bits[~is_nan], found[~is_nan]
    values = as_float(bits, src)
    if src == col.F64 and col.ITEM_BYTES[dst] == 2:
        # torch rounds twice, by way of float32; to an odd float32 first, its second rounding is right.
        near = values.float()
        is_above, is_exact = near.double().abs() > values.abs(), near.double() == values
        odd = as_bits(near) - is_above.numpy().astype(np.uint32) | (~is_exact).numpy().astype(np.uint32)
        values = as_float(odd, col.F32)
    np.testing.assert_array_equal(found, as_bits(values.to(FLOATS[dst])))


@pytest.mark.parametrize(
    ("src", "dst", "bits", "expected"),
    [
        (col.F32, col.BF16, 0x7F800001, 0x7FC0),  # all that was set is cut off: still a NaN
        (col.F32, col.BF16, 0xFFA1_2345, 0xFFE1),
        (col.F32, col.F16, 0xFF80_2000, 0xFE01),
        (col.F64, col.BF16, 0x7FF4_0000_0000_0000, 0x7FE0),
        (col.BF16, col.F32, 0xFF81, 0xFFC1_0000),
        (col.F16, col.F64, 0x7C01, 0x7FF8_0400_0000_0000),
    ],
)
def test_a_nan_is_quieted_and_keeps_its_sign_and_the_top_of_its_payload(
    core: ModuleType, src: int, dst: int, bits: int, expected: int
) -> None:
    found = cast(core, np.full(40, bits, BITS[col.ITEM_BYTES[src]]), src, dst)
    assert {hex(value) for value in found.tolist()} == {hex(expected)}


def test_casts_ignore_the_processor_s_flush_to_zero(core: ModuleType) -> None:
    bits = np.array([0x0001_8000, 0x8000_9000] * 20, np.uint32)
    try:
        torch.set_flush_denormal(True)
        found = cast(core, bits, col.F32, col.BF16)
        wide = cast(core, found, col.BF16, col.F64)
    finally:
        torch.set_flush_denormal(False)
    assert found[:2].tolist() == [0x0002, 0x8001]
    assert wide[:2].tolist() == [0x37B0_0000_0000_0000, 0xB7A0_0000_0000_0000]


def test_many_small_and_a_few_large_moves_in_one_table_on_several_threads(core: ModuleType) -> None:
    random = np.random.default_rng(1)
    sizes = [*random.integers(0, 3000, 500).tolist(), 3_000_001, 5, 700_000]
    sources = [random.integers(0, 2**16, size, np.uint16) for size in sizes]
    targets = [np.zeros_like(source) for source in sources]
    rows = np.stack([row_of(source, seed=number) for number, source in enumerate(sources)])
    digests = np.zeros(len(sizes), np.uint64)
    program = core.Program(rows)
    assert (program.moves, program.size_bytes) == (len(sizes), 2 * sum(sizes))
    status = program.run(
        u64(*(source.ctypes.data for source in sources)), u64(*(target.ctypes.data for target in targets)), digests,
        threads=3,
    )  # fmt: skip
    assert status == col.OK
    assert all(np.array_equal(s, t) for s, t in zip(sources, targets, strict=True))
    again = np.zeros_like(digests)
    assert program.run(u64(*(target.ctypes.data for target in targets)), None, again) == col.OK
    np.testing.assert_array_equal(again, digests)


def test_ten_thousand_small_moves_from_one_slot(core: ModuleType) -> None:
    count, size = 10_000, 64
    source = np.random.default_rng(4).integers(0, 2**16, (count, size), np.uint16)
    target, digests = np.zeros_like(source), np.zeros(count, np.uint64)
    rows = np.repeat(row_of(source[0])[None], count, axis=0)
    rows[:, col.INDEX] = np.arange(count) * size
    rows[:, col.OFFSET] = rows[:, col.INDEX] * source.itemsize
    starts = np.arange(count, dtype=np.uint64) * np.uint64(source.strides[0])
    status = core.Program(rows).run(
        starts + np.uint64(source.ctypes.data), starts + np.uint64(target.ctypes.data), digests, threads=2
    )
    assert status == col.OK
    np.testing.assert_array_equal(target, source)
    assert add(*digests.tolist()) == digest_of(core, source)


def test_threads_change_neither_bytes_nor_digests(core: ModuleType) -> None:
    # Several units of one tensor, a transposed one, and a cast: threads share digests and the ends of lines.
    random = np.random.default_rng(6)
    sources = [
        random.integers(0, 2**16, 2_500_003, np.uint16)[1:],
        random.integers(0, 2**16, (900, 1301), np.uint16).T,
        random.integers(0, 2**32, 1_000_001, np.uint32)[1:],
    ]
    buffers = [np.zeros(3 + source.size, np.uint16)[3:].reshape(source.shape) for source in sources]
    types = [(col.RAW16, col.RAW16), (col.RAW16, col.RAW16), (col.F32, col.BF16)]
    rows = np.stack(
        [
            row_of(source, buffer, src_type=src_type, dst_type=dst_type)
            for source, buffer, (src_type, dst_type) in zip(sources, buffers, types, strict=True)
        ]
    )
    program = core.Program(rows)
    found = []
    for threads in (1, 2, 5):
        digests = np.zeros(3, np.uint64)
        for buffer in buffers:
            buffer[...] = 0
        status = program.run(
            u64(*(s.ctypes.data for s in sources)), u64(*(t.ctypes.data for t in buffers)), digests, threads=threads
        )  # fmt: skip
        assert status == col.OK
        found.append(([buffer.tobytes() for buffer in buffers], digests.tolist()))
    assert found[0] == found[1] == found[2]
    assert [buffer.tobytes() for buffer in buffers[:2]] == [source.tobytes() for source in sources[:2]]


def test_a_large_transposed_matrix_arrives(core: ModuleType) -> None:
    source = np.random.default_rng(2).integers(0, 2**16, (1500, 1501), np.uint16).T
    target = np.zeros(source.shape, np.uint16)
    digests = u64(0)
    program = core.Program(row_of(source, target)[None])
    assert program.run(u64(source.ctypes.data), u64(target.ctypes.data), digests, threads=2) == col.OK
    np.testing.assert_array_equal(target, source)
    back = np.zeros((1501, 1500), np.uint16, order="F")
    sums = u64(0)
    program = core.Program(row_of(target, back)[None])
    assert program.run(u64(target.ctypes.data), u64(back.ctypes.data), sums) == col.OK
    np.testing.assert_array_equal(back, target)
    assert sums == digests


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [0, 1, 4097, (4 << 20) - 1, (5 << 20) + 77, (12 << 20) + 1, (12 << 20) + 2])
def test_a_plain_copy_is_a_copy_of_every_byte_and_of_no_other(
    core: ModuleType, size: int, threads: int
) -> None:
    source = np.random.default_rng(3).integers(1, 256, size + 40, np.uint8)
    for start, shift in ((1, 1), (0, 33), (32, 0)):
        target = np.zeros_like(source)
        core.memory_copy(target.ctypes.data + start, source.ctypes.data + shift, size, threads)
        assert np.array_equal(target[start : start + size], source[shift : shift + size])
        assert not target[:start].any() and not target[start + size :].any()


def test_an_empty_table_is_done_at_once(core: ModuleType) -> None:
    program = core.Program(np.zeros((0, col.COLUMNS), np.int64))
    assert (program.moves, program.size_bytes, program.units) == (0, 0, 0)
    assert program.run(u64(), u64(), u64()) == col.OK
