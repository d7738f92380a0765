"""Model families as Megatron-Core stores them: which cut each parameter has, and its Hugging Face names.

Both of Megatron-Core's layer specifications are covered: Transformer Engine folds a norm into the next linear layer
(`linear_qkv.layer_norm_weight`), the local one keeps it apart (`input_layernorm.weight`). Experts may be separate
modules, numbered weights of one grouped module, or one stacked tensor.
"""

from __future__ import annotations

from weightsync.integrations.megatron import Rule
from weightsync.integrations.megatron_cuts import (
    Cut,
    embeddings,
    gated,
    grouped_qkv,
    head,
    split,
    stacked_in,
    stacked_out,
    whole,
)

_HERE, _THERE = "decoder.layers.{layer}.", "model.layers.{layer}."


def _layer(local: str, cut: Cut, *names: str, is_expert: bool = False) -> Rule:
    return Rule(_HERE + local, cut, tuple(_THERE + name for name in names), is_expert)


_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
_ENDS = (
    Rule("embedding.word_embeddings.weight", embeddings, _TABLES),
    Rule("decoder.final_layernorm.weight", whole, ("model.norm.weight",)),
    Rule("output_layer.weight", head, _TABLES),
)
_NORMS = (
    _layer("input_layernorm.weight", whole, "input_layernorm.weight"),
    _layer("pre_mlp_layernorm.weight", whole, "post_attention_layernorm.weight"),
    _layer("mlp.linear_fc1.layer_norm_weight", whole, "post_attention_layernorm.weight"),
)
_GROUPED_ATTENTION = (
    _layer("self_attention.linear_qkv.layer_norm_weight", whole, "input_layernorm.weight"),
    *(
        _layer(
            f"self_attention.linear_qkv.{kind}", grouped_qkv, *(f"self_attn.{x}_proj.{kind}" for x in "qkv")
        )
        for kind in ("weight", "bias")
    ),
    _layer("self_attention.linear_proj.weight", split(1), "self_attn.o_proj.weight"),
    _layer("self_attention.linear_proj.bias", whole, "self_attn.o_proj.bias"),
    _layer("self_attention.q_layernorm.weight", whole, "self_attn.q_norm.weight"),
    _layer("self_attention.k_layernorm.weight", whole, "self_attn.k_norm.weight"),
)
_LATENT_ATTENTION = (
    _layer("self_attention.linear_q_proj.layer_norm_weight", whole, "input_layernorm.weight"),
    _layer("self_attention.linear_q_proj.weight", split(0), "self_attn.q_proj.weight"),
    _layer("self_attention.linear_q_down_proj.weight", whole, "self_attn.q_a_proj.weight"),
    _layer("self_attention.linear_q_up_proj.layer_norm_weight", whole, "self_attn.q_a_layernorm.weight"),
    _layer("self_attention.q_layernorm.weight", whole, "self_attn.q_a_layernorm.weight"),
    _layer("self_attention.linear_q_up_proj.weight", split(0), "self_attn.q_b_proj.weight"),
    _layer("self_attention.linear_kv_down_proj.weight", whole, "self_attn.kv_a_proj_with_mqa.weight"),
    _layer("self_attention.linear_kv_up_proj.layer_norm_weight", whole, "self_attn.kv_a_layernorm.weight"),
    _layer("self_attention.kv_layernorm.weight", whole, "self_attn.kv_a_layernorm.weight"),
    _layer("self_attention.linear_kv_up_proj.weight", split(0), "self_attn.kv_b_proj.weight"),
    _layer("self_attention.linear_proj.weight", split(1), "self_attn.o_proj.weight"),
)


def _mlp(local: str, there: str) -> tuple[Rule, ...]:
    return (
        _layer(f"{local}.linear_fc1.weight", gated, f"{there}.gate_proj.weight", f"{there}.up_proj.weight"),
        _layer(f"{local}.linear_fc2.weight", split(1), f"{there}.down_proj.weight"),
    )


_EXPERT = "mlp.experts.{expert}."
_IN, _OUT = (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"), _EXPERT + "down_proj.weight"
_EXPERTS = (
    _layer("mlp.experts.linear_fc1.weight{expert}", gated, *_IN, is_expert=True),
    _layer("mlp.experts.linear_fc2.weight{expert}", split(1), _OUT, is_expert=True),
    _layer("mlp.experts.local_experts.{expert}.linear_fc1.weight", gated, *_IN, is_expert=True),
    _layer("mlp.experts.local_experts.{expert}.linear_fc2.weight", split(1), _OUT, is_expert=True),
    _layer("mlp.experts.weight1", stacked_in, *_IN, is_expert=True),
    _layer("mlp.experts.weight2", stacked_out, _OUT, is_expert=True),
    _layer("mlp.router.weight", whole, "mlp.gate.weight"),
    _layer("mlp.router.expert_bias", whole, "mlp.gate.e_score_correction_bias"),
)

LLAMA = (*_ENDS, *_NORMS, *_GROUPED_ATTENTION, *_mlp("mlp", "mlp"))
"""Llama, Qwen2 and Qwen3 without experts."""

QWEN_MOE = (
    *LLAMA,
    *_EXPERTS,
    *_mlp("mlp.shared_experts", "mlp.shared_expert"),
    _layer("mlp.shared_experts.gate_weight", whole, "mlp.shared_expert_gate.weight"),
)
"""Qwen2-MoE and Qwen3-MoE: Llama with experts; in Qwen2 also a shared one with a gate."""

DEEPSEEK = (
    *_ENDS,
    *_NORMS,
    *_LATENT_ATTENTION,
    *_mlp("mlp", "mlp"),
    *_EXPERTS,
    *_mlp("mlp.shared_experts", "mlp.shared_experts"),
)
"""DeepSeek-V2, V3 and models like them (Kimi-K2): latent attention, experts, a shared one without a gate.

Multi-token-prediction layers are not in the table.
"""
