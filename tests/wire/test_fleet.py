"""The coordinator's state machine, without sockets."""

import numpy as np
import pytest

from tests.wire.scene import EPOCH, Scene, W, hello, layout_of, whole
from weightsync.config import MEMBER_TIMEOUT_S
from weightsync.wire import messages as m


@pytest.fixture
def scene() -> Scene:
    return Scene.opened(whole(W))


def kinds(messages: list[m.ToMember]) -> list[type]:
    return [type(message) for message in messages]


def verified(scene: Scene, route: bytes, version: int, *, holds_lease: bool = False) -> None:
    scene.tell(route, m.Verified(EPOCH, version, 0.1, "shm", holds_lease))


def leases(scene: Scene, slot: int) -> dict[str, str]:
    return scene.fleet.books.versions.slots[slot].leases


def test_a_member_is_welcomed_with_the_catalogue_and_the_offers(scene):
    route = scene.join("a", pulls=False)
    catalogue = layout_of(whole(W)).catalogue
    assert scene.take(route) == [m.Welcome(EPOCH, "p", catalogue, [{"shm": {"of": "0"}}])]


def test_a_member_that_came_before_the_slots_is_welcomed_later():
    scene = Scene(whole(W))
    route = scene.join("a", pulls=False)
    scene.enlist(0)
    assert scene.take(route) == []
    scene.offer(0)
    assert kinds(scene.take(route)) == [m.Welcome]


def test_a_member_that_says_what_it_wants_gets_a_plan(scene):
    route = scene.join("a", pulls=False)
    scene.take(route)
    scene.want(route, whole(W))
    (plan,) = scene.take(route)
    assert isinstance(plan, m.Plan)
    assert (plan.ranks, plan.wants, plan.offsets) == (bytes(4), bytes(4), bytes(8))


def test_a_standing_pull_is_answered_by_the_next_version(scene):
    route = scene.join("a")
    scene.take(route)
    slot = scene.publish(1)
    assert scene.take(route) == [
        m.Announce(EPOCH, 1, slot, 1),
        m.Seal(EPOCH, 1, np.array([10**6], "<u8").tobytes()),
    ]


def test_a_version_is_announced_before_it_is_staged(scene):
    route = scene.join("a")
    scene.take(route)
    answer = scene.begin(1)
    assert answer is not None
    assert scene.take(route) == [m.Announce(EPOCH, 1, answer.slot, answer.generation)]


def test_a_late_joiner_gets_the_newest_sealed_version(scene):
    scene.publish(1)
    slot = scene.publish(2)
    route = scene.join("late")
    assert kinds(scene.take(route)) == [m.Welcome, m.Plan, m.Announce, m.Seal]
    assert list(leases(scene, slot)) == ["late"]


def test_a_leased_slot_is_never_free(scene):
    route = scene.join("a")
    first = scene.publish(1)
    scene.publish(2)
    assert scene.begin(3) is None
    verified(scene, route, 1)
    answer = scene.answer()
    assert answer is not None and answer.slot == first


def test_the_newest_sealed_version_is_kept_for_late_joiners(scene):
    scene.publish(1)
    second = scene.publish(2)
    assert scene.fleet.books.versions.free_slot() != second


def test_a_wait_for_a_slot_ends_with_the_names_of_those_who_hold_them(scene):
    scene.join("slow")
    scene.publish(1)
    scene.publish(2)
    assert scene.begin(3, timeout_s=1.0) is None
    scene.wait(1.0)
    answer = scene.answer()
    assert answer is not None and answer.error is not None
    kind, text = answer.error
    assert kind == "SyncTimeoutError" and "slow (reading version 1)" in text


def test_a_publisher_that_skips_is_told_so_and_goes_on_later(scene):
    route = scene.join("slow")
    scene.publish(1)
    scene.publish(2)
    assert scene.begin(3, when_full="skip") == m.Answer(EPOCH, 3)
    assert scene.fleet.books.versions.newest == 2
    verified(scene, route, 1)
    scene.publish(3, when_full="skip")


def test_a_pinned_slot_is_not_evicted_but_a_reading_one_is(scene):
    scene.join("reader")
    adopter = scene.join("adopter")
    first = scene.publish(1)
    verified(scene, adopter, 1, holds_lease=True)
    scene.publish(2)
    assert scene.fleet.books.versions.evictable() is None
    scene.tell(adopter, m.Release(EPOCH, 1))
    answer = scene.begin(3, when_full="evict")
    assert answer is not None and answer.slot == first


def test_an_evicted_reader_is_told_and_starts_on_the_newest_version(scene):
    route = scene.join("a")
    scene.publish(1)
    scene.publish(2)
    scene.take(route)
    assert scene.begin(3, when_full="evict") is not None
    assert kinds(scene.take(route)) == [m.Abort]
    scene.tell(route, m.Pull(EPOCH, 0))
    (announce,) = scene.take(route)
    assert isinstance(announce, m.Announce) and announce.version == 3


def test_a_silent_member_loses_its_reading_lease_but_not_a_pinned_one(scene):
    scene.join("reader")
    adopter = scene.join("adopter")
    slot = scene.publish(1)
    verified(scene, adopter, 1, holds_lease=True)
    scene.fleet.tick(MEMBER_TIMEOUT_S + 1)
    assert scene.fleet.books.members == {}
    assert leases(scene, slot) == {"adopter": "pinned"}
    scene.enlist(0)
    scene.tell(scene.route(0), m.MemberGone(EPOCH, "adopter"))
    assert leases(scene, slot) == {}


def test_a_reconnecting_member_keeps_its_pinned_slot(scene):
    adopter = scene.join("adopter")
    slot = scene.publish(1)
    verified(scene, adopter, 1, holds_lease=True)
    scene.tell(b"new-route", hello("adopter", last_epoch=EPOCH, holds=[1]))
    assert list(scene.fleet.books.members) == [b"new-route"]
    assert leases(scene, slot) == {"adopter": "pinned"}


@pytest.mark.parametrize(
    "again", [{"last_epoch": EPOCH, "holds": []}, {"last_epoch": EPOCH - 1, "holds": [1]}]
)
def test_a_reconnecting_member_lets_go_of_what_it_does_not_hold_any_more(scene, again):
    adopter = scene.join("adopter")
    slot = scene.publish(1)
    verified(scene, adopter, 1, holds_lease=True)
    scene.fleet.tick(MEMBER_TIMEOUT_S + 1)
    scene.tell(b"new-route", hello("adopter", **again))
    assert leases(scene, slot) == {}


def test_a_slot_that_may_go_live_at_a_member_is_not_evicted_nor_lost_in_silence(scene):
    scene.join("adopter", said=hello("adopter", last_epoch=EPOCH, holds=[]))
    slot = scene.publish(1)
    scene.publish(2)
    assert scene.fleet.books.versions.evictable() is None
    scene.fleet.tick(MEMBER_TIMEOUT_S + 1)
    assert leases(scene, slot) == {"adopter": "pinned"}


def test_a_second_hello_on_one_connection_replaces_the_first(scene):
    route = scene.join("a")
    slot = scene.publish(1)
    scene.tell(route, hello("b"))
    assert [member.label for member in scene.fleet.books.members.values()] == ["b"]
    assert leases(scene, slot) == {}


def test_an_unknown_member_is_asked_to_say_hello(scene):
    assert scene.tell(b"x", m.Heartbeat(EPOCH, None, "serving", "shm")) == [m.Unknown(EPOCH)]


def test_a_message_of_an_older_epoch_changes_nothing(scene):
    route = scene.join("a")
    scene.take(route)
    scene.tell(route, m.Live(EPOCH - 1, 3, 0.0))
    assert scene.fleet.books.members[route].live_version is None
    assert scene.take(route) == [m.Unknown(EPOCH)]


def test_a_member_of_a_newer_epoch_fences_this_publisher(scene):
    scene.tell(b"x", hello("x", last_epoch=EPOCH + 1))
    assert scene.fleet.fenced_by is not None and str(EPOCH + 1) in scene.fleet.fenced_by


def test_a_fenced_publisher_begins_nothing_any_more(scene):
    scene.join("slow")
    scene.publish(1)
    scene.publish(2)
    assert scene.begin(3) is None
    scene.fleet.fence("another one took over")
    scene.turn()
    answer = scene.answer()
    assert answer is not None and answer.error is not None and answer.error[0] == "FencedError"


def test_two_members_of_one_name_get_different_labels(scene):
    for instance in ("one", "two", "three"):
        scene.tell(instance.encode(), hello("same", instance))
    assert len({member.label for member in scene.fleet.books.members.values()}) == 3


def test_a_record_knows_who_is_missing_and_who_was_lost(scene):
    a, b = scene.join("a"), scene.join("b")
    scene.publish(1)
    scene.now = 2.0
    scene.tell(a, m.Live(EPOCH, 1, 0.001))
    record = scene.fleet.books.versions.record(1)
    assert record is not None
    assert record.missing("live") == ["b"]
    scene.tell(b, m.Bye(EPOCH))
    assert record.missing("live") == [] and record.lost == {"b"}
    assert record.reached("live") == 2.0


def test_a_member_that_skipped_a_version_counts_as_live_with_a_newer_one(scene):
    route = scene.join("a")
    scene.publish(1)
    scene.publish(2)
    scene.tell(route, m.Live(EPOCH, 2, 0.0))
    record = scene.fleet.books.versions.record(1)
    assert record is not None and record.missing("live") == []


def test_an_aborted_version_frees_its_slot_and_tells_its_readers(scene):
    route = scene.join("a")
    scene.take(route)
    answer = scene.begin(1)
    assert answer is not None
    scene.tell(scene.route(0), m.Aborted(EPOCH, 1, "staging failed"))
    assert kinds(scene.take(route)) == [m.Announce, m.Abort]
    slot = scene.fleet.books.versions.slots[answer.slot]
    assert slot.version == 0 and not slot.leases
    assert scene.begin(1) is not None, "no version was made, so its number is free"


def test_a_seal_with_too_few_digests_is_no_seal(scene):
    scene.begin(1)
    scene.tell(scene.route(0), m.Sealed(EPOCH, 1, b""))
    record = scene.fleet.books.versions.record(1)
    assert record is not None and record.aborted == "rank 0 (trainer:0) sealed 0 cells of 1"
    assert scene.fleet.books.versions.newest == 0


def test_versions_only_grow(scene):
    scene.publish(5)
    for version in (5, 4):
        answer = scene.begin(version)
        assert answer is not None and answer.error is not None
        assert answer.error[0] == "UsageError" and "not newer than 5" in answer.error[1]


def test_a_publisher_waits_for_servers_that_lag_too_far_behind(scene):
    route = scene.join("a")
    scene.publish(1)
    verified(scene, route, 1)
    assert scene.begin(2, max_lag=1, timeout_s=5.0) is None
    scene.tell(route, m.Live(EPOCH, 1, 0.0))
    answer = scene.answer()
    assert answer is not None and answer.slot >= 0


def test_records_are_bounded(scene):
    for version in range(1, 500):
        scene.publish(version)
    assert len(scene.fleet.books.versions.records) < 100


def test_a_version_that_every_adopter_refused_makes_room_for_the_next(scene):
    adopter = scene.join("a", said=hello("adopter", last_epoch=EPOCH, holds=[]))
    scene.publish(1)
    verified(scene, adopter, 1, holds_lease=True)
    scene.tell(adopter, m.Pull(EPOCH, 1))
    refused = scene.publish(2)
    assert scene.fleet.books.versions.free_slot() is None
    scene.tell(adopter, m.Failed(EPOCH, 2, "its bytes are wrong"))
    answer = scene.begin(3)
    assert answer is not None and answer.slot == refused
    late = scene.join("late", pulls=False)
    scene.want(late, whole(W))
    scene.take(late)
    scene.tell(late, m.Pull(EPOCH, 1))
    (announce,) = scene.take(late)
    assert isinstance(announce, m.Announce)
    assert announce.version == 3, "what was in a slot that was taken is offered to nobody"


def test_a_late_joiner_is_remembered_and_waited_for_by_nobody(scene):
    early = scene.join("early")
    scene.publish(1)
    scene.now = 1.0
    scene.tell(early, m.Live(EPOCH, 1, 0.0))
    scene.now = 50.0
    late = scene.join("late")
    record = scene.fleet.books.versions.record(1)
    assert record is not None and record.missing("live") == []
    scene.now = 60.0
    scene.tell(late, m.Live(EPOCH, 1, 0.0))
    scene.tell(late, m.Bye(EPOCH))
    assert record.members["late"].live_s == 60.0
    assert record.reached("live") == 1.0
