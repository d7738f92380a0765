"""Plans carried out on real arrays, element by element where that is the point."""

from __future__ import annotations

import numpy as np

from weightsync.wire.columns import Side, TensorTable
from weightsync.wire.plans import Plans

_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def logical_tensors(table: TensorTable) -> list[np.ndarray]:
    """Tensors whose elements tell where they belong, as far as their size allows."""
    return [
        (np.arange(np.prod(shape), dtype=np.uint64) * 7 + 13 * number)
        .astype(_TYPES[int(size)])
        .reshape(shape)
        for number, (shape, size) in enumerate(zip(table.shape, table.itemsize, strict=True))
    ]


def region(start: np.ndarray, stop: np.ndarray) -> tuple[slice, ...]:
    return tuple(slice(int(a), int(b)) for a, b in zip(start, stop, strict=True))


def rows_of(side: Side, rank: int) -> range:
    """Rows of the columns that are one rank's shards."""
    layout = int(side.layout[rank])
    return range(int(side.shards.first[layout]), int(side.shards.first[layout + 1]))


def stage(plans: Plans, logical: list[np.ndarray], rank: int) -> np.ndarray:
    """A slot filled from what this rank holds, and from nothing else."""
    slot = np.full(int(plans.slot_bytes[rank]), 0xEE, np.uint8)
    staged, own = plans.staging(rank), rows_of(plans.sources, rank)
    assert len(staged.shard) == len(staged.tensor)
    assert (staged.offset[1:] >= staged.offset[:-1] + staged.size[:-1]).all()
    for t, a, b, offset, size, shard in zip(
        staged.tensor, staged.start, staged.stop, staged.offset, staged.size, staged.shard, strict=True
    ):
        row = own[int(shard)]
        assert plans.sources.shards.tensor[row] == t
        assert (plans.sources.shards.start[row] <= a).all() and (b <= plans.sources.shards.stop[row]).all()
        data = np.ascontiguousarray(logical[t][region(a, b)])
        assert offset % 64 == 0 and data.nbytes == size
        slot[offset : offset + size] = data.reshape(-1).view(np.uint8)
    return slot


def receive(
    plans: Plans, logical: list[np.ndarray], slots: list[np.ndarray], rank: int
) -> list[tuple[int, np.ndarray]]:
    """(tensor, data) of each shard of one destination. Asserts that each element is written exactly once, and that
    every byte is in a range that is read."""
    shards, own = plans.targets.shards, rows_of(plans.targets, rank)
    data = [np.zeros(shards.stop[row] - shards.start[row], logical[shards.tensor[row]].dtype) for row in own]
    written = [np.zeros(part.shape, int) for part in data]
    moves, ranges = plans.moves(rank), plans.ranges(rank)
    assert len(set(zip(ranges.source.tolist(), ranges.offset.tolist(), strict=True))) == len(ranges.source)
    for i, shard in enumerate(moves.shard.tolist()):
        at, source = int(moves.range[i]), int(moves.source[i])
        assert ranges.source[at] == source
        assert ranges.offset[at] <= moves.offset[i]
        assert moves.offset[i] + moves.size[i] <= ranges.offset[at] + ranges.size[at]
        row = own[shard]
        assert shards.tensor[row] == moves.tensor[i]
        inside = region(moves.start[i] - shards.start[row], moves.stop[i] - shards.start[row])
        part = slots[source][moves.offset[i] : moves.offset[i] + moves.size[i]].view(data[shard].dtype)
        data[shard][inside] = part.reshape(data[shard][inside].shape)
        written[shard][inside] += 1
    assert all((count == 1).all() for count in written)
    return [(int(shards.tensor[row]), part) for row, part in zip(own, data, strict=True)]


def check_all(plans: Plans) -> None:
    """Every destination gets exactly what slicing the logical tensors gives."""
    logical = logical_tensors(plans.tensors)
    slots = [stage(plans, logical, rank) for rank in range(plans.sources.ranks)]
    for rank in range(plans.targets.ranks):
        for row, (tensor, data) in zip(
            rows_of(plans.targets, rank), receive(plans, logical, slots, rank), strict=True
        ):
            box = region(plans.targets.shards.start[row], plans.targets.shards.stop[row])
            assert np.array_equal(data, logical[tensor][box])
