"""Which version serves, and every way to another one: the newest verified, the one a replica decided, or back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weightsync.errors import NotReadyError, UsageError, VersionError, WeightSyncError
from weightsync.subscriber.session import Recipe
from weightsync.subscriber.votes import Votes
from weightsync.versioning.slots import SlotState, SlotTable
from weightsync.versioning.swap.mode import SwapMode
from weightsync.wire import messages as m

After = Callable[[], None] | None


@dataclass(frozen=True, slots=True)
class Live:
    """The version that serves: its label, and the digests it must have (one for each move of its recipe's plan)."""

    epoch: int
    version: int
    digests: np.ndarray | None = None
    recipe: Recipe | None = None


class Switch:
    """Every method that changes what serves is called with no step open. What they return is to be called after the gate
    has reopened. `changed` guards the slots and the votes; `send` queues a message to the coordinator."""

    def __init__(
        self,
        mode: SwapMode,
        table: SlotTable,
        votes: Votes,
        live: Live | None,
        *,
        changed: threading.Condition,
        send: Callable[[m.FromMember], None],
        stand: Callable[[], None],
        on_live: Callable[[int, float], None],
        on_failed: Callable[[int, WeightSyncError], None],
    ) -> None:
        self.live = live
        self._mode, self._table, self._votes = mode, table, votes
        self._changed, self._send, self._stand = changed, send, stand
        self._on_live, self._on_failed = on_live, on_failed

    def swap(self) -> After:
        """At a step boundary of a server that decides alone, or that is the whole of its replica."""
        with self._changed:
            if self._votes.is_voting:
                return self._follow(self._votes.commit.proposal)
            number = self._newest()
            return None if number is None else self._make_live(number)

    def follow(self, number: int) -> After:
        """At a step boundary where the whole replica switches to ballot `number`. Raises VersionError and serves no step
        any more if that can't be done here."""
        with self._changed:
            return self._follow(number)

    def undo(self, epoch: int, version: int) -> bool:
        """A version is bad: what waits of it is dropped. Whether it serves, so that the next boundary should go back."""
        with self._changed:
            self._table.bad.add((epoch, version))
            for number in self._table.find(SlotState.VERIFIED):
                if self._table.is_bad(number):
                    self._drop(number)
            self._changed.notify_all()
            return self._is_live_bad()

    @property
    def is_stranded(self) -> bool:
        """A version that was rolled back serves, and nothing is held to go to instead."""
        with self._changed:
            return self._is_live_bad() and self._newest() is None

    def back(self) -> int:
        """Make the version before the live one live again, and never this one. Raises UsageError if none is held."""
        with self._changed:
            before = self.live
            self._make_live(self._previous())
            if before is not None:
                self._table.bad.add((before.epoch, before.version))
            return self.label("none")

    def label(self, last_error: str | None) -> int:
        """The live version. Raises NotReadyError before the first."""
        if self.live is None:
            raise NotReadyError(f"no version could be made live yet: {last_error or 'none was received'}")
        return self.live.version

    # ---- called locked

    def _newest(self) -> int | None:
        verified = self._table.find(SlotState.VERIFIED)
        if verified:
            return verified[-1]
        return self._older() if self._is_live_bad() else None

    def _follow(self, number: int) -> After:
        target = self._votes.ordered(number)
        if target is None:
            self._stand()
            if self._votes.commit.poisoned is not None:
                raise VersionError(self._votes.commit.poisoned)
            return None
        places = (SlotState.VERIFIED, SlotState.RETIRED)
        slots = enumerate(self._table.slots)
        found = [n for n, s in slots if s.state in places and (s.epoch, s.version) == target]
        if not found:
            self._votes.commit.poison(f"version {target[1]} was decided, and is not held here")
            raise VersionError(f"version {target[1]} was decided by the replica, and is not held here")
        return self._make_live(found[0], number)

    def _make_live(self, number: int, ballot: int = 0) -> After:
        slot, started = self._table.slots[number], time.perf_counter()
        is_back = slot.state is SlotState.RETIRED
        try:
            self._mode.activate(number)
        except (OSError, WeightSyncError) as error:
            return self._failed(number, ballot, error)
        if not self._mode.is_separate:
            self._table.activate(number)
        elif not is_back:
            self._table.activate(number)
            self._table.move(number, SlotState.RETIRED)
        self.live = live = Live(slot.epoch, slot.version, slot.digests, slot.recipe)
        pause = time.perf_counter() - started
        self._votes.went_live(live.epoch, live.version, ballot)
        if not ballot and not is_back:
            for pending in self._table.find(SlotState.VERIFIED):
                self._drop(pending)
        if self._mode.borrows_slots:
            retired = self._table.find(SlotState.RETIRED)
            for old in retired[: max(0, len(retired) - self._table.keep)]:
                self._drop(old)
        self._votes.forget_absent(self._table)
        self._send(m.Live(live.epoch, live.version, pause))
        self._stand()
        self._changed.notify_all()
        return lambda: self._on_live(live.version, pause)

    def _failed(self, number: int, ballot: int, error: Exception) -> After:
        slot = self._table.slots[number]
        failure = VersionError(
            f"version {slot.version} could not be made live, the one before still is: {error}"
        )
        self._send(m.Failed(slot.epoch, slot.version, str(failure)))
        if ballot:
            self._votes.commit.poison(str(failure))
            raise failure
        if slot.state is SlotState.RETIRED:
            raise error
        self._drop(number)
        self._changed.notify_all()
        return lambda: self._on_failed(slot.version, failure)

    def _previous(self) -> int:
        if self.live is None:
            raise NotReadyError("there is no live version to roll back from")
        number = self._older()
        if number is None:
            raise UsageError(
                f"no version before {self.live.version} is held any more (its slot is being refilled); slots=3 keeps one"
                + (', slots=4 with swap="copy"' if self._mode.is_separate else "")
            )
        return number

    def _older(self) -> int | None:
        """The slot of the newest version before the live one that was not rolled back."""
        live = self.live
        for number in reversed(self._table.find(SlotState.RETIRED)):
            slot = self._table.slots[number]
            is_older = live is not None and (slot.epoch, slot.version) < (live.epoch, live.version)
            if is_older and slot.version >= 0 and not self._table.is_bad(number):
                return number
        return None

    def _is_live_bad(self) -> bool:
        return self.live is not None and (self.live.epoch, self.live.version) in self._table.bad

    def _drop(self, number: int) -> None:
        """Forget a slot's content; a borrowed one goes back to the publisher."""
        slot = self._table.slots[number]
        self._table.move(number, SlotState.EMPTY)
        if self._mode.borrows_slots:
            self._send(m.Release(slot.epoch, slot.version))
