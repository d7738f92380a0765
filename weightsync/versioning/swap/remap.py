"""Exchange the page tables of the live range and the back buffer: addresses stay, nothing is copied."""

from __future__ import annotations

import numpy as np

from weightsync.segment import Mapping, Segment
from weightsync.versioning.arena import Arena, rebind
from weightsync.versioning.pages import Pages
from weightsync.versioning.swap.mode import SwapMode, Uint64s


class Remap(SwapMode):
    """Slots are memfd segments with the model's own memory layout. Each has a permanent mapping that is written through,
    and pages that can be exchanged with the live range."""

    name = "remap"

    def bind(self, offsets: dict[int, int], segments: list[Segment]) -> None:
        if hasattr(self, "_pages"):
            return
        arena = Arena(self.entries, self.ignored)
        self._segments = [Segment.create(f"weightsync-server-{s}", arena.size) for s in range(self.slots)]
        self._wires: list[Mapping] = []
        for segment in self._segments:
            wire = segment.map(writable=True)
            arena.copy_to(wire)  # bytes that no version covers are the same in every slot
            self._wires.append(wire)
        self._offsets = np.array([arena.offset_of(entry) for entry in self.entries], np.uint64)
        self._pages = Pages(0, self._segments[0])
        for number, segment in enumerate(self._segments[1:], start=1):
            self._pages.add(number, segment, writable=True)
        rebind(self.entries, arena.views(self._pages.live))

    def destinations(self, slot: int) -> Uint64s:
        return self._offsets + np.uint64(self._wires[slot].address)

    def slot_memory(self) -> list[tuple[Segment, Mapping]]:
        return list(zip(self._segments, self._wires, strict=True))

    def activate(self, slot: int) -> None:
        self._pages.show(slot)

    def close(self) -> None:
        if hasattr(self, "_pages"):
            self._pages.close()
            for mapping in self._wires:
                mapping.close()
            for segment in self._segments:
                segment.close()
