"""The yardstick: a plain copy of the same bytes with the same threads, by the fastest loop we can write."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from weightsync import _native
from weightsync.cli.bench.yardstick import aligned_buffer
from weightsync.moves import View, ViewTable, contiguous_strides
from weightsync.tensors import dtype_name, find_tensors
from weightsync.types import DTYPES


class PlainCopyOf:
    """As `PlainCopy`, of the very tensors that are synced, one after the other, each cut between the threads."""

    def __init__(self, state: dict[str, torch.Tensor], threads: int = 2) -> None:
        entries = find_tensors(state)
        ends = np.cumsum([-(-entry.tensor.nbytes // 64) * 64 for entry in entries])
        dtypes = [DTYPES[dtype_name(entry.tensor.dtype)] for entry in entries]
        views = ViewTable([
            View(entry.names[0], entry.shape, entry.box, contiguous_strides(entry.shape, dtype.itemsize))
            for entry, dtype in zip(entries, dtypes, strict=True)
        ])  # fmt: skip
        table, _ = views.into_slot(
            np.arange(len(entries)), views.start, views.stop, ends - ends[0], source=dtypes, wire=dtypes
        )
        self._program = _native.Program(table)
        self._target = aligned_buffer(int(ends[-1]) + 64)
        self._sources = np.array([entry.tensor.data_ptr() for entry in entries], np.uint64)
        starts = np.concatenate([[0], ends[:-1]]).astype(np.uint64)
        self._targets = starts + np.uint64(self._target.ctypes.data)
        self.threads = threads

    def seconds(self) -> float:
        started = time.perf_counter()
        self._program.run(self._sources, self._targets, None, threads=self.threads)
        return time.perf_counter() - started


def record(benchmark: Any, size_bytes: int, times: list[float], copies: list[float], **more: Any) -> None:
    """Attach what every row carries: bytes, GiB/s, and the ratio to the plain copies taken in between."""
    pairs = np.array(times) / np.array(copies)
    benchmark.extra_info.update(
        bytes=size_bytes,
        median_s=float(np.median(times)),
        min_s=float(np.min(times)),
        p99_s=float(np.quantile(times, 0.99)),
        gib_per_s=size_bytes / 2**30 / float(np.median(times)),
        plain_copy_s=float(np.median(copies)),
        ratio=float(np.median(pairs)),
        ratio_of_minima=float(np.min(times) / np.min(copies)),
        wrong=0,
        **more,
    )
