"""Who stages which cells and who reads them, as members come with cuts of their own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.wire.scene import EPOCH, Held, Scene, boxes_of, layout_of, rows, whole
from weightsync.errors import ProtocolError
from weightsync.types import Box
from weightsync.wire import messages as m
from weightsync.wire.arrangement import Arrangement
from weightsync.wire.columns import ShardColumns
from weightsync.wire.layout import Boxes, Catalogue, TensorSpec
from weightsync.wire.plan import Want, make_plan, match_names

W, V = TensorSpec("w", "float32", (8, 6)), TensorSpec("v", "int16", (5,))
CATALOGUE = Catalogue((W, V), {})
TOP, BOTTOM = [rows(0, 4, W), *whole(V)], [rows(4, 8, W)]


def columns_of(spec: TensorSpec, start: int, stop: int) -> Held:
    return spec, Box((0, start), (spec.shape[0], stop))


def boxes_in(boxes: Boxes, catalogue: Catalogue = CATALOGUE) -> list[tuple[str, str]]:
    found = boxes.columns(catalogue)
    ndim = [len(spec.shape) for spec in catalogue.tensors]
    return [
        (catalogue.tensors[t].name, str(Box(tuple(a[: ndim[t]]), tuple(b[: ndim[t]]))))
        for t, a, b in zip(found.tensor.tolist(), found.start.tolist(), found.stop.tolist(), strict=True)
    ]


def offsets_in(stage: m.Stage) -> list[int]:
    found: list[int] = np.frombuffer(stage.offsets, "<u8").tolist()
    return found


def stage_of(scene: Scene, rank: int = 0) -> m.Stage:
    return scene.stages[scene.route(rank)]


def kinds(messages: list[m.ToMember]) -> list[type]:
    return [type(message) for message in messages]


def test_without_members_every_shard_is_a_cell():
    arrangement = Arrangement([layout_of(TOP), layout_of(BOTTOM)], ["h0", "h1"])
    assert boxes_in(arrangement.stage(EPOCH, 0).boxes) == [("w", "[0:4, 0:6]"), ("v", "[0:5]")]
    assert boxes_in(arrangement.stage(EPOCH, 1).boxes) == [("w", "[4:8, 0:6]")]
    assert arrangement.counts() == [2, 1]


def test_before_anything_is_staged_a_member_with_new_cuts_has_everything_planned_anew():
    scene = Scene.opened([*whole(W), *whole(V)])
    first = stage_of(scene)
    assert boxes_in(first.boxes) == [("w", "[0:8, 0:6]"), ("v", "[0:5]")]
    route = scene.join("a", [columns_of(W, 0, 2)], pulls=True)
    plan = scene.take_one(route, m.Plan)
    stage = stage_of(scene)
    found = boxes_in(stage.boxes)
    assert sorted(found) == [("v", "[0:5]"), ("w", "[0:8, 0:2]"), ("w", "[0:8, 2:6]")], "each byte once"
    assert boxes_in(plan.boxes) == [("w", "[0:8, 0:2]")]
    mine = found.index(("w", "[0:8, 0:2]"))
    assert np.frombuffer(plan.offsets, "<u8").tolist() == [offsets_in(stage)[mine]]


def test_after_that_cells_are_only_appended_and_made_out_of_the_sealed_slot():
    scene = Scene.opened([*whole(W), *whole(V)])
    before = stage_of(scene)
    slot = scene.publish(1)
    scene.take(scene.route(0))
    route = scene.join("late", [columns_of(W, 0, 2), *whole(V)])
    stage, extend = scene.take(scene.route(0))
    assert isinstance(stage, m.Stage) and isinstance(extend, m.Extend)
    count = len(boxes_in(before.boxes))
    assert boxes_in(stage.boxes)[:count] == boxes_in(before.boxes)
    assert boxes_in(stage.boxes)[count:] == [("w", "[0:8, 0:2]")]
    assert offsets_in(stage)[:count] == offsets_in(before)
    assert min(offsets_in(stage)[count:]) >= 8 * 6 * 4 + 2 * 5
    assert extend == m.Extend(EPOCH, 1, slot, 1, count, np.array([0], "<u4").tobytes())
    assert kinds(scene.take(route)) == [m.Welcome, m.Plan], "its cells are not there yet"
    digests = np.array([11, 22, 33], "<u8")
    scene.tell(scene.route(0), m.Extended(EPOCH, 1, digests.tobytes()))
    announce, seal = scene.take(route)
    assert announce == m.Announce(EPOCH, 1, slot, 1)
    assert seal == m.Seal(EPOCH, 1, np.array([22, 33], "<u8").tobytes())


def test_members_whose_plan_holds_are_left_alone_when_cells_are_appended():
    scene = Scene.opened([*whole(W), *whole(V)])
    early = scene.join("early", [*whole(W), *whole(V)])
    scene.publish(1)
    scene.take(early)
    scene.join("late", [columns_of(W, 0, 2)])
    assert scene.take(early) == []


def test_an_extension_is_asked_for_once_and_the_next_version_has_it_from_the_start():
    scene = Scene.opened(whole(W))
    scene.publish(1)
    scene.take(scene.route(0))
    scene.join("late", [columns_of(W, 0, 2)])
    assert kinds(scene.take(scene.route(0))) == [m.Stage, m.Extend]
    scene.turn()
    other = scene.join("later", [columns_of(W, 0, 2)])
    assert scene.take(scene.route(0)) == []
    scene.publish(2)
    assert [type(x) for x in scene.take(other)][-2:] == [m.Announce, m.Seal]
    assert m.Extend not in kinds(scene.take(scene.route(0)))


def test_an_extension_is_cut_out_of_what_the_slot_held_when_it_was_sealed():
    arrangement = Arrangement([layout_of(whole(W))], ["h"])
    for box in (
        columns_of(W, 0, 4),
        columns_of(W, 0, 2),
    ):  # the second lies in a cell that came with the first
        arrangement.want(boxes_of(arrangement.catalogue, [box]), "far")
        arrangement.arrange(keep=True)
    found = arrangement.stage(EPOCH, 0).boxes.columns(arrangement.catalogue)
    assert len(found.tensor) == 3
    for first in (1, 2):
        extend = arrangement.extend(EPOCH, 0, version=1, slot=0, generation=1, first=first)
        origins = np.frombuffer(extend.origins, "<u4")
        assert len(origins) == 3 - first and (origins < first).all()
        assert (found.start[origins] <= found.start[first:]).all()
        assert (found.stop[origins] >= found.stop[first:]).all()


def test_what_nobody_holds_is_refused_by_name_and_others_are_left_alone():
    scene = Scene.opened([rows(0, 4, W), *whole(V)])
    good = scene.join("good", [rows(0, 4, W)])
    greedy = scene.join("greedy", [rows(2, 6, W), *whole(V)])
    refusal = scene.take_one(greedy, m.NoPlan)
    assert "w" in refusal.reason and "[4:6, 0:6]" in refusal.reason
    assert kinds(scene.take(good)) == [m.Welcome, m.Plan]
    slot = scene.publish(1)
    assert list(scene.fleet.books.versions.slots[slot].leases) == ["good"]
    state = {row.name: (row.state, row.error) for row in scene.fleet.status(0.0).members}
    assert state["greedy"] == ("refused", refusal.reason)


def test_those_who_come_at_once_with_one_that_can_not_be_served_are_served():
    arrangement = Arrangement([layout_of([rows(0, 4, W)])], ["h"])
    good, bad, other = (
        arrangement.want(boxes_of(arrangement.catalogue, [box]), "far")
        for box in (rows(0, 2, W), rows(3, 6, W), rows(1, 4, W))
    )
    assert arrangement.arrange(keep=False)
    reason = arrangement.refusal(bad)
    assert reason is not None and "[4:6, 0:6]" in reason
    for number in (good, other):
        assert arrangement.refusal(number) is None and arrangement.reads(number) is not None


def test_equal_wants_on_one_host_share_a_target():
    arrangement = Arrangement([layout_of(TOP), layout_of(BOTTOM)], ["h0", "h1"])
    boxes = boxes_of(arrangement.catalogue, [columns_of(W, 0, 3)])
    first = arrangement.want(boxes, "h0")
    assert arrangement.want(boxes_of(arrangement.catalogue, [columns_of(W, 0, 3)]), "h0") == first
    assert arrangement.want(boxes, "h1") != first
    assert arrangement.want(boxes_of(arrangement.catalogue, [columns_of(W, 0, 4)]), "h0") != first
    assert arrangement.arrange(keep=False)
    assert not arrangement.arrange(keep=False), "nothing is new"


def test_what_several_ranks_hold_is_read_from_the_near_one():
    arrangement = Arrangement([layout_of(whole(W)), layout_of(whole(W))], ["h0", "h1"])
    boxes = boxes_of(arrangement.catalogue, whole(W))
    numbers = [arrangement.want(boxes, host) for host in ("h1", "h0")]
    arrangement.arrange(keep=False)
    ranks = [np.frombuffer(arrangement.plan(EPOCH, number).ranks, "<u4").tolist() for number in numbers]
    assert ranks == [[1], [0]]


def test_a_target_needs_the_cells_up_to_its_last():
    arrangement = Arrangement([layout_of(TOP), layout_of(BOTTOM)], ["h", "h"])
    arrangement.arrange(keep=True)
    number = arrangement.want(boxes_of(arrangement.catalogue, [rows(4, 6, W)]), "h")
    arrangement.arrange(keep=True)
    assert arrangement.counts() == [2, 2] and arrangement.needs(number) == [0, 2]


def test_ranks_know_tensors_by_numbers_of_their_own():
    layouts = [layout_of([*whole(V), rows(0, 4, W)]), layout_of([rows(4, 8, W)])]
    arrangement = Arrangement(layouts, ["h", "h"])
    assert [spec.name for spec in arrangement.catalogue.tensors] == ["v", "w"]
    wants = [Want(("w",), "float32", W.shape, Box.whole(W.shape), (24, 4))]
    matches = match_names(arrangement.catalogue, wants, ignore=["v"])
    number = arrangement.want(matches.boxes, "h")
    arrangement.arrange(keep=False)
    said = arrangement.plan(EPOCH, number)
    plan = make_plan(arrangement.catalogue, wants, matches, said.boxes, said.ranks, said.wants, said.offsets)
    assert plan.ranks.tolist() == [0, 1] and plan.deltas.tolist() == [0, 4 * 24]
    assert {rank: part.size_bytes for rank, (_, part) in plan.parts().items()} == {0: 96, 1: 96}


def test_a_rank_is_told_of_cells_of_its_own_tensors_in_its_own_numbers():
    layouts = [layout_of(whole(V)), layout_of([*whole(W), *whole(V)]), layout_of([])]
    arrangement = Arrangement(layouts, ["h", "h", "h"])
    arrangement.want(boxes_of(arrangement.catalogue, [*whole(V), columns_of(W, 0, 2)]), "h")
    arrangement.arrange(keep=False)
    found = [
        boxes_in(arrangement.stage(EPOCH, rank).boxes, layout.catalogue)
        for rank, layout in enumerate(layouts)
    ]
    assert found[0] == [("v", "[0:5]")] and found[2] == []
    assert {("w", "[0:8, 0:2]"), ("w", "[0:8, 2:6]")} <= set(found[1])


def test_a_want_outside_its_tensor_is_a_message_that_can_not_be():
    scene = Scene.opened(whole(W))
    route = scene.join("a", pulls=False)
    scene.take(route)
    columns = np.array([[0, 0]]), np.array([[9, 6]])
    boxes = Boxes.pack(ShardColumns(np.array([0, 1]), np.array([0], np.int32), *columns))
    with pytest.raises(ProtocolError):
        boxes.columns(Catalogue((W,), {}))
    scene.tell(route, m.Wants(EPOCH, boxes))
    assert kinds(scene.take(route)) == [m.Refused]
    assert scene.fleet.books.refused == 1


def test_a_slot_is_not_filled_with_the_orders_of_ever_more_fleets():
    large = TensorSpec("w", "float32", (4096, 4096))
    arrangement = Arrangement([layout_of(whole(large))], ["h"])
    reasons = []
    for width in (2048, 1024, 512, 256, 128):
        number = arrangement.want(
            boxes_of(
                arrangement.catalogue,
                [columns_of(large, n, n + width) for n in range(0, 4096, width)],
            ),
            "far",
        )
        arrangement.arrange(keep=True)
        reasons.append(arrangement.refusal(number))
    assert reasons[:2] == [None, None]
    assert reasons[-1] is not None and "3 layouts already" in reasons[-1]
    assert arrangement.cells.slot_bytes[0] <= 3 * 4096 * 4096 * 4 + (32 << 20)


def test_what_is_planned_aside_is_told_when_it_is_done_and_made_again_if_a_version_began_meanwhile():
    scene = Scene.opened([*whole(W), *whole(V)])
    waiting: list[Callable[[], None]] = []

    def aside(size: int, work: Callable[[], bool], done: Callable[[bool], None]) -> None:
        waiting.append(lambda: done(work()))

    scene.fleet.books.run_aside = aside
    route = scene.join("a", wants=BOTTOM)
    assert scene.take(route) and len(waiting) == 1
    late = scene.join("b", wants=TOP)  # something else, while the first is planned
    scene.publish(1)  # and the cells are in use from here on
    waiting.pop()()
    assert scene.take(route) == []
    scene.turn()
    waiting.pop()()
    scene.turn()
    assert boxes_in(scene.take_one(route, m.Plan).boxes) == [("w", str(Box((4, 0), (8, 6))))]
    assert len(scene.take_one(late, m.Plan).ranks) == 8 and not waiting
