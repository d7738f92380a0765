"""A real trainer for the tests: `torchrun ... -m tests.sync.trainer ADDRESS FOLDER MODEL MESH MEMBERS STEPS`.

Trains a tiny model with FSDP2 (mesh `2`) or FSDP2 over tensor parallelism (mesh `2x2`), publishes after each step of the
optimizer, and leaves in FOLDER the full state dict of each version (`v1.pt`, …) and the last one as a distributed
checkpoint (`dcp`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import weightsync as ws
from weightsync.integrations.torch_sharding import torch_shards

TINY = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def make(kind: str) -> nn.Module:
    """`llama`, or `mixtral` whose experts are three-dimensional parameters."""
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**TINY))
    return MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2))


def shard(model: nn.Module, shape: tuple[int, ...]) -> None:
    if len(shape) == 1:
        mesh = init_device_mesh("cpu", shape)
    else:
        whole = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        mesh = whole["dp"]
        inward = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan = {name: ColwiseParallel() for name in inward}
        plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        for layer in model.model.layers:
            parallelize_module(layer, whole["tp"], plan)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(address: str, folder: Path, kind: str, mesh: str, members: int, steps: int) -> None:
    dist.init_process_group("gloo")
    model = make(kind)
    shard(model, tuple(int(size) for size in mesh.split("x")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    tokens = torch.randint(
        0, TINY["vocab_size"], (4, 17), generator=torch.Generator().manual_seed(dist.get_rank() // 2)
    )
    with ws.Publisher.from_process_group(address) as publisher:
        publisher.register(torch_shards(model))
        publisher.wait_for_members(members, 60.0)
        for _ in range(steps):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ticket = publisher.publish()
            whole = get_model_state_dict(
                model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
            )
            if dist.get_rank() == 0:
                torch.save(whole, folder / f"v{ticket.version}.pt")
                print(f"version {ticket.version}: loss {loss.item():.3f}", flush=True)
            ticket.wait("live", 60.0)  # every server sees every version
        dcp.save(get_model_state_dict(model), checkpoint_id=folder / "dcp")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    address, folder, kind, mesh, members, steps = sys.argv[1:]
    torch.set_num_threads(1)
    train(address, Path(folder), kind, mesh, int(members), int(steps))
