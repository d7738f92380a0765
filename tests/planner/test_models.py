"""Shapes of public models, and their layouts against an unsharded reference that is sliced by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.planner.execution import logical_tensors, receive, stage
from weightsync.errors import ConfigError
from weightsync.models import (
    ServerMesh,
    TrainerMesh,
    catalog_of,
    load_config,
    model_of,
    named_config,
    names,
    serve,
    train,
)
from weightsync.wire.planner import plan_fleet

PUBLISHED = {
    "llama-3-8b": 8.03e9,
    "llama-3-70b": 70.55e9,
    "llama-3-405b": 405.85e9,
    "qwen3-30b-a3b": 30.5e9,
    "qwen3-235b-a22b": 235.1e9,
    "deepseek-v3": 671e9,
    "kimi-k2": 1.026e12,
}

HIDDEN, HEADS, KV, WIDTH, VOCABULARY = 16, 8, 2, 2, 150
COMMON = {
    "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": WIDTH,
    "vocab_size": VOCABULARY, "num_hidden_layers": 4, "intermediate_size": 24, "moe_intermediate_size": 8,
}  # fmt: skip
TINY = {
    "llama": COMMON | {"model_type": "llama"},
    "qwen2 tied": COMMON | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3_moe": COMMON | {"model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": [1]},
    "qwen2_moe": COMMON | {"model_type": "qwen2_moe", "num_experts": 4, "shared_expert_intermediate_size": 8},
    "deepseek_v3": COMMON | {
        "model_type": "deepseek_v3", "n_routed_experts": 8, "q_lora_rank": 6, "kv_lora_rank": 4, "n_shared_experts": 2,
        "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
    },
}  # fmt: skip
TRAINERS = [
    TrainerMesh(),
    TrainerMesh(fsdp=3),
    TrainerMesh(fsdp=3, ep=4, hsdp=2),
    TrainerMesh(fsdp=5, tp=2),
    TrainerMesh(tp=4, pp=3, ep=2),
    TrainerMesh(tp=2, pp=2, ep=4, etp=1),
    TrainerMesh(fsdp=8, ep=2),
]
SERVERS = [
    ServerMesh(tp=2, replicas=2),
    ServerMesh(tp=8),
    ServerMesh(tp=2, ep=4, pp=2),
    ServerMesh(tp=4, ep=4, etp=1, replicas=2),
    ServerMesh(tp=2, dp=2, ep=2),
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_add_up_to_what_is_published(name):
    model = model_of(named_config(name))
    assert model.parameters == pytest.approx(PUBLISHED[name], rel=0.002)
    table = catalog_of(model).table
    assert int(table.shape.prod(axis=1).sum()) == model.parameters
    assert len(set(table.names)) == len(table.names)


def test_every_registered_model_is_checked():
    assert set(names()) == set(PUBLISHED)


class Reference:
    """A server rank's parameters by slicing whole tensors, written without the library's rules."""

    def __init__(self, tensors: dict[str, np.ndarray], mesh: ServerMesh, index: int) -> None:
        self.tensors, self.mesh = tensors, mesh
        self.t = index % mesh.tp
        self.etp = mesh.etp or (mesh.tp * mesh.dp // mesh.ep if mesh.dp else mesh.tp)
        self.group, self.e = index // self.etp % mesh.ep, index % self.etp

    def part(self, name: str, parts: int, part: int, dimension: int = 0) -> np.ndarray:
        return np.split(self.tensors[name], parts, axis=dimension)[part]

    def kv(self, name: str) -> np.ndarray:
        tp = self.mesh.tp
        return self.part(name, min(tp, KV), self.t * min(tp, KV) // tp)

    def vocabulary(self, name: str) -> np.ndarray:
        per_rank = -(-VOCABULARY // 64) * 64 // self.mesh.tp
        full = np.zeros((per_rank * self.mesh.tp, HIDDEN), self.tensors[name].dtype)
        full[:VOCABULARY] = self.tensors[name]
        return full[per_rank * self.t : per_rank * (self.t + 1)]

    def gated(self, prefix: str, parts: int, part: int) -> tuple[np.ndarray, np.ndarray]:
        up = [self.part(f"{prefix}{name}_proj.weight", parts, part) for name in ("gate", "up")]
        return np.concatenate(up), self.part(f"{prefix}down_proj.weight", parts, part, 1)

    def parameter(self, name: str, placement: list[list[int]] | None = None) -> np.ndarray:
        prefix, tp, t = name.rpartition(".")[0].rpartition(".")[0] + ".", self.mesh.tp, self.t
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            return self.vocabulary(name if name in self.tensors else "model.embed_tokens.weight")
        if ".qkv_proj." in name:
            kind = name.rpartition(".")[2]
            query = self.part(f"{prefix}q_proj.{kind}", tp, t)
            return np.concatenate(
                [query, self.kv(f"{prefix}k_proj.{kind}"), self.kv(f"{prefix}v_proj.{kind}")]
            )
        if ".fused_qkv_a_proj." in name:
            return np.concatenate(
                [self.tensors[prefix + "q_a_proj.weight"], self.tensors[prefix + "kv_a_proj_with_mqa.weight"]]
            )
        if name.endswith(("w13_weight", "w2_weight")):
            stem = name.rpartition(".")[0]
            count = sum(
                key.startswith(stem + ".") and key.endswith(".up_proj.weight") for key in self.tensors
            )
            each = count // self.mesh.ep
            experts = (
                placement[self.group] if placement else range(self.group * each, self.group * each + each)
            )
            which = int(name.endswith("w2_weight"))
            return np.stack([self.gated(f"{stem}.{expert}.", self.etp, self.e)[which] for expert in experts])
        if ".gate_up_proj." in name:
            return self.gated(prefix, tp, t)[0]
        if ".down_proj." in name or ".o_proj.weight" in name:
            return self.part(name, tp, t, 1)
        if "q_b_proj" in name or "kv_b_proj" in name:
            return self.part(name, tp, t)
        return self.tensors[name]


def check(config: dict, trainer: TrainerMesh, mesh: ServerMesh, placement: list | None = None) -> None:
    catalog = catalog_of(model_of(config))
    layout = serve(catalog, mesh, placement=placement)
    plans = plan_fleet(catalog.table, train(catalog, trainer), layout.side)
    assert plans.sources.ranks == trainer.ranks and plans.targets.ranks == mesh.ranks
    logical = logical_tensors(catalog.table)
    slots = [stage(plans, logical, rank) for rank in range(trainer.ranks)]
    tensors = {
        name: data.reshape(shape[: int(ndim)])
        for name, data, shape, ndim in zip(
            catalog.table.names, logical, catalog.table.shape, catalog.table.ndim, strict=True
        )
    }
    seen: set[str] = set()
    for rank in range(mesh.ranks):
        found: dict[int, np.ndarray] = {}
        first = int(layout.side.shards.first[layout.side.layout[rank]])
        for shard, (_, data) in enumerate(receive(plans, logical, slots, rank)):
            number = int(layout.parameter[first + shard])
            target = found.setdefault(number, np.zeros(layout.shapes[number], data.dtype))
            slot, at = int(layout.slot[first + shard]), int(layout.at[first + shard])
            part = target if slot < 0 else target[slot]
            part[at : at + len(data)] = data.reshape(len(data), *part.shape[1:])
        reference = Reference(tensors, mesh, rank % mesh.stage_ranks)
        for number, data in found.items():
            expected = reference.parameter(layout.names[number], placement)
            assert data.shape == expected.shape, layout.names[number]
            assert np.array_equal(data, expected), (rank, layout.names[number])
        seen |= {layout.names[number] for number in found}
    assert seen == set(layout.names)


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("trainer", TRAINERS, ids=str)
def test_each_rank_gets_what_slicing_the_whole_model_gives(family, trainer):
    """One family with all pairs of meshes, the others with some."""
    turn = TRAINERS.index(trainer) + list(TINY).index(family)
    for mesh in SERVERS if family == "qwen3_moe" else (SERVERS[turn % 5], SERVERS[(turn + 2) % 5]):
        experts = TINY[family].get("num_experts", TINY[family].get("n_routed_experts"))
        if experts is not None or (mesh.ep == 1 and trainer.ep == 1):
            check(TINY[family], trainer, mesh)


def test_a_rebalanced_placement_with_a_doubled_expert_is_a_layout():
    check(
        TINY["qwen3_moe"],
        TrainerMesh(fsdp=2, ep=4),
        ServerMesh(tp=2, ep=2),
        [[7, 0, 3, 3, 6], [1, 2, 4, 5, 7]],
    )


def test_all_of_the_model_is_wanted_by_one_rank_and_held_by_one():
    for config in TINY.values():
        catalog = catalog_of(model_of(config))
        for side in (train(catalog, TrainerMesh()), serve(catalog, ServerMesh()).side):
            assert len(side.shards.tensor) == len(catalog.table.names)


@pytest.mark.parametrize(
    ("trainer", "mesh", "text"),
    [
        (TrainerMesh(tp=3), ServerMesh(), r"q_proj.weight: 8 heads can't be divided among 3"),
        (TrainerMesh(ep=3), ServerMesh(), "8 experts can't be divided by ep=3"),
        (TrainerMesh(pp=5), ServerMesh(), "pp=5: the model has 4 layers only"),
        (TrainerMesh(), ServerMesh(tp=5), "can't be divided among 5"),
        (
            TrainerMesh(),
            ServerMesh(tp=2, dp=3, ep=4),
            "6 ranks of a stage can't be divided by tp=2, and by ep=4",
        ),
    ],
)
def test_degrees_that_do_not_divide_are_named(trainer, mesh, text):
    catalog = catalog_of(model_of(TINY["qwen3_moe"]))
    with pytest.raises(ConfigError, match=text):
        train(catalog, trainer)
        serve(catalog, mesh)


@pytest.mark.parametrize(
    ("placement", "text"),
    [([[0, 1, 2, 3], [4, 5, 6, 6]], "not exactly the experts"), ([[0, 1, 2, 3, 4, 5, 6, 7]], "expected")],
)
def test_a_placement_that_loses_an_expert_is_refused(placement, text):
    with pytest.raises(ConfigError, match=text):
        serve(catalog_of(model_of(TINY["qwen3_moe"])), ServerMesh(ep=2), placement=placement)


def test_unknown_names_families_and_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no model 'x'; there are llama-3-8b, .*kimi-k2"):
        named_config("x")
    with pytest.raises(ConfigError, match="model_type 'x' is not known; known are deepseek_v2"):
        model_of({"model_type": "x"})
    with pytest.raises(ConfigError, match="has no key 'vocab_size'"):
        model_of({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 1, "num_attention_heads": 1,
                  "intermediate_size": 1})  # fmt: skip
    with pytest.raises(ConfigError, match=r"nowhere.json"):
        load_config(tmp_path / "nowhere.json")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": TINY["llama"]}))
    assert load_config(tmp_path / "config.json") == TINY["llama"]


@pytest.mark.parametrize("family", ["llama", "qwen2 tied", "qwen3_moe", "qwen2_moe", "deepseek_v3"])
def test_names_and_shapes_are_those_of_transformers(family):
    """The checkpoint of a freshly made model; experts are one parameter per expert there, whatever runs inside."""
    transformers = pytest.importorskip("transformers")
    import torch

    config = transformers.AutoConfig.for_model(**{"pad_token_id": 0, **TINY[family]})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    if TINY[family].get("tie_word_embeddings"):
        expected.pop("lm_head.weight")
    table = catalog_of(model_of(TINY[family])).table
    found = {
        name: tuple(s[:n].tolist()) for name, s, n in zip(table.names, table.shape, table.ndim, strict=True)
    }
    stacked = {name for name in expected if ".mlp.experts." in name and name not in found}
    single = {name for name in found if ".mlp.experts." in name and name not in expected}
    assert {n: s for n, s in found.items() if n not in single} == {
        n: s for n, s in expected.items() if n not in stacked
    }
    elements = [
        sum(int(np.prod(shapes[n])) for n in some) for shapes, some in ((expected, stacked), (found, single))
    ]
    assert elements[0] == elements[1]
