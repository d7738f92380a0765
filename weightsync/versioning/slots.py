"""The states of a server's slots, and the only moves between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.errors import UsageError


class SlotState(Enum):
    EMPTY = "empty"
    FILLING = "filling"
    VERIFIED = "verified"
    ACTIVE = "active"
    RETIRED = "retired"
    FAILED = "failed"


TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.EMPTY: frozenset({SlotState.FILLING}),
    SlotState.FILLING: frozenset({SlotState.VERIFIED, SlotState.FAILED, SlotState.EMPTY}),
    SlotState.VERIFIED: frozenset({SlotState.ACTIVE, SlotState.EMPTY}),
    SlotState.ACTIVE: frozenset({SlotState.RETIRED}),
    SlotState.RETIRED: frozenset({SlotState.ACTIVE, SlotState.EMPTY}),
    SlotState.FAILED: frozenset({SlotState.EMPTY}),
}
"""Every legal move; RETIRED to ACTIVE is a rollback."""


@dataclass(slots=True)
class Slot:
    """One slot: what it holds, the recipe of the plan it came by, and the digests it was verified against (one per move)."""

    state: SlotState = SlotState.EMPTY
    epoch: int = 0
    version: int = 0
    digests: npt.NDArray[np.uint64] | None = None
    recipe: Any = None


class SlotTable:
    """The slots of one subscriber. Not locked; its owner is. `keep`: retired slots that are not refilled, for rollback.
    `bad`: (epoch, version) of what was rolled back, and must never be made live."""

    def __init__(self, count: int, *, keep: int = 0) -> None:
        self.keep = keep
        self.bad: set[tuple[int, int]] = set()
        self.slots = [Slot() for _ in range(count)]

    def move(self, number: int, to: SlotState) -> None:
        """Change a slot's state; raises UsageError for a move that is not in TRANSITIONS."""
        slot = self.slots[number]
        if to not in TRANSITIONS[slot.state]:
            raise UsageError(
                f"slot {number} with version {slot.version}: {slot.state.value} can't become {to.value}"
            )
        slot.state = to
        if to is SlotState.EMPTY:
            self.slots[number] = Slot()

    def forget(self) -> None:
        """All slots are new and empty: the memory they described is gone."""
        self.slots = [Slot() for _ in self.slots]

    def find(self, state: SlotState) -> list[int]:
        """Slots in `state`, oldest version first."""
        found = [number for number, slot in enumerate(self.slots) if slot.state is state]
        return sorted(found, key=lambda number: (self.slots[number].epoch, self.slots[number].version))

    def is_bad(self, number: int) -> bool:
        """Whether what is in the slot was rolled back."""
        return (self.slots[number].epoch, self.slots[number].version) in self.bad

    def has_room(self) -> bool:
        """Whether `take` would succeed."""
        return bool(self.find(SlotState.EMPTY)) or len(self.find(SlotState.RETIRED)) > self.keep

    def take(self, epoch: int, version: int) -> int:
        """A slot to fill: an empty one, else the one retired longest ago, else one whose version no step has made live
        (a newer one is better). It is FILLING from here on."""
        empty = self.find(SlotState.EMPTY)
        if not empty:
            retired, pending = self.find(SlotState.RETIRED), self.find(SlotState.VERIFIED)
            spare = [*retired, *pending] if len(retired) > self.keep else [*pending, *retired]
            if not spare:
                raise UsageError("no slot is free")
            self.move(spare[0], SlotState.EMPTY)
            empty = spare[:1]
        self.take_this(empty[0], epoch, version)
        return empty[0]

    def take_this(self, number: int, epoch: int, version: int) -> None:
        """Start filling this very slot."""
        self.move(number, SlotState.FILLING)
        self.slots[number].epoch, self.slots[number].version = epoch, version

    def activate(self, number: int) -> None:
        """The slot's version goes live; the one before is retired."""
        for active in self.find(SlotState.ACTIVE):
            self.move(active, SlotState.RETIRED)
        self.move(number, SlotState.ACTIVE)
