"""The one interface of all swap modes. Order of calls:

1. mode = Mode(entries, ...)           plans nothing yet, changes nothing
2. mode.strides()                      how a slot stores each entry, for the plan
3. mode.bind(offsets, segments)        allocate, take over the tensors; again with a new publisher's segments
4. mode.destinations(slot)             where the moves of a slot are written
5. mode.activate(slot)                 with nobody reading; also to roll back
6. mode.close()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from weightsync.segment import Mapping, Segment
from weightsync.tensors import Entry

Uint64s = npt.NDArray[np.uint64]


class SwapMode(ABC):
    """`borrows_slots`: the publisher's slots themselves go live, nothing is copied. `is_separate`: the live weights lie
    outside the slots, so a slot may be refilled as soon as its version is live."""

    name: ClassVar[str]
    borrows_slots: ClassVar[bool] = False
    is_separate: ClassVar[bool] = False

    def __init__(
        self, entries: list[Entry], ignored: dict[str, torch.Tensor], slots: int, threads: int
    ) -> None:
        self.entries = entries
        self.ignored = ignored
        self.slots = slots
        self.threads = threads

    def strides(self) -> list[tuple[int, ...]]:
        """Byte strides of each entry in a slot; by default those of the live tensor."""
        return [byte_strides(entry.tensor) for entry in self.entries]

    @abstractmethod
    def bind(self, offsets: dict[int, int], segments: list[Segment]) -> None:
        """Allocate slots and take over the tensors. `offsets`: byte offset of each planned entry in the publisher's slot;
        `segments`: those slots (empty unless `borrows_slots`). Raises LayoutError, CapacityError."""

    @abstractmethod
    def destinations(self, slot: int) -> Uint64s:
        """Address of each entry's first element in `slot`."""

    def slot_memory(self) -> list[tuple[Segment, Mapping]]:
        """The slots themselves, where other members can read them; nothing if there are none of ours."""
        return []

    @abstractmethod
    def activate(self, slot: int) -> None:
        """Make `slot` live. Raises OSError or UsageError, having changed nothing."""

    @abstractmethod
    def close(self) -> None:
        """Give memory back; the live tensors keep the version they have, in memory of their own."""


def byte_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a tensor in bytes."""
    return tuple(step * tensor.element_size() for step in tensor.stride())


def find_doubled(entries: list[Entry]) -> list[str]:
    """Names of entries that write to memory which another entry (or they themselves) write too."""
    by_storage: dict[int, list[Entry]] = {}
    for entry in entries:
        if entry.tensor.numel():
            by_storage.setdefault(entry.tensor.untyped_storage().data_ptr(), []).append(entry)
    doubled = []
    for group in by_storage.values():
        if len(group) == 1 and group[0].tensor.is_contiguous():
            continue
        count = torch.zeros(group[0].tensor.untyped_storage().nbytes(), dtype=torch.uint8)
        for entry in group:
            tensor = entry.tensor
            item = tensor.element_size()
            painted = torch.zeros_like(count)
            bytes_ = painted.as_strided(
                (*tensor.shape, item), (*byte_strides(tensor), 1), int(tensor.storage_offset()) * item
            )
            bytes_.fill_(1)
            if int(painted.sum()) != tensor.numel() * item or bool((count & painted).any()):
                doubled.append(entry.names[0])
            count |= painted
    return doubled
