"""The yardstick: a plain copy of as many bytes with as many threads, by the fastest loop we can write."""

from __future__ import annotations

import time

import numpy as np

from weightsync import _native


def aligned_buffer(size_bytes: int) -> np.ndarray:
    """A populated uint8 buffer that starts at a page, as slots do."""
    raw = np.ones(size_bytes + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + size_bytes]


class PlainCopy:
    """Two populated buffers; `seconds()` is one copy from the first to the second."""

    def __init__(self, size_bytes: int, threads: int = 2) -> None:
        self._source, self._target = aligned_buffer(size_bytes), aligned_buffer(size_bytes)
        self.threads = threads

    def seconds(self) -> float:
        started = time.perf_counter()
        _native.memory_copy(
            self._target.ctypes.data, self._source.ctypes.data, len(self._source), self.threads
        )
        return time.perf_counter() - started
