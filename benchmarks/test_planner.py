"""Planning a trillion parameters: 256 trainer ranks to 128 server ranks, from layouts to plans."""

from __future__ import annotations

import numpy as np
import pytest

from weightsync.models import ServerMesh, TrainerMesh, catalog_of, model_of, named_config, serve, train
from weightsync.wire.planner import plan_fleet
from weightsync.wire.plans import Plans
from weightsync.wire.summary import summarize

CASES = [
    ("kimi-k2", TrainerMesh(fsdp=32, ep=8), ServerMesh(tp=8, ep=16)),
    ("kimi-k2", TrainerMesh(tp=4, pp=4, ep=16, etp=1), ServerMesh(tp=8, ep=32, etp=1, replicas=4)),
    ("qwen3-235b-a22b", TrainerMesh(fsdp=32, ep=8), ServerMesh(tp=4, ep=32, etp=1, replicas=4)),
    ("llama-3-405b", TrainerMesh(fsdp=256), ServerMesh(tp=8, replicas=16)),
    ("llama-3-405b", TrainerMesh(tp=8, pp=8, ep=4), ServerMesh(tp=8, replicas=16)),
]


def check_rank(plans: Plans, rank: int) -> None:
    """One destination gets each wanted element once: its moves are disjoint, lie in its shards, and fill them."""
    shards, moves = plans.targets.shards, plans.moves(rank)
    begin, end = shards.first[plans.targets.layout[rank] :][:2]
    wanted = np.prod(shards.stop[begin:end] - shards.start[begin:end], axis=1)
    size = np.prod(moves.stop - moves.start, axis=1)
    assert np.array_equal(np.bincount(moves.shard, size, minlength=len(wanted)), wanted)
    assert (shards.start[begin + moves.shard] <= moves.start).all()
    assert (moves.stop <= shards.stop[begin + moves.shard]).all()
    order = np.lexsort((moves.start[:, 1], moves.start[:, 0], moves.shard))
    before, after = order[:-1], order[1:]
    same = (moves.shard[before] == moves.shard[after]) & (moves.start[before, 0] == moves.start[after, 0])
    assert (~same | (moves.stop[before, 1] <= moves.start[after, 1])).all()


@pytest.mark.benchmark(group="planner, 256 to 128 ranks")
@pytest.mark.parametrize(("name", "trainer", "servers"), CASES, ids=lambda value: str(value))
def test_planner(benchmark, name, trainer, servers):
    model = model_of(named_config(name))

    def run() -> Plans:
        catalog = catalog_of(model)
        return plan_fleet(catalog.table, train(catalog, trainer), serve(catalog, servers).side)

    plans = benchmark.pedantic(run, rounds=3, warmup_rounds=1)
    summary = summarize(plans)
    assert (summary.source_ranks, summary.target_ranks) == (256, 128)
    assert summary.bytes_moved == summary.bytes_needed
    for rank in (0, 77, 127):
        check_rank(plans, rank)
    benchmark.extra_info.update(
        bytes=summary.bytes_moved, moves=summary.moves, ranges_per_pair=summary.ranges_per_pair_mean,
        egress_max_over_mean=summary.egress_max_over_mean, egress_bound=summary.egress_bound_max_over_mean,
        staged_over_distinct=summary.slot_bytes_over_distinct, wrong=0,
    )  # fmt: skip
