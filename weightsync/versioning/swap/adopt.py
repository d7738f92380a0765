"""Exchange the live range onto the publisher's own read-only slot: no byte moves on the server at all."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from weightsync.errors import LayoutError
from weightsync.moves import contiguous_strides
from weightsync.segment import Mapping, Segment
from weightsync.versioning.arena import Arena, rebind
from weightsync.versioning.pages import Pages
from weightsync.versioning.swap.mode import SwapMode, Uint64s

_OWN = "own"


class Adopt(SwapMode):
    """The live tensors take the publisher's slot layout (contiguous), at first in memory of their own. They are read-only
    while a slot is live: writing to one ends the process with a segmentation fault."""

    name = "adopt"
    borrows_slots = True

    def strides(self) -> list[tuple[int, ...]]:
        return [contiguous_strides(entry.box.shape, entry.tensor.element_size()) for entry in self.entries]

    def bind(self, offsets: dict[int, int], segments: list[Segment]) -> None:
        if hasattr(self, "_pages"):
            self._follow(offsets, segments)
            return
        Arena(self.entries, self.ignored)  # refuses what can't be rebound safely
        own = Segment.create("weightsync-server-own", segments[0].size)
        self._pages = Pages((0, _OWN), own)
        own.close()
        views = self._views(offsets)
        for entry, view in zip(self.entries, views, strict=True):
            if view is not None:
                view.copy_(entry.tensor)
        rebind(self.entries, views)
        self._offsets = offsets
        self._life = 0
        self._add(segments)

    def _follow(self, offsets: dict[int, int], segments: list[Segment]) -> None:
        """A new publisher: the live content stays until its first version is live."""
        if offsets != self._offsets or segments[0].size != self._pages.size:
            raise LayoutError(
                "the publisher's layout changed; swap=\"adopt\" can't follow that, restart this server"
            )
        self._life += 1
        self._add(segments)

    def _add(self, segments: list[Segment]) -> None:
        self._wires: list[Mapping] = [segment.map(writable=False) for segment in segments]
        for number, segment in enumerate(segments):
            self._pages.add((self._life, number), segment, writable=False)
        self._drop_older()

    def _drop_older(self) -> None:
        for key in self._pages.spare_keys():
            if isinstance(key, tuple) and (key[0] != self._life or key[1] == _OWN):
                self._pages.drop(key)

    def _views(self, offsets: dict[int, int]) -> list[torch.Tensor | None]:
        views: list[torch.Tensor | None] = []
        for number, entry in enumerate(self.entries):
            tensor = entry.tensor
            if number not in offsets or not tensor.numel():
                views.append(None)
                continue
            size = tensor.numel() * tensor.element_size()
            raw = torch.frombuffer(
                self._pages.live.buffer, dtype=torch.uint8, count=size, offset=offsets[number]
            )
            views.append(raw.view(tensor.dtype).view(tensor.shape))
        return views

    def destinations(self, slot: int) -> Uint64s:
        offsets = np.array([self._offsets.get(number, 0) for number in range(len(self.entries))], np.uint64)
        return offsets + np.uint64(self._wires[slot].address)

    def activate(self, slot: int) -> None:
        self._pages.show((self._life, slot))
        self._drop_older()

    def close(self) -> None:
        """The live version is copied to memory of our own first: the publisher may reuse its slot after this."""
        if not hasattr(self, "_pages"):
            return
        key = self._pages.live_key
        if isinstance(key, tuple) and key[1] != _OWN:
            own = Segment.create("weightsync-server-own", self._pages.size)
            target = own.map(writable=True)
            ctypes.memmove(target.address, self._pages.live.address, self._pages.size)
            self._pages.add((self._life, _OWN), own, writable=True)
            self._pages.show((self._life, _OWN))
            target.close()
            own.close()
        self._pages.close()
        for wire in self._wires:
            wire.close()
