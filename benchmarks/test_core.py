"""The native core: copy with digest, digest alone, cast with digest, next to a plain copy."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from benchmarks.yardstick import record
from weightsync import _native
from weightsync.cli.bench.yardstick import PlainCopy, aligned_buffer
from weightsync.moves import View, ViewTable, contiguous_strides
from weightsync.types import DTYPES, Box

SIZE = 1 << 30
ROUNDS = 9


def program(source: str, target: str, elements: int, rows: int = 4096) -> _native.Program:
    shape = (elements // rows, rows)
    read, written = DTYPES[source], DTYPES[target]
    views = ViewTable([View("t", shape, Box.whole(shape), contiguous_strides(shape, read.itemsize))])
    table, _ = views.into_slot(
        np.zeros(1, np.int64), views.start, views.stop, np.zeros(1, np.int64), source=[read], wire=[written]
    )
    return _native.Program(table)


@pytest.mark.benchmark(group="core, 1 GiB read")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("source", "target", "writes"),
    [
        ("bfloat16", "bfloat16", True),
        ("bfloat16", "bfloat16", False),
        ("float32", "float32", True),
        ("float32", "bfloat16", True),
        ("uint8", "uint8", True),
        ("int64", "int64", True),
    ],
)
def test_core(benchmark, source, target, writes, threads):
    elements = SIZE // DTYPES[source].itemsize
    data = torch.randint(0, 127, (SIZE,), dtype=torch.uint8).numpy()
    out = aligned_buffer(elements * DTYPES[target].itemsize)
    copy = PlainCopy(SIZE, threads)
    compiled = program(source, target, elements)
    digests = np.zeros(1, np.uint64)
    addresses = np.array([data.ctypes.data], np.uint64), np.array([out.ctypes.data], np.uint64)
    times, copies = [], []

    def run():
        started = time.perf_counter()
        compiled.run(addresses[0], addresses[1] if writes else None, digests, threads=threads)
        times.append(time.perf_counter() - started)
        copies.append(copy.seconds())

    benchmark.pedantic(run, rounds=ROUNDS, warmup_rounds=1)
    if writes and source == target:
        assert np.array_equal(data, out)
    record(benchmark, SIZE, times, copies, threads=threads, what="copy+digest" if writes else "digest")
