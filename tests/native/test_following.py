"""A run that follows a watermark, one that publishes its own, and how either ends early."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import numpy as np
import pytest

from tests.conftest import Child
from tests.native.tables import row_of, u64
from weightsync._native import layout as col

GENERATION = 7
SIZE = 4 << 20  # bytes: several units
DEADLINE_S = 30.0


class Slot:
    """A slot, its head, and a place to copy it to."""

    def __init__(self, core: ModuleType) -> None:
        self.source = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
        self.slot, self.target = np.zeros_like(self.source), np.zeros_like(self.source)
        self.head = u64(GENERATION, 0)
        self.cancel = np.zeros(1, np.uint32)
        self.program = core.Program(row_of(self.source)[None])
        self.digests = u64(0)
        self.status: int | None = None

    def fill(self, size: int) -> None:
        done = int(self.head[1])
        self.slot[done:size] = self.source[done:size]
        self.head[1] = size

    def has_taken(self, size: int) -> bool:
        return np.array_equal(self.target[:size], self.source[:size])

    def read(self, generation: int = GENERATION, timeout_s: float = DEADLINE_S, progress: int = 0) -> int:
        self.status = self.program.run(
            u64(self.slot.ctypes.data), u64(self.target.ctypes.data), self.digests, threads=2, progress=progress,
            follow=self.head.ctypes.data, generation=generation, timeout_s=timeout_s, cancel=self.cancel.ctypes.data,
        )  # fmt: skip
        return self.status


@pytest.fixture
def slot(core: ModuleType) -> Slot:
    return Slot(core)


@pytest.fixture
def reading(slot: Slot) -> Iterator[threading.Thread]:
    """A thread that reads the slot; it must have ended by the end of the test."""
    thread = threading.Thread(target=slot.read)
    thread.start()
    yield thread
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def wait_until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def test_a_reader_takes_each_unit_as_soon_as_its_bytes_are_there(
    slot: Slot, reading: threading.Thread
) -> None:
    for size in (SIZE // 2, SIZE - 1):
        slot.fill(size)
        whole = size >> 20 << 20
        wait_until(partial(slot.has_taken, whole))
        assert not slot.target[whole:].any()
    assert reading.is_alive()
    slot.fill(SIZE)
    reading.join(DEADLINE_S)
    assert slot.status == col.OK
    np.testing.assert_array_equal(slot.target, slot.source)


def test_the_watermark_of_a_follower_covers_only_what_it_has_taken(slot: Slot) -> None:
    progress = u64(0)
    thread = threading.Thread(target=slot.read, kwargs={"progress": progress.ctypes.data})
    thread.start()
    slot.fill(SIZE // 2)
    wait_until(lambda: int(progress[0]) == SIZE // 2)
    slot.fill(SIZE)
    thread.join(DEADLINE_S)
    assert (slot.status, int(progress[0])) == (col.OK, SIZE)


def test_a_watermark_that_stands_still_is_a_timeout(slot: Slot) -> None:
    slot.fill(SIZE // 2)
    started = time.monotonic()
    assert slot.read(timeout_s=0.05) == col.TIMEOUT
    assert 0.05 <= time.monotonic() - started < 5


def test_a_slow_writer_is_no_timeout_as_long_as_it_advances(slot: Slot) -> None:
    slot.fill(SIZE - 45)  # the reader waits for the last unit, longer than its timeout
    thread = threading.Thread(target=slot.read, kwargs={"timeout_s": 0.6})
    thread.start()
    for left in range(44, -1, -1):
        time.sleep(0.02)
        slot.fill(SIZE - left)
    thread.join(DEADLINE_S)
    assert slot.status == col.OK


def test_a_reader_that_waits_is_cancelled(slot: Slot, reading: threading.Thread) -> None:
    slot.fill(SIZE // 2)
    slot.cancel[0] = 1
    reading.join(DEADLINE_S)
    assert slot.status == col.CANCELLED


def test_a_reader_that_waits_is_evicted_by_the_next_generation(slot: Slot, reading: threading.Thread) -> None:
    slot.fill(SIZE // 2)
    slot.head[0] = GENERATION + 1
    reading.join(DEADLINE_S)
    assert slot.status == col.EVICTED


def test_an_older_generation_is_refused_although_all_bytes_are_there(slot: Slot) -> None:
    slot.fill(SIZE)
    assert slot.read(generation=GENERATION - 1) == col.EVICTED


def test_a_reader_waits_for_a_slot_that_is_not_open_yet(slot: Slot) -> None:
    slot.head[:] = GENERATION - 1, SIZE  # all bytes of the use before are there
    thread = threading.Thread(target=slot.read)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert not slot.target.any()
    slot.head[1] = 0
    slot.head[0] = GENERATION
    slot.fill(SIZE)
    thread.join(DEADLINE_S)
    assert slot.status == col.OK
    assert slot.has_taken(SIZE)


def test_a_slot_that_is_never_opened_is_a_timeout(slot: Slot) -> None:
    slot.head[:] = GENERATION - 1, SIZE
    started = time.monotonic()
    assert slot.read(timeout_s=0.05) == col.TIMEOUT
    assert 0.05 <= time.monotonic() - started < 5


def test_a_reader_that_waits_for_a_slot_to_open_is_cancelled_or_finds_it_reused(slot: Slot) -> None:
    for word, value, status in ((slot.cancel, 1, col.CANCELLED), (slot.head, GENERATION + 1, col.EVICTED)):
        slot.head[:], slot.cancel[:] = (GENERATION - 1, SIZE), 0
        thread = threading.Thread(target=slot.read)
        thread.start()
        thread.join(0.02)
        assert thread.is_alive()
        word[0] = value
        thread.join(DEADLINE_S)
        assert slot.status == status
    assert not slot.target.any()


def test_a_generation_that_ends_during_the_last_unit_is_noticed(core: ModuleType, slot: Slot) -> None:
    # The follower's own watermark is the head's generation: finishing the only unit ends the generation.
    slot.fill(SIZE)
    row = row_of(slot.source[:4096])
    status = core.Program(row[None]).run(
        u64(slot.slot.ctypes.data), u64(slot.target.ctypes.data), None,
        progress=slot.head.ctypes.data, follow=slot.head.ctypes.data, generation=GENERATION,
    )  # fmt: skip
    assert (status, slot.head[0]) == (col.EVICTED, 4096)


def test_a_cancelled_run_does_not_start(slot: Slot) -> None:
    slot.fill(SIZE)
    slot.cancel[0] = 1
    assert slot.read() == col.CANCELLED
    assert not slot.target.any()


def test_a_watermark_counts_slot_bytes_in_any_order_of_the_table(core: ModuleType) -> None:
    arrays = [np.ones(2 << 20, np.uint8) for _ in range(3)]
    offsets = [4 << 20, 0, 2 << 20]
    rows = np.stack([row_of(array, offset=offset) for array, offset in zip(arrays, offsets, strict=True)])
    targets = [np.zeros_like(array) for array in arrays]
    progress = u64(0)
    cancel = np.zeros(1, np.uint32)
    seen: list[int] = []

    def watch() -> None:
        while not seen or seen[-1] < 6 << 20:
            mark = int(progress[0])
            assert mark <= 2 << 20 or targets[1].all()
            assert mark <= 4 << 20 or (targets[2].all() and targets[0].all())
            seen.append(mark)

    watcher = threading.Thread(target=watch)
    watcher.start()
    status = core.Program(rows).run(
        u64(*(a.ctypes.data for a in arrays)), u64(*(t.ctypes.data for t in targets)), None,
        progress=progress.ctypes.data, cancel=cancel.ctypes.data,
    )  # fmt: skip
    watcher.join(DEADLINE_S)
    assert status == col.OK
    assert seen == sorted(seen)
    assert seen[-1] == 6 << 20


def test_a_watermark_of_a_cast_counts_bytes_of_the_destination(core: ModuleType) -> None:
    source, target = np.zeros(1 << 20, np.float32), np.zeros(1 << 20, np.uint16)
    progress = u64(0)
    program = core.Program(row_of(source, target, src_type=col.F32, dst_type=col.BF16, offset=64)[None])
    status = program.run(
        u64(source.ctypes.data), u64(target.ctypes.data), None, progress=progress.ctypes.data
    )
    assert (status, int(progress[0])) == (col.OK, 64 + target.nbytes)


WRITER = """
import importlib, mmap, os, sys
import numpy as np
from tests.native.tables import row_of, u64
core = importlib.import_module(sys.argv[1])
shared = np.frombuffer(mmap.mmap(os.open(sys.argv[2], os.O_RDWR), 0), np.uint8)
source = np.random.default_rng(9).integers(0, 256, shared.size - 4096, np.uint8)
start = shared.ctypes.data
status = core.Program(row_of(source)[None]).run(u64(source.ctypes.data), u64(start + 4096), None, progress=start + 8)
sys.exit(status)
"""


def test_a_reader_follows_a_writer_in_another_process(core: ModuleType, spawn: Callable[..., Child]) -> None:
    fd = os.memfd_create("slot")
    os.ftruncate(fd, SIZE + 4096)
    shared = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
    shared[:8].view(np.uint64)[0] = GENERATION
    child = spawn("-c", WRITER, core.__name__, f"/proc/{os.getpid()}/fd/{fd}", PYTHONPATH=os.getcwd())
    target = np.zeros(SIZE, np.uint8)
    start = shared.ctypes.data
    status = core.Program(row_of(target)[None]).run(
        u64(start + 4096),
        u64(target.ctypes.data),
        None,
        follow=start,
        generation=GENERATION,
        timeout_s=DEADLINE_S,
    )
    child.join()
    os.close(fd)
    assert status == col.OK
    np.testing.assert_array_equal(target, np.random.default_rng(9).integers(0, 256, SIZE, np.uint8))


def test_other_threads_of_python_go_on_meanwhile(slot: Slot, reading: threading.Thread) -> None:
    counter = ctypes.c_int(0)
    for _ in range(1000):
        counter.value += 1
    assert reading.is_alive()
    assert slot.status is None
    slot.cancel[0] = 1
