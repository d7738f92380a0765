"""Exchange of pages and population, on real mappings."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from weightsync._native import pages
from weightsync.segment import Mapping, Segment, reserve, unmap

SIZE = 4 << 20


def filled(value: int) -> Mapping:
    segment = Segment.create("test", SIZE)
    mapping = segment.map(writable=True)
    segment.close()
    mapping.array[:] = value
    return mapping


@pytest.fixture
def scratch() -> Iterator[int]:
    address = reserve(SIZE)
    yield address
    unmap(address, SIZE)


def permissions(address: int) -> str | None:
    """What /proc says about the mapping that holds `address`; None if there is none."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            span, flags = line.split()[:2]
            start, end = (int(side, 16) for side in span.split("-"))
            if start <= address < end:
                return flags
    return None


def test_exchanged_pages_keep_their_contents_and_scratch_stays_reserved(
    core: ModuleType, scratch: int
) -> None:
    a, b = filled(1), filled(2)
    for turn in range(4):
        assert 0 < core.exchange(a.address, b.address, scratch, SIZE) < 5
        assert (set(np.unique(a.array)), set(np.unique(b.array))) == (
            ({2}, {1}) if turn % 2 == 0 else ({1}, {2})
        )
        assert permissions(scratch) == "---p"
        assert permissions(scratch + SIZE - 1) == "---p"


def test_after_an_exchange_another_mapping_of_the_segment_still_sees_what_is_written(
    core: ModuleType, scratch: int
) -> None:
    segment = Segment.create("test", SIZE)
    live, wire, back = segment.map(writable=True), segment.map(writable=False), filled(2)
    core.exchange(live.address, back.address, scratch, SIZE)
    back.array[:] = 7
    assert set(np.unique(wire.array)) == {7}
    segment.close()


STEPS = ["move a to scratch", "move b to a", "move scratch to b"]


@pytest.mark.parametrize("step", STEPS)
def test_whichever_step_of_the_pure_twin_fails_everything_is_where_it_was(
    pure: ModuleType, scratch: int, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The compiled core's steps are made to fail in csrc/tests.
    a, b = filled(1), filled(2)
    names = {"a": a.address, "b": b.address, "scratch": scratch}
    refused = tuple(names[name] for name in step.split()[1::2])
    move = pages._move

    def fail(source: int, target: int, size: int, keep: int) -> int:
        if (source, target) == refused:
            unmap(target, size)  # as kernels do before they look closer
            return errno.ENOMEM
        return move(source, target, size, keep)

    with monkeypatch.context() as patch:
        patch.setattr(pages, "_move", fail)
        with pytest.raises(OSError, match=step):
            pure.exchange(a.address, b.address, scratch, SIZE)
    assert (set(np.unique(a.array)), set(np.unique(b.array))) == ({1}, {2})
    assert permissions(scratch) == "---p"


def test_a_failed_step_is_named_and_everything_is_where_it_was(core: ModuleType, scratch: int) -> None:
    a, hole = filled(1), reserve(SIZE)
    unmap(hole, SIZE)
    with pytest.raises(OSError, match="move b to a") as caught:
        core.exchange(a.address, hole, scratch, SIZE)
    assert caught.value.errno == errno.EFAULT
    assert set(np.unique(a.array)) == {1}
    assert permissions(scratch) == "---p"
    with pytest.raises(OSError, match="move a to scratch"):
        core.exchange(hole, a.address, scratch, SIZE)
    assert set(np.unique(a.array)) == {1}
    assert permissions(scratch) == "---p"


@pytest.mark.parametrize("shift", [0, 1, 4096])
def test_ranges_that_overlap_or_end_within_a_page_are_refused(
    core: ModuleType, scratch: int, shift: int
) -> None:
    a = filled(1)
    with pytest.raises(ValueError, match=r"^exchange: "):
        core.exchange(a.address, a.address + shift, scratch, SIZE)
    with pytest.raises(ValueError, match=r"^exchange: "):
        core.exchange(a.address, scratch, scratch, 0)
    assert set(np.unique(a.array)) == {1}


@pytest.mark.parametrize("write", [True, False])
def test_population_keeps_contents(core: ModuleType, write: bool) -> None:
    a = filled(3)
    core.populate(a.address, SIZE, write=write)
    assert set(np.unique(a.array)) == {3}


def test_population_fills_the_page_tables(core: ModuleType) -> None:
    segment = Segment.create("test", SIZE)
    a = segment.map(writable=True, populate=False)
    resident = (ctypes.c_uint8 * (SIZE // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None)
    core.populate(a.address, SIZE, write=True)
    assert libc.mincore(ctypes.c_void_p(a.address), ctypes.c_size_t(SIZE), resident) == 0
    assert all(byte & 1 for byte in resident)
    segment.close()


def test_population_of_what_forbids_it_or_is_not_mapped_is_an_error(core: ModuleType, scratch: int) -> None:
    for write in (True, False):
        with pytest.raises(OSError, match="populate"):
            core.populate(scratch, SIZE, write=write)
    hole = reserve(SIZE)
    unmap(hole, SIZE)
    with pytest.raises(OSError, match="populate") as caught:
        core.populate(hole, SIZE, write=True)
    assert caught.value.errno == errno.ENOMEM
