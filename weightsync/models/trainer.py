"""Which box of which tensor each trainer rank holds, for FSDP, expert, tensor and pipeline parallel training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightsync.errors import ConfigError
from weightsync.models.catalog import Catalog, RowCollector
from weightsync.models.rules import TensorRule, stage_of_layers
from weightsync.moves import Int64s
from weightsync.wire.columns import Int32s, Side


@dataclass(frozen=True, slots=True)
class TrainerMesh:
    """Degrees of parallelism of the trainer; `fsdp`, `etp` None: not given.

    A pipeline stage has `tp * fsdp * ep` ranks for each of `hsdp` replicas, tensor-parallel index fastest. Dense
    tensors are cut by `tp`, then along dimension 0 over the `fsdp * ep` others (in chunks of the rounded-up size, as
    FSDP2 does, so that the last may be short or empty); without `fsdp` these hold replicas, as in Megatron. Experts
    are dealt to `ep` groups in blocks, cut by `etp` (default `tp`), and over what is left sharded like dense tensors:
    FSDP shards stacked experts by expert, or inside each expert if there are more ranks than experts.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    fsdp: int | None = None
    hsdp: int = 1
    host: int = 8

    @property
    def stage_ranks(self) -> int:
        """Ranks of one stage of one replica."""
        return self.tp * (self.fsdp or 1) * self.ep

    @property
    def ranks(self) -> int:
        return self.stage_ranks * self.pp * self.hsdp


def train(catalog: Catalog, mesh: TrainerMesh) -> Side:
    """The trainer's ranks: stage by stage, replica by replica. Raises ConfigError for sizes that don't divide."""
    model, stage_ranks = catalog.model, mesh.stage_ranks
    stages = stage_of_layers(model.layers, mesh.pp)
    collector = RowCollector(mesh.pp * stage_ranks, catalog.table.shape.shape[1])
    index = np.arange(stage_ranks)
    for rule, numbers in zip(model.rules, catalog.numbers, strict=True):
        of_layer = (
            stages[list(rule.layers)] if rule.layers else np.array([mesh.pp - 1 if rule.is_last else 0])
        )
        for stage in np.unique(of_layer).tolist():
            tensors, layouts = numbers[of_layer == stage], stage * stage_ranks + index
            if rule.experts:
                _add_experts(collector, rule, mesh, layouts, tensors)
            else:
                start, stop = rule.cut(index % mesh.tp, mesh.tp)
                if mesh.fsdp:
                    _chunk(start, stop, index // mesh.tp, mesh.fsdp * mesh.ep)
                collector.add(layouts, tensors[:, 0], start, stop)
    shards, _ = collector.columns()
    layout = np.arange(mesh.pp)[:, None, None] * stage_ranks + index + np.zeros((1, mesh.hsdp, 1), np.int64)
    return Side.spread(shards, layout.reshape(-1), ranks_per_host=mesh.host)


def _add_experts(
    collector: RowCollector, rule: TensorRule, mesh: TrainerMesh, layouts: Int64s, tensors: Int32s
) -> None:
    etp = mesh.tp if mesh.etp is None else mesh.etp
    if mesh.stage_ranks % (mesh.ep * etp):
        raise ConfigError(
            f"trainer: a stage of {mesh.stage_ranks} ranks can't be divided by ep={mesh.ep}, etp={etp}"
        )
    if rule.experts % mesh.ep:
        raise ConfigError(f"trainer: {rule.experts} experts can't be divided by ep={mesh.ep}")
    shards, local = mesh.stage_ranks // (mesh.ep * etp), rule.experts // mesh.ep
    index = np.arange(mesh.stage_ranks)
    group, shard = index // etp % mesh.ep, index // (etp * mesh.ep)
    start, stop = rule.cut(index % etp, etp)
    per_rank = local
    if mesh.fsdp and shards > local:
        _chunk(start, stop, shard, shards)
    elif mesh.fsdp:
        per_rank = -(-local // shards)
    for rank in range(mesh.stage_ranks):
        skip = int(shard[rank]) * per_rank if mesh.fsdp and shards <= local else 0
        begin = int(group[rank]) * local
        mine = tensors[:, begin + min(skip, local) : begin + min(skip + per_rank, local)]
        collector.add(
            layouts[rank : rank + 1], mine.reshape(-1), start[rank : rank + 1], stop[rank : rank + 1]
        )


def _chunk(start: Int64s, stop: Int64s, index: Int64s, count: int) -> None:
    """Keep chunk `index` of `count` of each box along dimension 0, as `torch.chunk` cuts; in place."""
    per_rank = -(-(stop[:, 0] - start[:, 0]) // count)
    end = stop[:, 0].copy()
    start[:, 0] = np.minimum(start[:, 0] + index * per_rank, end)
    stop[:, 0] = np.minimum(start[:, 0] + per_rank, end)
