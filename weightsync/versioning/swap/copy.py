"""Copy the back buffer over the live tensors, in place: for storage that an engine owns."""

from __future__ import annotations

import numpy as np

from weightsync import _native
from weightsync.config import TENSOR_ALIGNMENT
from weightsync.errors import UsageError
from weightsync.moves import Int64s, View, ViewTable, contiguous_strides
from weightsync.segment import Mapping, Segment, round_up
from weightsync.tensors import dtype_name
from weightsync.types import DTYPES
from weightsync.versioning.swap.mode import SwapMode, Uint64s, byte_strides


class Copy(SwapMode):
    """Slots are compact back buffers; the live tensors stay where they are. One back buffer less than `slots`, since the
    live weights are one of them."""

    name = "copy"
    is_separate = True

    def strides(self) -> list[tuple[int, ...]]:
        return [contiguous_strides(entry.box.shape, entry.tensor.element_size()) for entry in self.entries]

    def bind(self, offsets: dict[int, int], segments: list[Segment]) -> None:
        self._planned = np.array(sorted(offsets), np.int64)
        if hasattr(self, "_mappings"):
            return
        places = []
        end = 0
        for entry in self.entries:
            places.append(end)
            end = round_up(end + entry.tensor.numel() * entry.tensor.element_size(), TENSOR_ALIGNMENT)
        self._offsets = np.array(places, np.uint64)
        self._segments = [
            Segment.create(f"weightsync-server-{s}", end) for s in range(max(1, self.slots - 1))
        ]
        self._mappings: list[Mapping] = [segment.map(writable=True) for segment in self._segments]
        self._filled = [self._planned] * len(self._segments)
        self._signature: list[object] = []

    def destinations(self, slot: int) -> Uint64s:
        self._filled[slot] = self._planned  # another publisher may send other tensors
        return self._addresses(slot)

    def _addresses(self, slot: int) -> Uint64s:
        return self._offsets + np.uint64(self._mappings[slot].address)

    def slot_memory(self) -> list[tuple[Segment, Mapping]]:
        return list(zip(self._segments, self._mappings, strict=True))

    def activate(self, slot: int) -> None:
        planned = self._filled[slot]
        tensors = [self.entries[number].tensor for number in planned]
        signature: list[object] = [
            planned.tobytes(),
            *((tuple(t.shape), t.dtype, t.stride()) for t in tensors),
        ]
        if signature != self._signature:
            self._compile(planned, signature)
        targets = np.fromiter((tensor.data_ptr() for tensor in tensors), np.uint64, len(tensors))
        self._program.run(self._addresses(slot)[planned], targets, None, threads=self.threads)

    def _compile(self, planned: Int64s, signature: list[object]) -> None:
        views, wires = [], []
        for number in planned:
            entry = self.entries[number]
            if tuple(entry.tensor.shape) != entry.box.shape:
                raise UsageError(
                    f"{entry.names[0]}: its shape changed to {list(entry.tensor.shape)} since start()"
                )
            views.append(View(entry.names[0], entry.shape, entry.box, byte_strides(entry.tensor)))
            wires.append(DTYPES[dtype_name(entry.tensor.dtype)])
        live = ViewTable(views)
        table, _ = live.out_of_slot(
            np.arange(len(views)), live.start, live.stop, np.zeros(len(views), np.int64), wire=wires
        )
        self._program = _native.Program(table)
        self._signature = signature

    def close(self) -> None:
        if hasattr(self, "_mappings"):
            for mapping in self._mappings:
                mapping.close()
            for segment in self._segments:
                segment.close()
