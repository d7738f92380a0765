"""Megatron layouts, made from real checkpoints by a plain routine, must reassemble those checkpoints exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.integrations.reference import assemble
from weightsync import Box, Publisher, Shard, Subscriber
from weightsync.errors import ConfigError, LayoutError
from weightsync.integrations.megatron import Grid, Rule, megatron_shards
from weightsync.integrations.megatron_cuts import Dimensions
from weightsync.integrations.megatron_families import DEEPSEEK, LLAMA, QWEN_MOE
from weightsync.tensors import find_tensors

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
}
MOE: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Case:
    """A model, how it is spread, and how Megatron writes it."""

    model: str
    config: dict[str, Any]
    family: tuple[Rule, ...]
    tp: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    stages: tuple[int, ...] | None = None
    placement: tuple[tuple[int, ...], ...] | None = None
    fused_norms: bool = True
    experts: str = "grouped"


CASES = {
    "llama, tied, biased, two stages of two chunks": Case(
        "Llama",
        {**SMALL, "num_hidden_layers": 4, "num_key_value_heads": 2, "attention_bias": True,
         "tie_word_embeddings": True},
        LLAMA, tp=2, pp=2, vpp=2,
    ),
    "qwen3, more ranks than groups": Case(
        "Qwen3", {**SMALL, "num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 8}, LLAMA,
        tp=4, fused_norms=False,
    ),
    "qwen3-moe, expert parallel, uneven stages": Case(
        "Qwen3Moe", {**SMALL, **MOE, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4},
        QWEN_MOE, tp=2, dp=2, pp=2, ep=4, stages=(1, 2),
    ),
    "qwen2-moe, expert tensor parallel, experts moved": Case(
        "Qwen2Moe",
        {**SMALL, **MOE, "num_hidden_layers": 1, "num_key_value_heads": 2, "num_experts": 4,
         "shared_expert_intermediate_size": 12},
        QWEN_MOE, tp=2, dp=2, ep=2, etp=2, placement=((3, 0), (1, 2)), experts="sequential",
    ),
    "deepseek, latent attention, stacked experts": Case(
        "DeepseekV3",
        {**SMALL, **MOE, "num_hidden_layers": 2, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2,
         "topk_group": 1, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
         "v_head_dim": 8, "first_k_dense_replace": 1},
        DEEPSEEK, tp=2, dp=4, ep=2, etp=2, experts="stacked",
    ),
    "deepseek, queries of full rank": Case(
        "DeepseekV3",
        {**SMALL, **MOE, "num_hidden_layers": 1, "num_key_value_heads": 4, "n_routed_experts": 2, "n_group": 1,
         "topk_group": 1, "q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
         "v_head_dim": 8, "first_k_dense_replace": 0},
        DEEPSEEK, tp=2, dp=1, ep=2, fused_norms=False,
    ),
}  # fmt: skip


def checkpoint_of(case: Case, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model as its library saves it: checkpoint names, each element with a value of its own."""
    config = getattr(transformers, f"{case.model}Config")(**case.config)
    model = getattr(transformers, f"{case.model}ForCausalLM")(config)
    with torch.no_grad():
        for number, parameter in enumerate([*model.parameters(), *model.buffers()]):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + number * 100_000)
    model.save_pretrained(folder)
    saved: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        saved.update(load_file(file))
    return config, saved


def pieces(tensor: torch.Tensor, count: int, axis: int = 0) -> list[torch.Tensor]:
    assert tensor.shape[axis] % count == 0
    return [piece.clone() for piece in tensor.split(tensor.shape[axis] // count, axis)]


class Megatron:
    """The parameters of one rank, written out plainly: build the whole of each tensor, then take the rank's piece."""

    def __init__(
        self, case: Case, config: Any, saved: Mapping[str, torch.Tensor], tp: int, ep: int, etp: int
    ) -> None:
        self.case, self.config, self.saved, self.tp, self.ep, self.etp = case, config, saved, tp, ep, etp

    def table(self, name: str) -> torch.Tensor:
        rows = math.ceil(self.config.vocab_size / (8 * self.case.tp)) * 8 * self.case.tp
        padding = torch.full((rows - self.config.vocab_size, self.config.hidden_size), math.nan)
        return pieces(torch.cat([self.saved[name], padding]), self.case.tp)[self.tp]

    def ends(self, first: bool, last: bool) -> Iterator[tuple[str, torch.Tensor]]:
        tied = "lm_head.weight" not in self.saved
        if first:
            yield "embedding.word_embeddings.weight", self.table("model.embed_tokens.weight")
        if last:
            yield "decoder.final_layernorm.weight", self.saved["model.norm.weight"].clone()
            if not tied or not first:
                yield (
                    "output_layer.weight",
                    self.table("model.embed_tokens.weight" if tied else "lm_head.weight"),
                )

    def layer(self, number: int, local: int) -> Iterator[tuple[str, torch.Tensor]]:
        there = {
            k.split(f"layers.{number}.")[1]: t for k, t in self.saved.items() if f"layers.{number}." in k
        }
        here = f"decoder.layers.{local}."
        for name, tensor in (*self.attention(there), *self.feed_forward(there)):
            yield here + name, tensor.clone()

    def attention(self, there: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        mine, fused = (lambda t, axis=0: pieces(t, self.case.tp, axis)[self.tp]), self.case.fused_norms
        latent = "self_attn.kv_b_proj.weight" in there
        first = "linear_q_proj" if latent else "linear_qkv"
        is_norm_apart = not fused or "self_attn.q_b_proj.weight" in there
        norm = "input_layernorm.weight" if is_norm_apart else f"self_attention.{first}.layer_norm_weight"
        yield norm, there["input_layernorm.weight"]
        yield "self_attention.linear_proj.weight", mine(there["self_attn.o_proj.weight"], 1)
        if "self_attn.o_proj.bias" in there:
            yield "self_attention.linear_proj.bias", there["self_attn.o_proj.bias"]
        if not latent:
            for kind in ("weight", "bias"):
                if f"self_attn.q_proj.{kind}" in there:
                    q, k, v = (there[f"self_attn.{x}_proj.{kind}"] for x in "qkv")
                    groups = self.config.num_key_value_heads
                    order = zip(*(pieces(x, groups) for x in (q, k, v)), strict=True)
                    yield (
                        f"self_attention.linear_qkv.{kind}",
                        mine(torch.cat([x for group in order for x in group])),
                    )
            for x in "qk":
                if f"self_attn.{x}_norm.weight" in there:
                    yield f"self_attention.{x}_layernorm.weight", there[f"self_attn.{x}_norm.weight"]
            return
        if "self_attn.q_b_proj.weight" in there:
            yield "self_attention.linear_q_down_proj.weight", there["self_attn.q_a_proj.weight"]
            yield "self_attention.linear_q_up_proj.weight", mine(there["self_attn.q_b_proj.weight"])
            q_norm = "linear_q_up_proj.layer_norm_weight" if fused else "q_layernorm.weight"
            yield f"self_attention.{q_norm}", there["self_attn.q_a_layernorm.weight"]
        else:
            yield "self_attention.linear_q_proj.weight", mine(there["self_attn.q_proj.weight"])
        yield "self_attention.linear_kv_down_proj.weight", there["self_attn.kv_a_proj_with_mqa.weight"]
        yield "self_attention.linear_kv_up_proj.weight", mine(there["self_attn.kv_b_proj.weight"])
        kv_norm = "linear_kv_up_proj.layer_norm_weight" if fused else "kv_layernorm.weight"
        yield f"self_attention.{kv_norm}", there["self_attn.kv_a_layernorm.weight"]

    def pair(
        self, there: Mapping[str, torch.Tensor], at: str, rank: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = (pieces(there[f"{at}.{x}_proj.weight"], size)[rank] for x in ("gate", "up"))
        return torch.cat([gate, up]), pieces(there[f"{at}.down_proj.weight"], size, 1)[rank]

    def feed_forward(self, there: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        if "mlp.gate_proj.weight" in there:
            first, second = self.pair(there, "mlp", self.tp, self.case.tp)
            yield "mlp.linear_fc1.weight", first
            yield "mlp.linear_fc2.weight", second
            name = "mlp.linear_fc1.layer_norm_weight" if self.case.fused_norms else "pre_mlp_layernorm.weight"
            yield name, there["post_attention_layernorm.weight"]
            return
        yield "pre_mlp_layernorm.weight", there["post_attention_layernorm.weight"]
        yield "mlp.router.weight", there["mlp.gate.weight"]
        if "mlp.gate.e_score_correction_bias" in there:
            yield "mlp.router.expert_bias", there["mlp.gate.e_score_correction_bias"]
        for shared in ("shared_expert", "shared_experts"):
            if f"mlp.{shared}.gate_proj.weight" in there:
                first, second = self.pair(there, f"mlp.{shared}", self.tp, self.case.tp)
                yield "mlp.shared_experts.linear_fc1.weight", first
                yield "mlp.shared_experts.linear_fc2.weight", second
        if "mlp.shared_expert_gate.weight" in there:
            yield "mlp.shared_experts.gate_weight", there["mlp.shared_expert_gate.weight"]
        yield from self.experts(there)

    def experts(self, there: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        count = len([name for name in there if name.endswith("gate_proj.weight") and ".experts." in name])
        placement = self.case.placement or torch.arange(count).view(self.case.ep, -1).tolist()
        mine = [self.pair(there, f"mlp.experts.{e}", self.etp, self.case.etp) for e in placement[self.ep]]
        if self.case.experts == "stacked":
            stacked = torch.stack([first.t() for first, _ in mine])
            yield "mlp.experts.weight1", stacked.view(self.config.hidden_size, -1)
            yield "mlp.experts.weight2", torch.cat([second.t() for _, second in mine])
            return
        for number, (first, second) in enumerate(mine):
            name = "linear_fc{}.weight" + str(number)
            if self.case.experts == "sequential":
                name = f"local_experts.{number}.linear_fc{{}}.weight"
            yield "mlp.experts." + name.format(1), first
            yield "mlp.experts." + name.format(2), second


def ranks_of(case: Case, config: Any, saved: Mapping[str, torch.Tensor]) -> Iterator[list[Shard]]:
    dimensions = Dimensions.of_config(config, stages=case.stages)
    order: list[list[list[int]]] = [[] for _ in range(case.pp)]
    layers = iter(range(config.num_hidden_layers))
    sizes = case.stages or [config.num_hidden_layers // (case.pp * case.vpp)] * (case.pp * case.vpp)
    for stage, count in enumerate(sizes):
        order[stage % case.pp].append(list(itertools.islice(layers, count)))
    for pp, dp, tp in itertools.product(range(case.pp), range(case.dp), range(case.tp)):
        ep, etp = divmod((dp * case.tp + tp) % (case.ep * case.etp), case.etp)
        rank = Megatron(case, config, saved, tp, ep, etp)
        chunks = []
        for number, chunk in enumerate(order[pp]):
            named = [item for local, layer in enumerate(chunk) for item in rank.layer(layer, local)]
            named += rank.ends(pp == 0 and number == 0, pp == case.pp - 1 and number == case.vpp - 1)
            chunks.append(
                {f"module.{name}": tensor for name, tensor in named} | {"module.decoder._extra_state": None}
            )
        grid = Grid(tp, case.tp, pp, case.pp, case.vpp, ep, case.ep, etp, case.etp)
        mine = replace(dimensions, experts=case.placement[ep]) if case.placement else dimensions
        yield megatron_shards(chunks, case.family, mine, grid)


def expected_copies(name: str, case: Case, tied: bool) -> int:
    """By how many ranks each element is held, from the declaration alone."""
    if ".experts." in name:
        return case.dp * case.tp // (case.ep * case.etp)
    if tied and name in ("model.embed_tokens.weight", "lm_head.weight"):
        return case.dp * (2 if case.pp > 1 else 1)
    replicated = ("norm", "mlp.gate.", "shared_expert_gate", "q_a_proj", "kv_a_proj", "o_proj.bias")
    return case.dp * (case.tp if any(part in name for part in replicated) else 1)


@pytest.mark.parametrize("name", CASES)
def test_all_shards_of_all_ranks_reassemble_the_checkpoint(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    config, saved = checkpoint_of(case, tmp_path)
    tied = "lm_head.weight" not in saved
    everything = {**saved, "lm_head.weight": saved["model.embed_tokens.weight"]} if tied else saved
    ranks = list(ranks_of(case, config, saved))
    held = assemble(ranks, everything)
    for tensor, count in held.items():
        assert set(count.unique().tolist()) == {expected_copies(tensor, case, tied)}, tensor
    if tied:
        both = {
            names
            for shards in ranks
            for entry in find_tensors(shards)
            if "lm_head.weight" in (names := entry.names)
        }
        assert both == {("model.embed_tokens.weight", "lm_head.weight")}


DIMENSIONS = Dimensions(layers=2, vocabulary=10, heads=4, groups=2, head_dim=2, expert_count=2)


def test_a_rank_of_padding_only_holds_no_tokens() -> None:
    table = {"embedding.word_embeddings.weight": torch.zeros(8, 4)}
    counts = [len(megatron_shards([table], LLAMA, DIMENSIONS, Grid(tp_rank=r, tp_size=3))) for r in range(3)]
    assert counts == [1, 1, 0]


def test_every_parameter_that_does_not_fit_is_listed() -> None:
    odd = {
        "decoder.layers.0.self_attention.linear_qkv.weight": torch.zeros(15, 8),
        "decoder.layers.0.mlp.linear_fc1.weight": torch.zeros(5, 8),
        "decoder.layers.0.mamba.weight": torch.zeros(1),
        "decoder.layers.0.mlp.experts.linear_fc1.weight2": torch.zeros(4, 8),
        "embedding.word_embeddings.weight": torch.zeros(4, 8),
        "decoder.final_layernorm.weight": torch.zeros(8),
    }
    with pytest.raises(LayoutError) as caught:
        megatron_shards([odd], QWEN_MOE, DIMENSIONS, Grid())
    text = str(caught.value)
    for fragment in (
        "5 parameters can't be laid out",
        "linear_qkv.weight: shape [15, 8] does not fit its rule: 1 ranks of 15 rows are not 4 + 2 * 2 heads of 2",
        "linear_fc1.weight: shape [5, 8] does not fit its rule: dimension 0 does not divide by 2",
        "mamba.weight: no rule of this family matches it",
        "weight2: shape [4, 8] does not fit its rule: this rank has 2 experts, none in place 2",
        "1 ranks of 4 rows hold fewer than 10 tokens",
    ):
        assert fragment in text


def test_stages_must_add_up() -> None:
    with pytest.raises(LayoutError, match=r"3 layers in 2 stages .* got \[1, 1\]"):
        megatron_shards([{}], LLAMA, replace(DIMENSIONS, layers=3), Grid(pp_size=2))
    with pytest.raises(LayoutError, match="1 model chunks were given, vpp_size=2"):
        megatron_shards([{}], LLAMA, DIMENSIONS, Grid(vpp_size=2))


def test_a_rank_beyond_its_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="tp_rank=2 is not below tp_size=2"):
        Grid(tp_rank=2, tp_size=2)


def test_views_are_of_the_parameters_own_memory() -> None:
    model = torch.nn.ModuleDict({"module": torch.nn.Module()})
    model["module"].output_layer = torch.nn.Linear(4, 12, bias=False)
    (shard,) = megatron_shards([model], LLAMA, DIMENSIONS, Grid())
    assert (shard.name, shard.box) == ("lm_head.weight", Box((0, 0), (10, 4)))
    assert shard.view.data_ptr() == model["module"].output_layer.weight.data_ptr()


def test_shards_that_are_many_boxes_of_one_tensor_travel_as_they_are(address: str) -> None:
    def rank() -> dict[str, torch.Tensor]:
        return {
            "decoder.layers.0.self_attention.linear_qkv.weight": torch.zeros(16, 8),
            "decoder.layers.0.mlp.experts.weight1": torch.zeros(8, 12),
            "embedding.word_embeddings.weight": torch.zeros(12, 8),
        }

    trainer, server = rank(), rank()
    wanted = megatron_shards([server], QWEN_MOE, DIMENSIONS, Grid())
    with Publisher(address, timeout_s=60) as publisher:
        publisher.register(megatron_shards([trainer], QWEN_MOE, DIMENSIONS, Grid()))
        for tensor in trainer.values():
            tensor.copy_(torch.randn(tensor.shape))
        with Subscriber(address, wanted, swap="copy", timeout_s=60) as subscriber:
            publisher.publish(wait="ready")
            with subscriber.step():
                for name, tensor in trainer.items():
                    rows = DIMENSIONS.vocabulary if "embedding" in name else len(tensor)
                    assert torch.equal(server[name][:rows], tensor[:rows]), name
                    assert not server[name][rows:].any(), "padding was written"
