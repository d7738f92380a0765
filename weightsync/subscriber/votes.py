"""This rank's part in its replica: what it holds, what it voted for, and which slots it must not give away."""

from __future__ import annotations

from weightsync.errors import UsageError
from weightsync.standing import Ballot, key_of, of_key
from weightsync.versioning.commit import RankCommit
from weightsync.versioning.slots import Slot, SlotState, SlotTable
from weightsync.wire import messages as m
from weightsync.wire.ballots import ballot_of_wire, stand_of


class Votes:
    """Not locked; the receiver's lock guards it. `is_separate`: the live weights lie outside the slots. `is_whole`: this rank
    is all of its replica.

    While `is_voting` is false (alone, with the policy `each`) versions go live without a vote.
    """

    def __init__(self, is_separate: bool, is_whole: bool, live: int | None) -> None:
        self.is_voting = False
        self._is_separate, self._is_whole = is_separate, is_whole
        self._live: tuple[int, int] | None = None if live is None else (0, live)
        self.commit = RankCommit(None if live is None else key_of(0, live))

    # ---- the coordinator's orders

    def start_over(self) -> None:
        """What is held is not what it was: the next welcome takes stock. Only for the whole of a replica."""
        self.is_voting = False

    def enter(self, session: int, table: SlotTable) -> None:
        """A welcome: votes count under this session; 0: none are needed."""
        if session and not self.is_voting:  # until now nobody kept account of what is here
            self.commit = RankCommit(None if self._live is None else key_of(*self._live))
            for slot in table.slots:
                if (
                    slot.state in (SlotState.VERIFIED, SlotState.RETIRED, SlotState.ACTIVE)
                    and slot.version >= 0
                ):
                    self.commit.verified(key_of(slot.epoch, slot.version))
        self.is_voting = bool(session)
        if session:
            self.commit.enter(session)

    def take(self, order: m.Admit | m.Grant | m.Commit | m.Cancel) -> None:
        """One order of the coordinator."""
        match order:
            case m.Admit():
                self.commit.enter(order.session)
            case m.Grant():
                self.commit.on_grant(order.session, ballot_of_wire(order.ballot))
            case m.Commit():
                self.commit.on_commit(order.session, ballot_of_wire(order.ballot))
            case m.Cancel():
                self.commit.on_cancel(order.session, ballot_of_wire(order.ballot))

    def grant(self, announce: m.Announce, table: SlotTable, *, is_idle: bool) -> bool:
        """Whether an announced version must be read now."""
        key = key_of(announce.epoch, announce.version)
        if key not in self.commit.complete and self.spare_slot(table, is_idle=is_idle) is None:
            return False
        return self.commit.on_grant(self.commit.session, Ballot(announce.ballot, key))

    def stand(self, epoch: int, has_room: bool) -> m.Stand:
        """Where this rank stands."""
        return stand_of(epoch, self.commit.standing(has_room=has_room))

    # ---- slots

    def spare_slot(self, table: SlotTable, *, is_idle: bool) -> int | None:
        """A slot to fill: an empty one, else the oldest that the replica can't need. `is_idle`: no step follows what was
        decided, so that who is the whole of his replica may make way for a newer version."""
        found = [*table.find(SlotState.EMPTY)]
        retired, pending = table.find(SlotState.RETIRED), table.find(SlotState.VERIFIED)
        spare = [*retired, *pending] if len(retired) > table.keep else [*pending, *retired]
        found += [number for number in spare if self.may_refill(table.slots[number])]
        if is_idle and self._is_whole and self.commit.ready is not None:
            decided = of_key(self.commit.ready.version)
            found += [n for n in pending if (table.slots[n].epoch, table.slots[n].version) == decided]
        return found[0] if found else None

    def take_slot(self, table: SlotTable, epoch: int, version: int, *, is_idle: bool) -> int:
        """Start filling `spare_slot`. Raises UsageError if there is none."""
        number = self.spare_slot(table, is_idle=is_idle)
        if number is None:
            raise UsageError("no slot is free")
        if not self.may_refill(table.slots[number]):
            self.commit.give_up()
        if table.slots[number].state is not SlotState.EMPTY:
            table.move(number, SlotState.EMPTY)
        table.take_this(number, epoch, version)
        self.forget_absent(table)
        return number

    def forget_absent(self, table: SlotTable) -> None:
        """What is neither in a slot nor live is not held any more."""
        held = {
            key_of(slot.epoch, slot.version)
            for slot in table.slots
            if slot.state in (SlotState.VERIFIED, SlotState.ACTIVE, SlotState.RETIRED) and slot.version >= 0
        }
        for key in self.commit.complete - held:
            if self.commit.may_drop(key):
                self.commit.dropped(key)

    def verified(self, epoch: int, version: int) -> None:
        if self.is_voting:
            self.commit.verified(key_of(epoch, version))

    def refuse(self, epoch: int, version: int) -> None:
        if self.is_voting:
            self.commit.refuse(key_of(epoch, version))

    # ---- at a step boundary

    def ordered(self, number: int) -> tuple[int, int] | None:
        """Epoch and version to make live at this boundary, if ballot `number` says so."""
        key = self.commit.order(number)
        return None if key is None else of_key(key)

    def went_live(self, epoch: int, version: int, number: int) -> None:
        """By ballot `number`; 0: without a vote."""
        self._live = (epoch, version)
        if number:
            self.commit.switched(number)

    def may_refill(self, slot: Slot) -> bool:
        """Whether the replica can't need what is in it."""
        key, live = key_of(slot.epoch, slot.version), self.commit.live
        if self._is_separate and live is not None and live.version == key:
            return True  # what serves is a copy of it
        return self.commit.may_drop(key)
