"""No back buffer: bytes land in the tensors themselves. Only for a receiver that serves nobody, such as `pull`."""

from __future__ import annotations

import numpy as np

from weightsync.segment import Segment
from weightsync.versioning.swap.mode import SwapMode, Uint64s


class Direct(SwapMode):
    """One slot: the caller's own tensors, torn while a version is received. Never offered to servers."""

    name = "direct"

    def bind(self, offsets: dict[int, int], segments: list[Segment]) -> None:
        self._addresses = np.array([entry.tensor.data_ptr() for entry in self.entries], np.uint64)

    def destinations(self, slot: int) -> Uint64s:
        return self._addresses

    def activate(self, slot: int) -> None:
        """The bytes are where they belong already."""

    def close(self) -> None:
        """Nothing is ours."""
