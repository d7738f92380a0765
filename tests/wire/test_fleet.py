"""The coordinator's state machine, without sockets."""

import pytest

from weightsync.config import MEMBER_TIMEOUT_S
from weightsync.types import Box
from weightsync.wire import messages as m
from weightsync.wire.fleet import Fleet
from weightsync.wire.layout import TensorSpec, lay_out

EPOCH = 7
LAYOUT = lay_out([TensorSpec("w", "float32", (4,))], [(0, Box((0,), (4,)))], {})


def hello(
    name: str, instance: str | None = None, last_epoch: int = 0, holds: list[int] | None = None
) -> m.Hello:
    return m.Hello(name, instance or name, "server", "host", 1, "remap", last_epoch, holds)


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet(address="tcp://x", publisher="p", epoch=EPOCH, slots=2)
    made.register(LAYOUT, {"shm": {}})
    return made


def join(fleet: Fleet, name: str, now: float = 0.0) -> bytes:
    route = name.encode()
    fleet.receive(route, hello(name), now)
    return route


def publish(fleet: Fleet, version: int, now: float = 0.0) -> int:
    slot = fleet.free_slot()
    assert slot is not None
    fleet.begin(version, slot, version, now)
    fleet.seal(version, b"d", now)
    return slot


def sent(fleet: Fleet, route: bytes) -> list[object]:
    return [message for to, message in fleet.drain() if to == route]


def test_a_member_is_welcomed_with_the_layout_and_the_offers(fleet):
    route = join(fleet, "a")
    assert sent(fleet, route) == [m.Welcome(EPOCH, "p", LAYOUT, {"shm": {}})]


def test_a_member_that_came_before_the_layout_is_welcomed_later():
    fleet = Fleet(address="tcp://x", publisher="p", epoch=EPOCH, slots=2)
    route = join(fleet, "a")
    assert sent(fleet, route) == []
    fleet.register(LAYOUT, {})
    assert isinstance(sent(fleet, route)[0], m.Welcome)


def test_a_standing_pull_is_answered_by_the_next_version(fleet):
    route = join(fleet, "a")
    fleet.receive(route, m.Pull(EPOCH, 0), 0.0)
    sent(fleet, route)
    slot = publish(fleet, 1)
    assert sent(fleet, route) == [m.Announce(EPOCH, 1, slot, 1), m.Seal(EPOCH, 1, b"d")]


def test_a_late_joiner_gets_the_newest_sealed_version(fleet):
    publish(fleet, 1)
    publish(fleet, 2)
    route = join(fleet, "late")
    sent(fleet, route)
    fleet.receive(route, m.Pull(EPOCH, 0), 0.0)
    assert [type(x) for x in sent(fleet, route)] == [m.Announce, m.Seal]
    assert len(fleet.slots[1].leases) == 1


def test_a_leased_slot_is_never_free(fleet):
    route = join(fleet, "a")
    fleet.receive(route, m.Pull(EPOCH, 0), 0.0)
    first = publish(fleet, 1)
    publish(fleet, 2)
    assert fleet.free_slot() is None
    fleet.receive(route, m.Verified(EPOCH, 1, 0.1, "shm", False), 0.0)
    assert fleet.free_slot() == first


def test_the_newest_sealed_version_is_kept_for_late_joiners(fleet):
    publish(fleet, 1)
    second = publish(fleet, 2)
    assert fleet.free_slot() != second


def test_a_pinned_slot_is_not_evicted_but_a_reading_one_is(fleet):
    reader, adopter = join(fleet, "reader"), join(fleet, "adopter")
    for route in (reader, adopter):
        fleet.receive(route, m.Pull(EPOCH, 0), 0.0)
    publish(fleet, 1)
    fleet.receive(adopter, m.Verified(EPOCH, 1, 0.1, "shm", True), 0.0)
    publish(fleet, 2)
    assert fleet.evict() is None
    fleet.receive(adopter, m.Release(EPOCH, 1), 0.0)
    sent(fleet, reader)
    assert fleet.evict() is not None
    assert fleet.free_slot() is not None


def test_an_evicted_reader_is_told(fleet):
    route = join(fleet, "a")
    fleet.receive(route, m.Pull(EPOCH, 0), 0.0)
    publish(fleet, 1)
    publish(fleet, 2)
    sent(fleet, route)
    fleet.evict()
    assert isinstance(sent(fleet, route)[0], m.Abort)


def test_a_silent_member_loses_its_reading_lease_but_not_a_pinned_one(fleet):
    reader, adopter = join(fleet, "reader"), join(fleet, "adopter")
    for route in (reader, adopter):
        fleet.receive(route, m.Pull(EPOCH, 0), 0.0)
    slot = publish(fleet, 1)
    fleet.receive(adopter, m.Verified(EPOCH, 1, 0.1, "shm", True), 0.0)
    fleet.tick(MEMBER_TIMEOUT_S + 1)
    assert fleet.members == {}
    assert fleet.slots[slot].leases == {"adopter": "pinned"}
    fleet.gone("adopter")
    assert fleet.slots[slot].leases == {}


def test_a_reconnecting_member_keeps_its_pinned_slot(fleet):
    adopter = join(fleet, "adopter")
    fleet.receive(adopter, m.Pull(EPOCH, 0), 0.0)
    slot = publish(fleet, 1)
    fleet.receive(adopter, m.Verified(EPOCH, 1, 0.1, "shm", True), 0.0)
    fleet.receive(b"new-route", hello("adopter", last_epoch=EPOCH, holds=[1]), 1.0)
    assert list(fleet.members) == [b"new-route"]
    assert fleet.slots[slot].leases == {"adopter": "pinned"}


@pytest.mark.parametrize(
    "again", [{"last_epoch": EPOCH, "holds": []}, {"last_epoch": EPOCH - 1, "holds": [1]}]
)
def test_a_reconnecting_member_lets_go_of_what_it_does_not_hold_any_more(fleet, again):
    adopter = join(fleet, "adopter")
    fleet.receive(adopter, m.Pull(EPOCH, 0), 0.0)
    slot = publish(fleet, 1)
    fleet.receive(adopter, m.Verified(EPOCH, 1, 0.1, "shm", True), 0.0)
    fleet.tick(MEMBER_TIMEOUT_S + 1)
    fleet.receive(b"new-route", hello("adopter", **again), 10.0)
    assert fleet.slots[slot].leases == {}


def test_a_slot_that_may_go_live_at_a_member_is_not_evicted_nor_lost_in_silence(fleet):
    fleet.receive(b"a", hello("adopter", last_epoch=EPOCH, holds=[]), 0.0)
    fleet.receive(b"a", m.Pull(EPOCH, 0), 0.0)
    slot = publish(fleet, 1)
    publish(fleet, 2)
    assert fleet.evict() is None
    fleet.tick(MEMBER_TIMEOUT_S + 1)
    assert fleet.slots[slot].leases == {"adopter": "pinned"}


def test_a_second_hello_on_one_connection_replaces_the_first(fleet):
    route = join(fleet, "a")
    fleet.receive(route, m.Pull(EPOCH, 0), 0.0)
    slot = publish(fleet, 1)
    fleet.receive(route, hello("b"), 0.0)
    assert [member.label for member in fleet.members.values()] == ["b"]
    assert fleet.slots[slot].leases == {}


def test_an_unknown_member_is_asked_to_say_hello(fleet):
    fleet.receive(b"x", m.Heartbeat(EPOCH, None, "serving", "shm"), 0.0)
    assert sent(fleet, b"x") == [m.Unknown(EPOCH)]


def test_a_message_of_an_older_epoch_changes_nothing(fleet):
    route = join(fleet, "a")
    sent(fleet, route)
    fleet.receive(route, m.Live(EPOCH - 1, 3, 0.0), 0.0)
    assert fleet.members[route].live_version is None
    assert sent(fleet, route) == [m.Unknown(EPOCH)]


def test_a_member_of_a_newer_epoch_fences_this_publisher(fleet):
    fleet.receive(b"x", hello("x", last_epoch=EPOCH + 1), 0.0)
    assert fleet.fenced_by is not None and str(EPOCH + 1) in fleet.fenced_by


def test_two_members_of_one_name_get_different_labels(fleet):
    for instance in ("one", "two", "three"):
        fleet.receive(instance.encode(), hello("same", instance), 0.0)
    assert len({member.label for member in fleet.members.values()}) == 3


def test_a_record_knows_who_is_missing_and_who_was_lost(fleet):
    a, b = join(fleet, "a"), join(fleet, "b")
    publish(fleet, 1)
    fleet.receive(a, m.Live(EPOCH, 1, 0.001), 2.0)
    record = fleet.record(1)
    assert record is not None
    assert record.missing("live") == ["b"]
    fleet.receive(b, m.Bye(EPOCH), 2.0)
    assert record.missing("live") == [] and record.lost == {"b"}
    assert record.reached("live") == 2.0


def test_a_member_that_skipped_a_version_counts_as_live_with_a_newer_one(fleet):
    route = join(fleet, "a")
    publish(fleet, 1)
    publish(fleet, 2)
    fleet.receive(route, m.Live(EPOCH, 2, 0.0), 1.0)
    record = fleet.record(1)
    assert record is not None and record.missing("live") == []


def test_an_aborted_version_frees_its_slot_and_tells_its_readers(fleet):
    route = join(fleet, "a")
    fleet.receive(route, m.Pull(EPOCH, 0), 0.0)
    sent(fleet, route)
    fleet.begin(1, 0, 1, 0.0)
    fleet.abort(1, "staging failed")
    assert [type(x) for x in sent(fleet, route)] == [m.Announce, m.Abort]
    assert fleet.slots[0].version == 0 and not fleet.slots[0].leases


def test_records_are_bounded(fleet):
    for version in range(1, 500):
        publish(fleet, version)
    assert len(fleet.records) < 100


def test_a_version_that_every_adopter_refused_makes_room_for_the_next(fleet):
    fleet.receive(b"a", hello("adopter", last_epoch=EPOCH, holds=[]), 0.0)
    fleet.receive(b"a", m.Pull(EPOCH, 0), 0.0)
    publish(fleet, 1)
    fleet.receive(b"a", m.Verified(EPOCH, 1, 0.1, "shm", True), 0.0)
    fleet.receive(b"a", m.Pull(EPOCH, 1), 0.0)
    refused = publish(fleet, 2)
    assert fleet.free_slot() is None
    fleet.receive(b"a", m.Failed(EPOCH, 2, "its bytes are wrong"), 0.0)
    assert fleet.take_slot() == refused
    fleet.receive(b"b", hello("late"), 0.0)
    sent(fleet, b"b")
    fleet.receive(b"b", m.Pull(EPOCH, 1), 0.0)
    assert sent(fleet, b"b") == [], "a slot that was taken is offered to nobody"


def test_a_late_joiner_is_remembered_and_waited_for_by_nobody(fleet):
    early = join(fleet, "early")
    publish(fleet, 1)
    fleet.receive(early, m.Live(EPOCH, 1, 0.0), 1.0)
    late = join(fleet, "late", 50.0)
    record = fleet.record(1)
    assert record is not None and record.missing("live") == []
    fleet.receive(late, m.Live(EPOCH, 1, 0.0), 60.0)
    fleet.receive(late, m.Bye(EPOCH), 61.0)
    assert record.members["late"].live_s == 60.0
    assert record.reached("live") == 1.0
