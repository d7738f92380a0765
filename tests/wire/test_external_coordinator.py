"""A coordinator of its own process, without sockets: which epoch it takes up, who has seats, and what it inherits."""

import pytest

from tests.wire.scene import EPOCH, Scene, W, hello, rows, whole
from weightsync.config import MEMBER_TIMEOUT_S
from weightsync.wire import messages as m
from weightsync.wire.fleet import Fleet

TOP, BOTTOM = [rows(0, 2)], [rows(2, 4)]
CLOCK = 100


def external(*held) -> Scene:
    scene = Scene(*held)
    scene.fleet = Fleet(address="tcp://x", publisher="c", epoch=CLOCK, is_external=True)
    return scene


def returned(scene: Scene, **changes) -> None:
    """All ranks are back, from a coordinator in whose life they had published version 5."""
    for rank in range(len(scene.held)):
        scene.enlist(rank, **({"last_epoch": EPOCH, "version": 5, "held": [(4, 8), (5, 9)]} | changes))
    for rank in range(len(scene.held)):
        scene.offer(rank)


def leases(scene: Scene) -> list[dict[str, str]]:
    return [slot.leases for slot in scene.fleet.books.versions.slots]


def error_of(answer: m.Answer | None) -> tuple[str, str]:
    assert answer is not None and answer.error is not None, answer
    return answer.error


# ---- the epoch


def test_ranks_without_an_epoch_get_that_of_the_clock_when_all_are_there():
    scene = external(TOP, BOTTOM)
    assert scene.enlist(0) == [m.Enlisted(1, 0)]
    assert m.Enlisted(CLOCK, 0) in scene.enlist(1)
    assert scene.take(scene.route(0))[0] == m.Enlisted(CLOCK, 0)
    assert scene.fleet.epoch == CLOCK


def test_ranks_keep_the_epoch_they_have_whatever_the_clock_says():
    for epoch in (EPOCH, CLOCK + 5):
        scene = external(whole(W))
        scene.enlist(0, last_epoch=epoch)
        assert scene.fleet.epoch == epoch and scene.fleet.fenced_by is None


def test_a_rank_without_an_epoch_that_came_first_takes_up_that_of_the_others_and_how_far_they_are():
    scene = external(TOP, BOTTOM)
    scene.enlist(1)
    scene.enlist(0, last_epoch=EPOCH, version=5)
    told = [message for message in scene.take(scene.route(1)) if isinstance(message, m.Enlisted)]
    assert told[-1] == m.Enlisted(EPOCH, 5)


def test_a_member_with_a_newer_epoch_does_not_fence_it_but_moves_new_ranks_above():
    scene = external(whole(W))
    scene.tell(b"a", hello("a", last_epoch=CLOCK + 5))
    scene.enlist(0)
    assert scene.fleet.epoch == CLOCK + 6 and scene.fleet.fenced_by is None


def test_a_member_with_a_newer_epoch_that_comes_later_moves_everybody_up():
    scene = external(whole(W))
    scene.enlist(0)
    scene.tell(scene.route(0), m.Offers(CLOCK, {"shm": {}}))
    route = scene.join("a", pulls=False)
    scene.take(route)
    scene.take(scene.route(0))
    scene.tell(b"b", hello("b", last_epoch=CLOCK + 5))
    assert m.Enlisted(CLOCK + 6, 0) in scene.take(scene.route(0))
    for one in (route, b"b"):
        assert [message.epoch for message in scene.take(one) if isinstance(message, m.Welcome)] == [CLOCK + 6]


def test_a_member_says_hello_again_before_anybody_knows_the_epoch():
    scene = external(whole(W))
    assert scene.tell(b"a", m.Heartbeat(EPOCH, 5, "serving", "shm")) == [m.Unknown(1)]
    assert scene.fleet.fenced_by is None


def test_a_rank_of_a_newer_epoch_fences_a_publisher_that_is_its_own_coordinator():
    scene = Scene(TOP, BOTTOM)
    scene.enlist(0)
    scene.enlist(1, last_epoch=EPOCH + 1)
    assert scene.fleet.fenced_by == f"rank 1 follows epoch {EPOCH + 1}, newer than {EPOCH}"


# ---- versions and slots


def test_versions_go_on_and_generations_too():
    scene = external(whole(W))
    returned(scene)
    assert scene.fleet.status(0.0).version == 5
    answer = scene.begin(6)
    assert answer is not None and answer.generation == 10


def test_what_is_inherited_is_offered_to_nobody_and_in_nobodys_way():
    scene = external(whole(W))
    returned(scene)
    route = scene.join("late")
    assert not [message for message in scene.take(route) if isinstance(message, m.Announce)]
    assert [scene.publish(version) for version in (6, 7)] == [0, 1]
    assert [message.version for message in scene.take(route) if isinstance(message, m.Announce)] == [6]


def test_a_slot_is_pinned_until_its_readers_say_what_they_hold():
    scene = external(whole(W))
    returned(scene, readers=["adopter", "reader"])
    assert leases(scene) == [{"adopter": "pinned", "reader": "pinned"}] * 2
    assert scene.begin(6) is None
    scene.tell(b"reader", hello("reader", last_epoch=EPOCH))
    assert leases(scene) == [{"adopter": "pinned"}] * 2
    scene.tell(b"adopter", hello("adopter", last_epoch=EPOCH, holds=[5]))
    assert leases(scene) == [{}, {"adopter": "pinned"}]
    answer = scene.answer()
    assert answer is not None and answer.slot == 0


def test_readers_that_were_there_before_the_rank_are_not_asked_again():
    scene = external(whole(W))
    scene.tell(b"adopter", hello("adopter", last_epoch=EPOCH, holds=[4]))
    scene.tell(b"reader", hello("reader", last_epoch=EPOCH))
    returned(scene, readers=["adopter", "reader"])
    assert leases(scene) == [{"adopter": "pinned"}, {}]


def test_an_inherited_slot_is_let_go_as_any_other():
    scene = external(whole(W))
    returned(scene, readers=["moves", "ends"])
    scene.join("moves", said=hello("moves", last_epoch=EPOCH, holds=[5]))
    scene.tell(b"moves", m.Release(EPOCH, 5))
    scene.tell(scene.route(0), m.MemberGone(EPOCH, "ends"))
    assert leases(scene) == [{}, {}]


def test_slots_of_a_rank_that_starts_again_are_not_inherited():
    scene = external(whole(W))
    returned(scene, readers=["adopter"])
    scene.enlist(0, instance="another", takeover=True)
    assert leases(scene) == [{}, {}]


def test_a_version_that_another_rank_staged_before_is_lost_and_the_next_one_is_not():
    scene = external(TOP, BOTTOM)
    scene.enlist(0, last_epoch=EPOCH, version=5, held=[(6, 9), (5, 8)])  # while it stages 6
    scene.enlist(1, last_epoch=EPOCH, version=5, held=[(4, 7), (5, 8)])
    for rank in (0, 1):
        scene.offer(rank)
    scene.seal(6, 0)
    assert error_of(scene.begin(6, 1)) == (
        "VersionError", "version 6 was lost: the coordinator started again while it was staged",
    )  # fmt: skip
    scene.publish(7)


def test_a_seal_for_a_coordinator_that_is_gone_does_not_count():
    scene = external(TOP, BOTTOM)
    returned(scene)
    scene.begin(6, 1)
    scene.seal(6, 0)
    record = scene.fleet.books.versions.record(6)
    assert record is not None and record.aborted is not None
    assert "rank 0 (trainer:0) staged it before the coordinator started again" in record.aborted


def test_a_question_asked_again_is_answered_again():
    scene = Scene.opened(whole(W))
    first = scene.begin(1)
    again = scene.begin(1)  # the first answer was lost
    assert first is not None and again is not None
    assert (first.slot, first.generation) == (again.slot, again.generation)


def test_a_rank_that_goes_on_without_sealing_gives_the_version_up():
    scene = Scene.opened(whole(W))
    scene.begin(1)
    scene.publish(2)
    record = scene.fleet.books.versions.record(1)
    assert record is not None and record.aborted == "rank 0 (trainer:0) went on to version 2"


# ---- seats


def test_a_process_that_wants_a_taken_seat_waits_until_its_holder_is_heard():
    scene = Scene.opened(TOP, BOTTOM)
    scene.now = 1.0
    assert scene.enlist(1, route=b"heir", instance="another") == []
    scene.now = 2.0
    scene.tell(scene.route(1), m.Beat(EPOCH))
    (refused,) = scene.enlist(1, route=b"heir", instance="another")
    assert isinstance(refused, m.Refused) and "is alive; stop it" in refused.reason


def test_a_process_that_wants_the_seat_of_a_dead_one_gets_it_when_that_is_missed():
    scene = Scene.opened(TOP, BOTTOM)
    scene.now = 1.0
    assert scene.enlist(1, route=b"heir", instance="another") == []
    scene.now = MEMBER_TIMEOUT_S + 0.5
    assert m.Enlisted(EPOCH, 0) in scene.enlist(1, route=b"heir", instance="another")


@pytest.mark.parametrize("takeover", [False, True])
def test_a_process_that_was_replaced_never_gets_its_seat_back(takeover):
    scene = Scene.opened(TOP, BOTTOM)
    scene.enlist(1, route=b"heir", instance="another", takeover=True)
    scene.now = MEMBER_TIMEOUT_S + 1
    (refused,) = scene.enlist(1, takeover=takeover)
    assert refused == m.Refused(EPOCH, "rank 1 (trainer:1) was replaced by another process")


def test_a_member_that_comes_back_is_welcomed_when_all_ranks_were_heard_since():
    scene = Scene.opened(TOP, BOTTOM)
    route = scene.join("a", pulls=False)
    scene.take(route)
    for at, rank in ((1.0, None), (1.5, 0), (2.0, 1)):
        assert not [message for message in scene.take(route) if isinstance(message, m.Welcome)]
        scene.now = at
        if rank is not None:
            scene.tell(scene.route(rank), m.Beat(EPOCH))
        scene.tell(route, hello("a", last_epoch=EPOCH))
    assert scene.take_one(route, m.Welcome)
