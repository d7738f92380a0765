"""Segments, their mappings and reserved ranges: sizes, seals, rights, and that nothing is left behind."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import resource
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.conftest import Child
from weightsync import segment as module
from weightsync.config import GIANT_PAGE, HUGE_PAGE
from weightsync.errors import CapacityError
from weightsync.segment import Mapping, Segment, available_memory, check_descriptors, reserve, unmap


@pytest.fixture
def segment() -> Iterator[Segment]:
    with_two_pages = Segment.create("weightsync-test-segment", HUGE_PAGE + 1)
    yield with_two_pages
    with_two_pages.close()


def rights_at(address: int) -> str | None:
    """What /proc says about the mapping that holds `address`; None if there is none."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            span, rights = line.split()[:2]
            start, end = (int(side, 16) for side in span.split("-"))
            if start <= address < end:
                return rights
    return None


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [1, 4096, HUGE_PAGE, HUGE_PAGE + 1])
def test_a_reserved_range_is_aligned_and_not_larger_than_asked_for(size: int) -> None:
    size = module.round_up(size, mmap.PAGESIZE)
    address = reserve(size)
    assert address % HUGE_PAGE == 0
    assert rights_at(address) == rights_at(address + size - 1) == "---p"
    unmap(address, size)
    assert rights_at(address) is None


def test_a_large_reserved_range_is_aligned_to_what_one_page_table_holds() -> None:
    address = reserve(GIANT_PAGE + HUGE_PAGE)
    assert address % GIANT_PAGE == 0
    unmap(address, GIANT_PAGE + HUGE_PAGE)


def test_what_is_cut_off_for_alignment_is_given_back() -> None:
    def reserved_kib() -> int:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("VmSize:"))

    before = reserved_kib()
    address = reserve(GIANT_PAGE)
    assert reserved_kib() - before < GIANT_PAGE / 1024 * 1.02
    unmap(address, GIANT_PAGE)


@pytest.mark.parametrize(
    ("asked", "got"), [(0, 1), (1, 1), (HUGE_PAGE, 1), (HUGE_PAGE + 1, 2), (3 * HUGE_PAGE, 3)]
)
def test_a_segment_holds_whole_huge_pages(asked: int, got: int) -> None:
    segment = Segment.create("test", asked)
    assert segment.size == os.fstat(segment.fd).st_size == got * HUGE_PAGE
    segment.close()


@pytest.mark.parametrize("size", [0, HUGE_PAGE, 3 * HUGE_PAGE])
def test_a_segment_can_neither_shrink_nor_grow(segment: Segment, size: int) -> None:
    with pytest.raises(PermissionError) as caught:
        os.ftruncate(segment.fd, size)
    assert caught.value.errno == errno.EPERM
    assert os.fstat(segment.fd).st_size == segment.size


def test_nobody_may_lift_or_add_seals(segment: Segment) -> None:
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, 1033, 0x8)  # F_ADD_SEALS, F_SEAL_WRITE


def test_a_mapping_is_aligned_and_shows_the_segment_to_all(segment: Segment) -> None:
    writer, reader = segment.map(writable=True), segment.map(writable=False)
    assert writer.address % HUGE_PAGE == reader.address % HUGE_PAGE == 0
    assert writer.size == reader.size == writer.array.size == segment.size
    writer.array[[0, -1]] = 1, 2
    assert reader.array[[0, -1]].tolist() == [1, 2]
    assert (rights_at(writer.address), rights_at(reader.address)) == ("rw-s", "r--s")


def test_a_new_segment_is_all_zeros(segment: Segment) -> None:
    assert not segment.map(writable=False).array.any()


def test_a_read_only_descriptor_can_t_be_mapped_for_writing(segment: Segment) -> None:
    segment.map(writable=True).array[:3] = 7
    fd = segment.read_only_fd()
    theirs = Segment(fd, segment.size)
    assert theirs.map(writable=False).array[:4].tolist() == [7, 7, 7, 0]
    before = open_files()
    with pytest.raises(CapacityError, match="Permission denied"):
        theirs.map(writable=True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    assert open_files() == before
    theirs.close()


def test_a_failed_map_leaves_no_range_behind(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[int] = []

    def fail(address: int, size: int, *, write: bool) -> None:
        addresses.append(address)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(module._native, "populate", fail)
    with pytest.raises(CapacityError, match=f"can't allocate {segment.size} bytes of shared memory"):
        segment.map(writable=True)
    assert len(addresses) == 1
    assert rights_at(addresses[0]) is None


def test_a_tensor_keeps_its_range_after_mapping_and_segment_are_closed(segment: Segment) -> None:
    mapping = segment.map(writable=True)
    address = mapping.address
    tensor = torch.from_numpy(mapping.array[8:16].view(np.int64))
    tensor.fill_(5)
    mapping.close()
    segment.close()
    gc.collect()
    assert rights_at(address) == "rw-s"
    assert tensor.tolist() == [5]
    part = tensor[:1].view(torch.int32)
    del tensor, mapping
    gc.collect()
    assert part.tolist() == [5, 0]
    del part
    gc.collect()
    assert rights_at(address) is None


def test_a_closed_mapping_gives_no_more_views(segment: Segment) -> None:
    mapping = segment.map(writable=True)
    mapping.close()
    mapping.close()
    assert rights_at(mapping.address) is None
    with pytest.raises(ValueError, match="mapping is closed"):
        mapping.array  # noqa: B018


def test_a_reserved_range_may_be_owned_by_a_mapping() -> None:
    mapping = Mapping(reserve(HUGE_PAGE), HUGE_PAGE)
    address = mapping.address
    assert rights_at(address) == "---p"
    del mapping
    assert rights_at(address) is None


def test_nothing_is_left_after_close() -> None:
    def traces() -> tuple[int, int]:
        with open("/proc/self/maps") as lines:
            return open_files(), sum("weightsync-test-trace" in line for line in lines)

    before = traces()
    for _ in range(3):
        segment = Segment.create("weightsync-test-trace", 1)
        mappings = [segment.map(writable=writable) for writable in (True, False)]
        assert traces() == (before[0] + 1, 2)
        for mapping in mappings:
            mapping.close()
        segment.close()
        segment.close()
        assert traces() == before


def test_a_forgotten_segment_closes_its_descriptor() -> None:
    before = open_files()
    Segment.create("test", 1)
    assert open_files() == before


HOLDER = """
import time
from weightsync.segment import Segment
segment = Segment.create("weightsync-test-killed", 1)
mapping = segment.map(writable=True)
print(f"holds {segment.fd}.", flush=True)
time.sleep(60)
"""


def test_a_killed_process_leaves_nothing_and_its_readers_go_on(spawn: Callable[..., Child]) -> None:
    child = spawn("-c", HOLDER)
    fd = int(child.wait_for(r"holds (\d+)\.")[1])
    ours = Segment(os.open(f"/proc/{child.process.pid}/fd/{fd}", os.O_RDONLY), HUGE_PAGE)
    reader = ours.map(writable=False)
    child.kill()
    assert not reader.array.any()
    assert not [name for name in os.listdir("/dev/shm") if "weightsync" in name]
    ours.close()


def test_a_segment_larger_than_memory_is_refused_before_it_is_made() -> None:
    available = available_memory()
    assert available is not None
    before = open_files()
    with pytest.raises(
        CapacityError, match=r"^weights: needs 1048576\.00 GiB of memory, .* GiB are available"
    ):
        Segment.create("weights", 2**50)
    assert open_files() == before


def test_a_segment_that_the_system_refuses_is_a_capacity_error() -> None:
    before = open_files()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HUGE_PAGE, limits[1]))
    try:
        Segment.create("weights", HUGE_PAGE).close()
        with pytest.raises(CapacityError, match=r"^weights: can't make a shared segment of 4194304 bytes"):
            Segment.create("weights", HUGE_PAGE + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert open_files() == before


def test_address_space_that_is_not_there_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match=r"mmap of .* bytes failed: Cannot allocate memory"):
        reserve(2**50)


def test_descriptors_are_counted_before_they_run_out() -> None:
    check_descriptors(10, "sockets")
    with pytest.raises(
        CapacityError, match=r"^sockets: needs 1000000000 file descriptors, .* raise `ulimit -n`"
    ):
        check_descriptors(10**9, "sockets")
