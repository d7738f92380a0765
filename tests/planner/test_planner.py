"""Any sharding to any sharding, against a reference that goes element by element."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.execution import check_all, region, rows_of
from weightsync.errors import LayoutError
from weightsync.wire.columns import ShardColumns, Side, TensorTable, join_sides
from weightsync.wire.planner import plan_fleet
from weightsync.wire.plans import Plans
from weightsync.wire.summary import summarize

Row = tuple[int, list[int], list[int]]


def partition(
    rng: np.random.Generator, start: list[int], stop: list[int], depth: int
) -> list[tuple[list[int], list[int]]]:
    """Cut a box at random, unevenly."""
    d = int(rng.integers(len(start)))
    if depth == 0 or stop[d] - start[d] < 2:
        return [(start, stop)]
    cut = int(rng.integers(start[d] + 1, stop[d]))
    left, right = [*stop], [*start]
    left[d] = right[d] = cut
    return partition(rng, start, left, depth - 1) + partition(rng, right, stop, depth - 1)


def some_box(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    ends = [sorted(rng.integers(0, n + 1, 2).tolist()) for n in shape]
    return [a for a, _ in ends], [b for _, b in ends]


def some_side(rng: np.random.Generator, layouts: list[list[Row]], ranks: int, width: int) -> Side:
    of_rank = rng.integers(0, len(layouts), ranks)
    of_rank[: len(layouts)] = np.arange(len(layouts))[:ranks]
    host = rng.integers(0, 3, ranks)
    process = host * 2 + rng.integers(0, 2, ranks)
    columns = (of_rank, process, host, host // 2, np.arange(ranks))
    return Side(ShardColumns.of(layouts, width), *(column.astype(np.int32) for column in columns))


def some_fleet(seed: int, *, lose: float = 0.0) -> tuple[TensorTable, Side, Side]:
    """Random tensors (some alike), uneven partitions dealt to ranks (some twice), wants that overlap, replicas."""
    rng = np.random.default_rng(seed)
    kinds = [tuple(rng.integers(1, 9, rng.integers(0, 4)).tolist()) for _ in range(2)]
    shapes = [kinds[int(rng.integers(2))] for _ in range(int(rng.integers(1, 5)))]
    table = TensorTable.of([(f"t{n}", shape, int(rng.choice([1, 2, 4]))) for n, shape in enumerate(shapes)])
    held: list[list[Row]] = [[] for _ in range(int(rng.integers(1, 5)))]
    cuts = {shape: partition(rng, [0] * len(shape), list(shape), int(rng.integers(3))) if shape else [([], [])]
            for shape in kinds}  # fmt: skip
    for number, shape in enumerate(shapes):
        boxes = (
            cuts[shape]
            if rng.random() < 0.7 or not shape
            else partition(rng, [0] * len(shape), list(shape), 3)
        )
        for start, stop in boxes:
            for layout in rng.choice(len(held), int(rng.integers(1, len(held) + 1)), replace=False).tolist():
                if rng.random() >= lose:
                    held[layout].append((number, start, stop))
        if rng.random() < 0.3:  # a holder with other boxes than the rest
            held[int(rng.integers(len(held)))].append((number, *some_box(rng, shape)))
    wanted: list[list[Row]] = [[] for _ in range(int(rng.integers(1, 4)))]
    for layout in wanted:
        for number, shape in enumerate(shapes):
            for _ in range(int(rng.integers(0, 3))):
                layout.append((number, *some_box(rng, shape)))
    width = table.shape.shape[1]
    sources = some_side(rng, held, len(held) + int(rng.integers(3)), width)
    return table, sources, some_side(rng, wanted, len(wanted) + int(rng.integers(4)), width)


def missing_elements(table: TensorTable, sources: Side, targets: Side) -> set[tuple[int, tuple[int, ...]]]:
    """The naive reference: wanted elements that no rank holds."""
    found: set[tuple[int, tuple[int, ...]]] = set()
    for tensor, shape in enumerate(table.shape):
        marks = []
        for side in (sources, targets):
            mark = np.zeros(shape, bool)
            for rank in range(side.ranks):
                for row in rows_of(side, rank):
                    if side.shards.tensor[row] == tensor:
                        mark[region(side.shards.start[row], side.shards.stop[row])] = True
            marks.append(mark)
        found |= {(tensor, tuple(index)) for index in np.argwhere(marks[1] & ~marks[0]).tolist()}
    return found


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), range_cost=st.sampled_from([0, 16, 1 << 20]))
def test_every_wanted_element_comes_exactly_once_and_is_right(seed, range_cost):
    check_all(plan_fleet(*some_fleet(seed), range_cost_bytes=range_cost))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_one_error_lists_exactly_what_nobody_holds(seed):
    table, sources, targets = some_fleet(seed, lose=0.4)
    missing = missing_elements(table, sources, targets)
    if not missing:
        check_all(plan_fleet(table, sources, targets))
        return
    with pytest.raises(LayoutError) as caught:
        plan_fleet(table, sources, targets)
    listed: set[tuple[int, tuple[int, ...]]] = set()
    for number, box in re.findall(r"t(\d+): rank \d+(?: and \d+ more)? wants \[(.*?)\];", str(caught.value)):
        ends = [tuple(map(int, part.split(":"))) for part in box.split(", ") if part]
        shape = [b - a for a, b in ends]
        pad = (0,) * (table.shape.shape[1] - len(ends))
        for index in np.ndindex(*shape):
            element = (int(number), (*(i + a for i, (a, _) in zip(index, ends, strict=True)), *pad))
            assert element not in listed
            listed.add(element)
    assert listed == missing


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_equal_input_gives_equal_plans(seed):
    one, two = plan_fleet(*some_fleet(seed)), plan_fleet(*some_fleet(seed))
    for name in ("tensor", "piece", "offset", "region_source", "wanted_regions"):
        assert np.array_equal(getattr(one, name), getattr(two, name))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_near_is_never_fetched_from_afar(seed):
    table, sources, targets = some_fleet(seed)
    plans = plan_fleet(table, sources, targets)

    def distance(source: int, target: int) -> int:
        return next((tier for tier, place in enumerate(("process", "host", "rack"))
                     if getattr(sources, place)[source] == getattr(targets, place)[target]), 3)  # fmt: skip

    for target in range(targets.ranks):
        moves = plans.moves(target)
        for source, tensor, start, stop in zip(
            moves.source, moves.tensor, moves.start, moves.stop, strict=True
        ):
            holders = [
                rank
                for rank in range(sources.ranks)
                for row in rows_of(sources, rank)
                if sources.shards.tensor[row] == tensor
                and (sources.shards.start[row] <= start).all()
                and (sources.shards.stop[row] >= stop).all()
            ]
            assert distance(source, target) == min(distance(rank, target) for rank in holders)


def whole(tensors: int, rows: int = 8) -> list[Row]:
    return [(t, [0, 0], [rows, 6]) for t in range(tensors)]


def split(tensors: int, parts: int, part: int, rows: int = 8, dimension: int = 0) -> list[Row]:
    shape = [rows, 6] if dimension == 0 else [rows, 8]
    step = shape[dimension] // parts
    start, stop = [0, 0], [*shape]
    start[dimension], stop[dimension] = part * step, (part + 1) * step
    return [(t, start, stop) for t in range(tensors)]


def table_of(tensors: int, rows: int = 8, columns: int = 6) -> TensorTable:
    return TensorTable.of([(f"layer.{t}.weight", (rows, columns), 2) for t in range(tensors)])


def test_a_gap_names_tensor_rank_box_and_nearest_holder():
    sources = Side.spread(ShardColumns.of([[(0, [0, 0], [3, 6])], [(0, [5, 0], [8, 6])]], 2))
    targets = Side.spread(ShardColumns.of([[(0, [0, 0], [8, 6]), (1, [0, 0], [1, 1])]], 2), [0, 0])
    with pytest.raises(LayoutError) as caught:
        plan_fleet(table_of(2), sources, targets)
    assert str(caught.value).splitlines() == [
        "2 boxes are wanted, but nobody holds them:",
        "  layer.0.weight: rank 0 and 1 more wants [3:5, 0:6]; the nearest holder is rank 0 with [0:3, 0:6]",
        "  layer.1.weight: rank 0 and 1 more wants [0:1, 0:1]; nobody holds any of this tensor",
    ]


@pytest.mark.parametrize("who", ["source", "destination"])
def test_a_box_outside_its_tensor_is_refused(who):
    good, bad = ShardColumns.of([whole(1)], 2), ShardColumns.of([[(0, [0, 0], [9, 6])]], 2)
    sides = (bad, good) if who == "source" else (good, bad)
    with pytest.raises(
        LayoutError, match=rf"layer.0.weight: {who} layout 0 has \[0:9, 0:6\], the shape is \[8, 6\]"
    ):
        plan_fleet(table_of(1), *map(Side.spread, sides))


@pytest.mark.parametrize(("holders", "readers", "tensors"), [(2, 16, 1), (3, 1, 40), (4, 8, 7), (5, 3, 60)])
def test_replicated_sources_share_the_load(holders, readers, tensors):
    sources = Side.spread(ShardColumns.of([whole(tensors)], 2), [0] * holders)
    targets = Side.spread(ShardColumns.of([whole(tensors)], 2), [0] * readers, first_host=99)
    plans = plan_fleet(table_of(tensors), sources, targets)
    check_all(plans)
    assert summarize(plans).egress_max_over_mean <= 1 + holders / (readers * tensors)


def test_who_has_private_work_gets_less_of_the_shared():
    rows = whole(40)
    sources = Side.spread(ShardColumns.of([rows, rows[:30]], 2))  # tensors 30 to 39 are only at rank 0
    targets = Side.spread(ShardColumns.of([rows], 2), [0], first_host=99)
    summary = summarize(plan_fleet(table_of(40), sources, targets))
    assert summary.egress_max_over_mean <= 1.05 and summary.egress_bound_max_over_mean == 1


def test_a_verified_replica_on_the_same_host_is_read_instead_of_the_trainer():
    trainer = Side.spread(ShardColumns.of([split(3, 4, part) for part in range(4)], 2))
    server = ShardColumns.of([split(3, 2, part) for part in range(2)], 2)
    verified = Side.spread(server, first_host=7)
    plans = plan_fleet(
        table_of(3), join_sides(trainer, verified), Side.spread(server, [0, 1, 0, 1], first_host=7)
    )
    check_all(plans)
    assert all(set(plans.moves(rank).source.tolist()) <= {4, 5} for rank in range(4))


def test_each_pair_needs_one_range_and_replicas_cost_no_staging():
    sources = Side.spread(ShardColumns.of([split(5, 4, part) for part in range(4)], 2))
    shards = ShardColumns.of([split(5, 2, part, dimension=1) for part in range(2)], 2)
    plans = [
        plan_fleet(
            table_of(5, columns=8),
            Side.spread(_widen(sources.shards)),
            Side.spread(shards, [0, 1] * replicas),
        )
        for replicas in (1, 6)
    ]
    one, six = map(summarize, plans)
    assert one.ranges_per_pair_max == six.ranges_per_pair_max == 1
    assert one.slot_bytes_over_distinct == six.slot_bytes_over_distinct == 1
    assert one.slot_bytes_total == six.slot_bytes_total == 5 * 8 * 64  # 8 parcels of each tensor, padded
    for rank in range(12):
        assert np.array_equal(plans[1].ranges(rank).offset, plans[0].ranges(rank % 2).offset)


def _widen(shards: ShardColumns) -> ShardColumns:
    return ShardColumns(shards.first, shards.tensor, shards.start, shards.stop + np.array([0, 2]))


def test_a_second_layout_with_a_common_grid_shares_order_and_ranges():
    sources = Side.spread(ShardColumns.of([split(6, 2, part) for part in range(2)], 2))
    wide = [split(6, 8, part) for part in range(8)] + [split(6, 4, part) for part in range(4)]
    plans = plan_fleet(table_of(6), sources, Side.spread(ShardColumns.of(wide, 2), first_host=9))
    check_all(plans)
    summary = summarize(plans)
    assert summary.ranges_per_pair_max == 1 and summary.slot_bytes_over_distinct == 1


@pytest.mark.parametrize(("range_cost", "ranges", "is_copied"), [(0, 2, False), (1 << 20, 1, True)])
def test_small_shared_tensors_are_copied_beside_each_readers_own_if_that_is_cheaper(
    range_cost, ranges, is_copied
):
    table = TensorTable.of([("weight", (8, 6), 2), ("norm", (6,), 2)])
    sources = Side.spread(ShardColumns.of([[(0, [0, 0], [8, 6]), (1, [0], [6])]], 2))
    layouts: list[list[Row]] = [[(0, [2 * n, 0], [2 * n + 2, 6]), (1, [0], [6])] for n in range(4)]
    plans = plan_fleet(table, sources, Side.spread(ShardColumns.of(layouts, 2)), range_cost_bytes=range_cost)
    check_all(plans)
    summary = summarize(plans)
    assert summary.ranges_per_pair_max == ranges
    assert (summary.slot_bytes_over_distinct > 1) == is_copied


def test_the_counts_are_those_of_the_unfolded_plans():
    plans = plan_fleet(*some_fleet(7))
    summary = summarize(plans)
    ranges = [plans.ranges(rank) for rank in range(plans.targets.ranks)]
    assert summary.ranges == sum(len(r.source) for r in ranges) > 0
    assert (
        summary.bytes_moved
        == summary.bytes_needed
        == sum(bytes_of_moves(plans, rank) for rank in range(len(ranges)))
    )


def bytes_of_moves(plans: Plans, rank: int) -> int:
    moves = plans.moves(rank)
    places = {
        (s, o): n
        for s, o, n in zip(*(a.tolist() for a in (moves.source, moves.offset, moves.size)), strict=True)
    }
    return sum(places.values())  # a move that fills several shards brings its bytes once
