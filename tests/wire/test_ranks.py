"""Publishers of several ranks, without sockets: one version for all of them, or none."""

import numpy as np
import pytest

from tests.wire.scene import EPOCH, Scene, W, layout_of, rows, whole
from weightsync.config import MEMBER_TIMEOUT_S
from weightsync.types import Box
from weightsync.wire import messages as m
from weightsync.wire.layout import TensorSpec

TOP, BOTTOM = [rows(0, 2)], [rows(2, 4)]


@pytest.fixture
def scene() -> Scene:
    return Scene.opened(TOP, BOTTOM)


def of_kind(messages: list[m.ToMember], kind: type) -> list[m.ToMember]:
    return [message for message in messages if isinstance(message, kind)]


def error_of(answer: m.Answer | None) -> tuple[str, str]:
    assert answer is not None and answer.error is not None, answer
    return answer.error


def test_ranks_are_told_what_to_stage_when_the_last_one_has_come():
    scene = Scene(TOP, BOTTOM)
    assert scene.enlist(0) == [m.Enlisted(EPOCH, 0)]
    assert len(of_kind(scene.enlist(1), m.Stage)) == 1
    assert len(of_kind(scene.take(scene.route(0)), m.Stage)) == 1
    assert scene.fleet.status(0.0).missing_ranks == ["rank 0 of 2", "rank 1 of 2"], (
        "their slots are not there"
    )


def test_members_are_welcomed_when_the_slots_of_all_ranks_are_there():
    scene = Scene(TOP, BOTTOM)
    route = scene.join("a", pulls=False)
    for rank in (0, 1):
        scene.enlist(rank)
    scene.offer(1)
    assert scene.take(route) == []
    scene.offer(0)
    welcome = scene.take_one(route, m.Welcome)
    assert welcome.offers == [{"shm": {"of": "0"}}, {"shm": {"of": "1"}}]


def test_a_version_is_sealed_when_every_rank_has_sealed_its_part(scene):
    route = scene.join("a")
    scene.take(route)
    first, second = scene.begin(1, 0), scene.begin(1, 1)
    assert first is not None and second is not None
    assert (first.slot, first.generation) == (second.slot, second.generation)
    scene.seal(1, 1)
    assert of_kind(scene.take(route), m.Seal) == [] and scene.fleet.books.versions.newest == 0
    scene.seal(1, 0)
    assert scene.fleet.books.versions.newest == 1
    assert scene.take_one(route, m.Seal) == m.Seal(EPOCH, 1, np.array([10**6, 10**6 + 1000], "<u8").tobytes())


def test_a_version_that_a_rank_leaves_while_it_is_staged_is_lost_and_no_other(scene):
    route = scene.join("a")
    slot = scene.publish(1)
    scene.begin(2, 0)
    scene.take(route)
    scene.tell(scene.route(1), m.Bye(EPOCH))
    record = scene.fleet.books.versions.record(2)
    assert record is not None and record.aborted == "rank 1 (trainer:1) left"
    assert scene.fleet.books.versions.newest == 1 and scene.fleet.books.versions.slots[slot].leases == {
        "a": "reading"
    }
    assert of_kind(scene.take(route), m.Abort) == []


def test_a_rank_that_left_while_nothing_was_staged_costs_no_version(scene):
    scene.publish(1)
    scene.tell(scene.route(1), m.Bye(EPOCH))
    record = scene.fleet.books.versions.record(1)
    assert record is not None and record.aborted is None and scene.fleet.books.versions.newest == 1


def test_a_silent_rank_is_missed_by_its_number(scene):
    scene.now = MEMBER_TIMEOUT_S + 1
    scene.tell(scene.route(0), m.Beat(EPOCH))
    scene.wait(0.0)
    assert scene.fleet.ranks.missing() == ["rank 1 of 2"]


def test_a_begin_that_times_out_names_the_missing_rank(scene):
    scene.tell(scene.route(1), m.Bye(EPOCH))
    assert scene.begin(1, 0, timeout_s=2.0) is None
    scene.wait(2.0)
    kind, text = error_of(scene.answer(0))
    assert kind == "SyncTimeoutError" and text == "version 1 waited 2 s for rank 1 of 2 of the publisher"


def test_a_begin_that_waits_for_the_version_before_names_the_rank_that_has_not_staged_it(scene):
    for rank in (0, 1):
        scene.begin(1, rank)
    scene.seal(1, 0)
    assert scene.begin(2, 0, timeout_s=2.0) is None
    scene.wait(2.0)
    kind, text = error_of(scene.answer(0))
    assert kind == "SyncTimeoutError" and "for version 1, which rank 1 has not staged" in text


def test_a_rank_that_begins_a_version_that_failed_elsewhere_is_told_why(scene):
    scene.begin(1, 0)
    scene.tell(scene.route(0), m.Aborted(EPOCH, 1, "its GPU fell off the bus"))
    assert error_of(scene.begin(1, 1)) == ("VersionError", "version 1 was aborted: its GPU fell off the bus")
    scene.publish(2)


def test_a_version_that_one_rank_skips_is_skipped_by_all(scene):
    route = scene.join("slow")
    scene.publish(1)
    scene.publish(2)
    first = scene.begin(3, 0, when_full="skip")
    scene.tell(route, m.Verified(EPOCH, 1, 0.1, "shm", False))
    second = scene.begin(3, 1, when_full="skip")
    assert first is not None and second is not None
    assert (first.slot, second.slot) == (-1, -1), "the slot that came free is for the next version"
    scene.publish(4, when_full="skip")


def test_a_slot_is_taken_from_its_readers_once_for_all_ranks(scene):
    route = scene.join("slow")
    first = scene.publish(1)
    second = scene.publish(2)
    scene.take(route)
    assert scene.publish(3, when_full="evict") == first
    assert len(of_kind(scene.take(route), m.Abort)) == 1
    assert scene.fleet.books.versions.slots[second].version == 2


def test_another_process_in_a_seat_that_is_taken_is_refused(scene):
    (refused,) = scene.enlist(1, route=b"thief", instance="another")
    assert refused == m.Refused(
        EPOCH, "rank 1 (trainer:1) is alive; stop it, or pass takeover=True to replace it"
    )
    assert scene.fleet.ranks.missing() == []
    scene.publish(1)


def test_another_process_may_take_a_seat_over(scene):
    scene.begin(1, 0)
    said = scene.enlist(1, route=b"heir", instance="another", takeover=True)
    assert [type(message) for message in said] == [m.Enlisted, m.Stage]
    refused = of_kind(scene.take(scene.route(1)), m.Refused)
    assert refused == [m.Refused(EPOCH, "rank 1 (trainer:1) was replaced by another process")]
    record = scene.fleet.books.versions.record(1)
    assert record is not None and record.aborted == "rank 1 of the publisher started again"
    assert scene.fleet.ranks.missing() == ["rank 1 of 2"], "its slots are not there yet"


def test_the_seat_of_a_process_that_is_silent_is_free(scene):
    scene.now = MEMBER_TIMEOUT_S + 1
    said = scene.enlist(1, route=b"heir", instance="another")
    assert m.Enlisted(EPOCH, 0) in said


def test_what_the_slots_of_a_process_held_is_gone_with_it(scene):
    route = scene.join("a")
    scene.publish(1)
    scene.take(route)
    scene.tell(scene.route(1), m.Bye(EPOCH))
    scene.enlist(1, instance="another")
    assert len(of_kind(scene.take(route), m.Abort)) == 1
    assert [slot.version for slot in scene.fleet.books.versions.slots] == [0, 0]
    scene.offer(1)
    assert of_kind(scene.take(route), m.Welcome), "there are new data paths"
    assert scene.publish(2) >= 0


def test_a_rank_that_comes_back_goes_on_where_it_was(scene):
    scene.publish(1)
    scene.tell(scene.route(1), m.Bye(EPOCH))
    assert scene.begin(2, 0) is None
    assert [type(message) for message in scene.enlist(1)] == [m.Enlisted, m.Stage]
    scene.offer(1)
    assert scene.fleet.books.versions.newest == 1 and [
        slot.version for slot in scene.fleet.books.versions.slots
    ] == [1, 2]
    answer = scene.answer(0)
    assert answer is not None and answer.slot >= 0
    scene.begin(2, 1)
    for rank in (0, 1):
        scene.seal(2, rank)
    assert scene.fleet.books.versions.newest == 2


def test_a_rank_that_changes_its_connection_keeps_its_slots_and_members_do_not_notice(scene):
    route = scene.join("a")
    scene.publish(1)
    scene.take(route)
    assert [type(message) for message in scene.enlist(1, route=b"new")] == [m.Enlisted, m.Stage]
    scene.tell(b"new", m.Offers(EPOCH, {"shm": {"of": "1"}}))
    assert scene.take(route) == [] and scene.fleet.ranks.missing() == []


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (TensorSpec("w", "float32", (5,)), "w: rank 1 has float32 [5], another rank float32 [4]"),
        (TensorSpec("w", "bfloat16", (4,)), "w: rank 1 has bfloat16 [4], another rank float32 [4]"),
    ],
)
def test_ranks_that_disagree_are_told_so_and_the_last_one_leaves_its_seat(spec, text):
    scene = Scene(TOP, [(spec, Box((2,), (4,)))])
    scene.enlist(0)
    for said in (scene.enlist(1), scene.take(scene.route(0))):
        (refusal,) = of_kind(said, m.NoPlan)
        assert isinstance(refusal, m.NoPlan) and text in refusal.reason
    assert scene.fleet.status(0.0).missing_ranks[-1] == "rank 1 of 2"
    scene.held[1] = BOTTOM
    assert len(of_kind(scene.enlist(1, instance="mended"), m.Stage)) == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ranks": 3}, "rank 1 has ranks=3 and slots=2, rank 0 (trainer:0) has ranks=2 and slots=2"),
        ({"slots": 4}, "rank 1 has ranks=2 and slots=4, rank 0 (trainer:0) has ranks=2 and slots=2"),
        ({"ranks": 1}, "rank 1 of 1 is impossible"),
        ({"ranks": 5000}, "rank 1 of 5000 is impossible"),
    ],
)
def test_ranks_of_another_number_or_with_other_slots_are_refused(changes, text):
    scene = Scene(TOP, BOTTOM)
    scene.enlist(0)
    assert scene.enlist(1, **changes) == [m.Refused(EPOCH, text)]


def test_a_tensor_tied_at_one_rank_and_sent_by_another_is_refused():
    other = TensorSpec("tied", "float32", (4,))
    scene = Scene(whole(W), whole(other))
    scene.enlist(0, layout=layout_of(whole(W), {"tied": "w"}))
    (refusal,) = of_kind(scene.enlist(1), m.NoPlan)
    assert isinstance(refusal, m.NoPlan)
    assert "tied: one rank sends it, another ties it to w" in refusal.reason


def test_a_rank_that_starts_again_learns_how_far_its_epoch_is(scene):
    scene.publish(1)
    scene.begin(2, 0)
    said = scene.enlist(1, instance="another", takeover=True)
    assert of_kind(said, m.Enlisted) == [m.Enlisted(EPOCH, 2)]


def test_a_version_is_staged_though_every_member_has_gone_meanwhile(scene):
    route = scene.join("a")
    for rank in (0, 1):
        scene.begin(1, rank)
    scene.tell(route, m.Bye(EPOCH))
    for rank in (0, 1):
        scene.seal(1, rank)
    scene.tell(scene.route(0), m.AwaitStage(EPOCH, 99, 1, "staged", 1.0))
    assert scene.answer() == m.Answer(EPOCH, 99)
    scene.tell(scene.route(0), m.AwaitStage(EPOCH, 100, 1, "ready", 1.0))
    assert error_of(scene.answer()) == ("VersionError", "version 1: every member was lost: a")
