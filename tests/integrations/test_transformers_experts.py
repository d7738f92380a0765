"""Stacked experts, however they are sharded, are the single experts of the saved checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.integrations.reference import assemble
from weightsync import Box, Shard
from weightsync.integrations.torch_sharding import torch_shards
from weightsync.integrations.transformers_experts import unstack_experts


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("parts", [1, 3])
def test_any_sharding_of_stacked_experts_is_the_saved_checkpoint(
    axis: int, parts: int, tmp_path: Path
) -> None:
    config = Qwen3MoeConfig(
        vocab_size=20, hidden_size=8, moe_intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    ranks: list[list[Shard]] = [[] for _ in range(parts)]
    for shard in torch_shards(model):
        if ".experts." not in shard.name:
            ranks[0].append(shard)
            continue
        at = 0
        for rank, view in enumerate(shard.view.tensor_split(parts, axis)):
            start = tuple(at if d == axis else 0 for d in range(3))
            box = Box(start, tuple(a + n for a, n in zip(start, view.shape, strict=True)))
            ranks[rank].append(Shard(shard.name, box, view, shard.shape))
            at += view.shape[axis]
    held = assemble(map(unstack_experts, ranks), saved)
    assert all(torch.equal(count, torch.ones_like(count)) for count in held.values())
