"""Rebind the tensors to the other slot: for eager servers that hold no addresses."""

from __future__ import annotations

import numpy as np
import torch

from weightsync.segment import Mapping, Segment
from weightsync.versioning.arena import Arena, rebind
from weightsync.versioning.swap.mode import SwapMode, Uint64s


class Flip(SwapMode):
    """Slots are segments with the model's own memory layout; the tensors' data moves from one to the other."""

    name = "flip"

    def bind(self, offsets: dict[int, int], segments: list[Segment]) -> None:
        if hasattr(self, "_mappings"):
            return
        arena = Arena(self.entries, self.ignored)
        self._offsets = np.array([arena.offset_of(entry) for entry in self.entries], np.uint64)
        self._segments = [Segment.create(f"weightsync-server-{s}", arena.size) for s in range(self.slots)]
        self._mappings: list[Mapping] = []
        for segment in self._segments:
            mapping = segment.map(writable=True)
            arena.copy_to(mapping)
            self._mappings.append(mapping)
        self._views: list[list[torch.Tensor | None]] = [arena.views(mapping) for mapping in self._mappings]
        rebind(self.entries, self._views[0])

    def destinations(self, slot: int) -> Uint64s:
        return self._offsets + np.uint64(self._mappings[slot].address)

    def slot_memory(self) -> list[tuple[Segment, Mapping]]:
        return list(zip(self._segments, self._mappings, strict=True))

    def activate(self, slot: int) -> None:
        rebind(self.entries, self._views[slot])

    def close(self) -> None:
        if hasattr(self, "_mappings"):
            for mapping in self._mappings:
                mapping.close()
            for segment in self._segments:
                segment.close()
            self._views = []
