"""End to end: a trainer publishes a Hugging Face model; a server with fused weights follows it by its own loader."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from weightsync import Publisher, Subscriber, fetch_layout
from weightsync.integrations.loader_tracing import trace_loader

DEADLINE_S = 60.0
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Rows(nn.Module):
    """A projection that is some rows of a fused one, which belongs to another module."""

    def __init__(self, owner: nn.Linear, start: int, stop: int) -> None:
        super().__init__()
        self.fused, self.rows = (owner,), slice(start, stop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.fused[0].weight[self.rows])


class Server(nn.Module):
    """Llama with `qkv_proj` and `gate_up_proj`, and the loader that such servers have."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(config).eval()
        self.places: dict[str, tuple[str, int]] = {}
        for prefix, layer in (("self_attn", FUSED["qkv_proj"]), ("mlp", FUSED["gate_up_proj"])):
            fused_name = next(name for name, parts in FUSED.items() if parts is layer)
            for number in range(config.num_hidden_layers):
                path = f"model.layers.{number}.{prefix}"
                owner = self.model.get_submodule(path)
                sizes = [getattr(owner, part).weight.shape[0] for part in layer]
                fused = nn.Linear(config.hidden_size, sum(sizes), bias=False)
                at = 0
                for part, size in zip(layer, sizes, strict=True):
                    setattr(owner, part, Rows(fused, at, at + size))
                    self.places[f"{path}.{part}.weight"] = (f"{path}.{fused_name}.weight", at)
                    at += size
                setattr(owner, fused_name, fused)
        self.requires_grad_(False)
        for parameter in self.parameters():
            parameter.data.zero_()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.model.named_parameters())
        for name, weight in weights:
            place, at = self.places.get(name, (name, 0))
            parameters[place].data.narrow(0, at, weight.shape[0]).copy_(weight)
        return set(parameters)


def reloaded(trainer: LlamaForCausalLM) -> Server:
    """A server that loads the trainer's weights as a checkpoint."""
    server = Server(trainer.config)
    server.load_weights(trainer.state_dict().items())
    return server


def test_a_server_with_fused_weights_follows_a_trainer_by_its_own_loader(address: str) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = LlamaForCausalLM(config).eval()
    server = Server(config)
    tokens = torch.arange(10).reshape(1, 10)
    with Publisher(address, timeout_s=DEADLINE_S) as publisher, torch.no_grad():
        publisher.register(trainer.state_dict())
        layout = fetch_layout(address)
        shards = trace_loader(server.load_weights, server, layout)
        assert {shard.name for shard in shards} == set(trainer.state_dict())
        with Subscriber(address, shards, swap="copy", timeout_s=DEADLINE_S) as subscriber:
            for _ in range(2):
                for parameter in trainer.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                version = publisher.publish(wait="ready", timeout_s=DEADLINE_S).version
                with subscriber.step() as live:
                    assert live == version
                    got = server.model(tokens).logits
                assert torch.equal(got, reloaded(trainer).model(tokens).logits)
                torch.testing.assert_close(got, trainer(tokens).logits)
