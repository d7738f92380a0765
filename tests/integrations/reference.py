"""A slow, obvious executor of shards: what the resharding planner must do, element by element."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from weightsync import Box, Shard


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def fill_from(shards: Iterable[Shard], checkpoint: Mapping[str, torch.Tensor]) -> None:
    """Write to each shard's view its box of the checkpoint."""
    for shard in shards:
        whole = checkpoint[shard.name]
        assert tuple(whole.shape) == shard.shape, shard.name
        shard.view.copy_(whole[region(shard.box)])


def assemble(
    ranks: Iterable[Iterable[Shard]], checkpoint: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """How many times each element of the checkpoint is held; every copy must equal the checkpoint's."""
    held = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in checkpoint.items()}
    for shards in ranks:
        for shard in shards:
            assert shard.name in checkpoint, f"{shard.name} is no checkpoint tensor"
            whole = checkpoint[shard.name]
            assert tuple(whole.shape) == shard.shape, f"{shard.name}: {shard.shape}, not {tuple(whole.shape)}"
            assert torch.equal(shard.view, whole[region(shard.box)]), f"{shard.name} {shard.box}"
            held[shard.name][region(shard.box)] += 1
    return held
