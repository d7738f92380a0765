"""The states of a server's slots."""

import itertools

import pytest

from weightsync.errors import UsageError
from weightsync.versioning.slots import TRANSITIONS, Slot, SlotState, SlotTable


@pytest.mark.parametrize(("before", "after"), list(itertools.product(SlotState, SlotState)))
def test_only_the_listed_moves_are_legal(before, after):
    table = SlotTable(1)
    table.slots[0] = Slot(before, 1, 1)
    if after in TRANSITIONS[before]:
        table.move(0, after)
        assert table.slots[0].state is after
    else:
        with pytest.raises(UsageError, match=f"{before.value} can't become {after.value}"):
            table.move(0, after)


def test_an_empty_slot_is_filled_before_a_retired_one():
    table = SlotTable(2)
    table.slots[0] = Slot(SlotState.RETIRED, 1, 1)
    assert table.take(1, 2) == 1


def test_the_oldest_retired_slot_is_refilled_first():
    table = SlotTable(3)
    table.slots = [Slot(SlotState.RETIRED, 1, 5), Slot(SlotState.ACTIVE, 1, 6), Slot(SlotState.RETIRED, 1, 4)]
    assert table.take(1, 7) == 2


def test_slots_kept_for_rollback_are_not_offered():
    table = SlotTable(2, keep=1)
    table.slots = [Slot(SlotState.RETIRED, 1, 5), Slot(SlotState.ACTIVE, 1, 6)]
    assert not table.has_room()


def test_going_live_retires_the_one_before():
    table = SlotTable(2)
    table.slots = [Slot(SlotState.ACTIVE, 1, 1), Slot(SlotState.VERIFIED, 1, 2)]
    table.activate(1)
    assert [slot.state for slot in table.slots] == [SlotState.RETIRED, SlotState.ACTIVE]
    table.activate(0)  # a rollback
    assert [slot.state for slot in table.slots] == [SlotState.ACTIVE, SlotState.RETIRED]


def test_no_slot_free_is_an_error():
    table = SlotTable(1)
    table.take(1, 1)
    with pytest.raises(UsageError, match="no slot is free"):
        table.take(1, 2)


def test_a_pending_version_makes_way_before_one_that_is_kept_for_rollback():
    table = SlotTable(3, keep=1)
    table.slots = [
        Slot(SlotState.RETIRED, 1, 5),
        Slot(SlotState.ACTIVE, 1, 6),
        Slot(SlotState.VERIFIED, 1, 7),
    ]
    assert table.take(1, 8) == 2
