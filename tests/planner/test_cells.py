"""Cells: all that is held is staged, every want is a sum of whole cells, and what is staged stays where it is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.execution import logical_tensors, region, rows_of
from tests.planner.test_models import TINY
from tests.planner.test_planner import missing_elements, some_box, some_fleet, some_side
from weightsync.errors import LayoutError
from weightsync.models import ServerMesh, TrainerMesh, catalog_of, model_of, serve, train
from weightsync.wire.cells import Cells, Reads, extend_cells, match_cells, plan_cells
from weightsync.wire.columns import ShardColumns, Side, TensorTable

Row = tuple[int, list[int], list[int]]
SEEDS = st.integers(0, 2**32 - 1)
COLUMNS = ("first", "tensor", "start", "stop", "offset", "size", "parent")


def nobody(width: int) -> Side:
    return Side.spread(ShardColumns.of([], width))


def wants_of(side: Side, rank: int) -> ShardColumns:
    rows = rows_of(side, rank)
    some, shards = slice(rows.start, rows.stop), side.shards
    return ShardColumns(np.array([0, len(rows)]), shards.tensor[some], shards.start[some], shards.stop[some])


def some_targets(seed: int, table: TensorTable, sources: Side) -> Side:
    """Up to three layouts of boxes that are held, perhaps none."""
    rng = np.random.default_rng(seed)
    width = table.shape.shape[1]
    layouts: list[list[Row]] = [[] for _ in range(int(rng.integers(0, 4)))]
    for layout in layouts:
        for tensor in range(len(table.shape)):
            for _ in range(int(rng.integers(0, 3))):
                layout.append((tensor, *some_box(rng, tuple(table.shape[tensor].tolist()))))
    if not layouts:
        return nobody(width)
    targets = some_side(rng, layouts, len(layouts), width)
    return nobody(width) if missing_elements(table, sources, targets) else targets


def box(cells: Cells, row: int) -> tuple[slice, ...]:
    return region(cells.start[row], cells.stop[row])


def check(table: TensorTable, sources: Side, cells: Cells) -> list[np.ndarray]:
    """Cells lie aligned and apart, in shards of their rank; gives the slots, filled."""
    logical = logical_tensors(table)
    slots = []
    for rank in range(sources.ranks):
        rows, own = range(int(cells.first[rank]), int(cells.first[rank + 1])), rows_of(sources, rank)
        slot, end = np.zeros(int(cells.slot_bytes[rank]), np.uint8), 0
        assert len(slot) % 64 == 0 and len(slot) >= 64
        for row in rows:
            tensor, shard = cells.tensor[row], own[int(cells.parent[row])]
            assert sources.shards.tensor[shard] == tensor
            assert (sources.shards.start[shard] <= cells.start[row]).all()
            assert (cells.stop[row] <= sources.shards.stop[shard]).all()
            data = np.ascontiguousarray(logical[tensor][box(cells, row)])
            offset, size = int(cells.offset[row]), int(cells.size[row])
            assert offset % 64 == 0 and offset >= end and size == data.nbytes > 0
            end = offset + size
            slot[offset:end] = data.reshape(-1).view(np.uint8)
        assert len(slot) == max(64, -(-end // 64) * 64)
        slots.append(slot)
    return slots


def staged_counts(table: TensorTable, cells: Cells) -> list[np.ndarray]:
    """In how many distinct boxes each element is."""
    counts = [np.zeros(shape, int) for shape in table.shape]
    for tensor, start, stop in {
        (int(cells.tensor[row]), tuple(cells.start[row]), tuple(cells.stop[row])) for row in range(len(cells.tensor))
    }:  # fmt: skip
        counts[tensor][region(np.array(start), np.array(stop))] += 1
    return counts


def carry_out(
    table: TensorTable, cells: Cells, slots: list[np.ndarray], wants: ShardColumns, reads: Reads
) -> None:
    """Every wanted element is written exactly once, and is right."""
    logical = logical_tensors(table)
    places = [(int(r), int(c)) for r, c in zip(reads.rank, reads.cell, strict=True)]
    assert places == sorted(places)
    for want in range(len(wants.tensor)):
        tensor = logical[wants.tensor[want]]
        got, written = np.zeros_like(tensor), np.zeros(tensor.shape, int)
        for read in np.flatnonzero(reads.want == want).tolist():
            rank = int(reads.rank[read])
            row = int(cells.first[rank] + reads.cell[read])
            assert cells.tensor[row] == wants.tensor[want]
            offset, part = int(cells.offset[row]), box(cells, row)
            data = slots[rank][offset : offset + int(cells.size[row])].view(tensor.dtype)
            got[part] = data.reshape(got[part].shape)
            written[part] += 1
        inside = np.zeros(tensor.shape, int)
        inside[region(wants.start[want], wants.stop[want])] = 1
        assert np.array_equal(written, inside)
        assert np.array_equal(got, tensor * inside.astype(tensor.dtype))


def is_sum(table: TensorTable, cells: Cells, wants: ShardColumns, want: int) -> bool:
    """The naive reference: some disjoint cells fill the want. Only whole cells inside it can."""
    wanted = np.zeros(table.shape[wants.tensor[want]], bool)
    wanted[region(wants.start[want], wants.stop[want])] = True
    for row in range(len(cells.tensor)):
        if cells.tensor[row] == wants.tensor[want]:
            inside = (cells.start[row] >= wants.start[want]) & (cells.stop[row] <= wants.stop[want])
            if inside.all():
                wanted[box(cells, row)] = False
    return not wanted.any()


def check_match(table: TensorTable, cells: Cells, slots: list[np.ndarray], wants: ShardColumns) -> bool:
    reads = match_cells(table, cells, wants)
    sums = all(is_sum(table, cells, wants, want) for want in range(len(wants.tensor)))
    assert (reads is not None) == sums
    if reads is not None:
        carry_out(table, cells, slots, wants, reads)
    return sums


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS)
def test_all_that_is_held_is_staged_once_and_every_want_is_a_sum_of_cells(seed):
    table, sources, _ = some_fleet(seed)
    targets = some_targets(seed, table, sources)
    cells = plan_cells(table, sources, targets)
    slots = check(table, sources, cells)
    for tensor, count in enumerate(staged_counts(table, cells)):
        held = np.zeros(count.shape, int)
        for rank in range(sources.ranks):
            for row in rows_of(sources, rank):
                if sources.shards.tensor[row] == tensor:
                    held[region(sources.shards.start[row], sources.shards.stop[row])] = 1
        assert np.array_equal(count, held)
    if not targets.ranks:
        assert sum(count.sum() for count in staged_counts(table, cells)) == sum(
            int(cells.size[row]) // int(table.itemsize[cells.tensor[row]]) for row in range(len(cells.tensor))
        )
    for rank in range(targets.ranks):
        assert check_match(table, cells, slots, wants_of(targets, rank))


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS, rounds=st.integers(1, 3))
def test_extended_cells_keep_their_places_and_serve_old_and_new(seed, rounds):
    table, sources, _ = some_fleet(seed)
    served = [some_targets(seed, table, sources)]
    cells = plan_cells(table, sources, served[0])
    for number in range(1, rounds + 1):
        targets = some_targets(seed + number, table, sources)
        before = all(
            is_sum(table, cells, wants_of(targets, rank), want)
            for rank in range(targets.ranks)
            for want in range(len(wants_of(targets, rank).tensor))
        )
        longer, origin = extend_cells(table, sources, cells, targets)
        slots = check(table, sources, longer)
        assert (len(origin) == 0) == before
        check_growth(cells, longer, origin)
        served.append(targets)
        for side in served:
            assert all(check_match(table, longer, slots, wants_of(side, rank)) for rank in range(side.ranks))
        again, none = extend_cells(table, sources, longer, targets)
        assert len(none) == 0 and all(
            np.array_equal(getattr(again, name), getattr(longer, name)) for name in COLUMNS
        )
        stranger = some_targets(seed + number + 100, table, sources)
        for rank in range(stranger.ranks):
            check_match(table, longer, slots, wants_of(stranger, rank))
        cells = longer


def check_growth(cells: Cells, longer: Cells, origin: np.ndarray) -> None:
    """Old rows are a prefix of each rank; each new box lies in the old cell it comes from and is no old box."""
    known = {(int(t), *a, *b) for t, a, b in zip(cells.tensor, cells.start, cells.stop, strict=True)}
    at = 0
    for rank in range(cells.ranks):
        old, new = (
            {name: getattr(c, name)[c.first[rank] : c.first[rank + 1]] for name in COLUMNS[1:]}
            for c in (cells, longer)
        )
        count = len(old["tensor"])
        assert all(np.array_equal(new[name][:count], old[name]) for name in old)
        assert (new["offset"][count:] >= cells.slot_bytes[rank]).all()
        for row in range(count, len(new["tensor"])):
            source = int(origin[at])
            at += 1
            assert 0 <= source < count and old["tensor"][source] == new["tensor"][row]
            assert (old["start"][source] <= new["start"][row]).all()
            assert (new["stop"][row] <= old["stop"][source]).all()
            assert (int(new["tensor"][row]), *new["start"][row], *new["stop"][row]) not in known
    assert at == len(origin)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_what_nobody_holds_is_an_error_when_planning_and_when_extending(seed):
    table, sources, targets = some_fleet(seed, lose=0.4)
    if not missing_elements(table, sources, targets):
        return
    with pytest.raises(LayoutError, match="wanted, but nobody holds them") as first:
        plan_cells(table, sources, targets)
    cells = plan_cells(table, sources, nobody(table.shape.shape[1]))
    with pytest.raises(LayoutError, match="wanted, but nobody holds them") as second:
        extend_cells(table, sources, cells, targets)
    ranks = [{line.split(": ")[1].split(" wants")[0] for line in str(e.value).splitlines()[1:]}
             for e in (first, second)]  # fmt: skip
    assert ranks[0] == ranks[1]


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_the_nearest_then_the_lowest_rank_is_read(seed):
    table, sources, _ = some_fleet(seed)
    targets = some_targets(seed, table, sources)
    cells = plan_cells(table, sources, targets)
    near = np.random.default_rng(seed).integers(0, 3, sources.ranks)
    boxes = [(int(t), *a, *b) for t, a, b in zip(cells.tensor, cells.start, cells.stop, strict=True)]
    for rank, tiers in itertools.product(range(targets.ranks), (None, near)):
        reads = match_cells(table, cells, wants_of(targets, rank), tiers)
        assert reads is not None
        distance = np.zeros(sources.ranks, int) if tiers is None else tiers
        for r, c in zip(reads.rank.tolist(), reads.cell.tolist(), strict=True):
            same = [
                (int(distance[other]), other)
                for other in range(sources.ranks)
                if boxes[cells.first[r] + c] in boxes[cells.first[other] : cells.first[other + 1]]
            ]
            assert (int(distance[r]), r) == min(same)


@pytest.mark.parametrize(
    "trainer",
    [TrainerMesh(fsdp=5, tp=2), TrainerMesh(fsdp=3, ep=4, hsdp=2), TrainerMesh(tp=2, pp=2, ep=4, etp=1)],
    ids=str,
)
def test_servers_that_come_later_get_the_same_bytes(trainer):
    catalog = catalog_of(model_of(TINY["qwen3_moe"]))
    sources = train(catalog, trainer)
    first, later = (
        serve(catalog, mesh, first_host=trainer.ranks).side
        for mesh in (ServerMesh(tp=2), ServerMesh(tp=4, ep=2))
    )
    cells = plan_cells(catalog.table, sources, first)
    assert match_cells(catalog.table, cells, wants_of(later, 0)) is None
    longer, origin = extend_cells(catalog.table, sources, cells, later)
    check_growth(cells, longer, origin)
    slots = check(catalog.table, sources, longer)
    for side in (first, later):
        for rank in range(side.ranks):
            wants = wants_of(side, rank)
            reads = match_cells(catalog.table, longer, wants)
            assert reads is not None
            carry_out(catalog.table, longer, slots, wants, reads)


def test_without_destinations_the_cells_of_one_rank_are_its_shards_by_tensor_and_box():
    table = TensorTable.of([("a", (40, 6), 2), ("scalar", (), 4), ("empty", (0, 3), 2), ("b", (5,), 1)])
    cut: list[Row] = [(0, [n, 3 * m], [n + 1, 3 * m + 3]) for n in range(40) for m in range(2)]
    shards: list[Row] = [*cut, (1, [], []), (2, [0, 0], [0, 3]), (3, [0], [5])]
    sources = Side.spread(ShardColumns.of([shards], 2))
    cells = plan_cells(table, sources, nobody(2))
    check(table, sources, cells)
    assert cells.parent.tolist() == [*range(81), 82]
    assert cells.offset.tolist() == [64 * n for n in range(82)]


def test_a_held_box_that_a_destination_reads_is_not_staged_a_second_time():
    table = TensorTable.of([("w", (8, 4), 2), ("unwanted", (8,), 2)])
    whole: list[Row] = [(0, [0, 0], [8, 4]), (1, [0], [8])]
    sources = Side.spread(ShardColumns.of([whole], 2), [0] * 4, ranks_per_host=1)
    targets = Side.spread(ShardColumns.of([whole[:1]], 2), ranks_per_host=1, first_host=2)
    cells = plan_cells(table, sources, targets)
    assert sorted(cells.tensor.tolist()) == [0, 1]
    reads = match_cells(table, cells, wants_of(targets, 0))
    assert reads is not None and reads.rank.tolist() == [2]


def test_a_cut_in_one_cell_does_not_reach_into_its_neighbour():
    table = TensorTable.of([("w", (8, 8), 2)])
    halves = ShardColumns.of([[(0, [0, 0], [8, 4])], [(0, [0, 4], [8, 8])]], 2)
    sources = Side.spread(halves)
    cells = plan_cells(table, sources, nobody(2))
    wants: list[list[Row]] = [[(0, [0, 0], [8, 6])], [(0, [0, 0], [5, 8])]]
    longer, origin = extend_cells(table, sources, cells, Side.spread(ShardColumns.of(wants, 2)))
    first = np.diff(longer.first) - 1
    assert first.tolist() == [1, 4 - 1] and origin.tolist() == [0] * 4
    reads = match_cells(table, longer, ShardColumns.of(wants[:1], 2))
    assert reads is not None and reads.rank.tolist() == [0, 1, 1] and reads.cell[0] == 0


def test_what_is_a_sum_of_cells_already_is_not_cut_again_for_others():
    table = TensorTable.of([("w", (16, 3), 2)])
    sources = Side.spread(ShardColumns.of([[(0, [0, 0], [8, 3]), (0, [8, 0], [16, 3])]], 2))
    cells = plan_cells(table, sources, nobody(2))
    cells, _ = extend_cells(table, sources, cells, Side.spread(ShardColumns.of([[(0, [4, 0], [8, 3])]], 2)))
    wants: list[list[Row]] = [[(0, [4, 0], [12, 3])], [(0, [6, 0], [16, 3])]]
    longer, origin = extend_cells(table, sources, cells, Side.spread(ShardColumns.of(wants, 2)))
    added = sorted(
        zip(longer.start[3:, 0].tolist(), longer.stop[3:, 0].tolist(), origin.tolist(), strict=True)
    )
    assert added == [(6, 8, 0), (8, 12, 1)]
