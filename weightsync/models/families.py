"""The rules of each family, computed from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weightsync.errors import ConfigError
from weightsync.models.rules import ModelShape, Split, TensorRule

Config = Mapping[str, Any]
_LAYER = "model.layers.{layer}."


def model_of(config: Config) -> ModelShape:
    """The shapes of the model that `config` (the content of a `config.json`) describes.

    Raises ConfigError for a family that is not known, or a key that is missing.
    """
    family = config.get("model_type")
    build = FAMILIES.get(str(family))
    if build is None:
        raise ConfigError(f"model_type {family!r} is not known; known are {', '.join(sorted(FAMILIES))}")
    try:
        attention, feed_forward = build(config)
        layers = int(config["num_hidden_layers"])
        rules = _outer(config) + _norms(config) + attention + feed_forward
    except KeyError as error:
        raise ConfigError(f"the configuration of a {family} has no key {error}") from error
    experts = max(rule.experts for rule in rules)
    return ModelShape(str(family), layers, experts, _is_tied(config), tuple(rules))


def _is_tied(config: Config) -> bool:
    return bool(config.get("tie_word_embeddings", False))


def _layers(config: Config) -> tuple[int, ...]:
    return tuple(range(config["num_hidden_layers"]))


def _outer(config: Config) -> list[TensorRule]:
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    rules = [
        TensorRule(embedding, (vocabulary, hidden), Split.VOCABULARY, embedding),
        TensorRule("model.norm.weight", (hidden,), Split.WHOLE, "model.norm.weight", is_last=True),
    ]
    if not _is_tied(config):
        rules.append(TensorRule(head, (vocabulary, hidden), Split.VOCABULARY, head, is_last=True))
    return rules


def _norms(config: Config) -> list[TensorRule]:
    return [
        _whole(_LAYER + name, (config["hidden_size"],), _layers(config))
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight")
    ]


def _whole(name: str, shape: tuple[int, ...], layers: tuple[int, ...], **more: Any) -> TensorRule:
    return TensorRule(name, shape, Split.WHOLE, name, layers=layers, **more)


def _gated(
    prefix: str, hidden: int, width: int, layers: tuple[int, ...], *, experts: int = 0
) -> list[TensorRule]:
    """A gated feed-forward block, or a stack of experts."""
    fused = (prefix.replace("{expert}.", "") + "w13_weight", prefix.replace("{expert}.", "") + "w2_weight")
    if not experts:
        fused = (prefix + "gate_up_proj.weight", prefix + "down_proj.weight")
    return [
        TensorRule(
            f"{prefix}gate_proj.weight",
            (width, hidden),
            Split.COLUMN,
            fused[0],
            0,
            layers=layers,
            experts=experts,
        ),
        TensorRule(
            f"{prefix}up_proj.weight",
            (width, hidden),
            Split.COLUMN,
            fused[0],
            1,
            layers=layers,
            experts=experts,
        ),
        TensorRule(
            f"{prefix}down_proj.weight", (hidden, width), Split.ROW, fused[1], layers=layers, experts=experts
        ),
    ]


def _grouped_attention(config: Config) -> list[TensorRule]:
    """Query, key and value heads, fused by servers; with biases and norms per head where the family has them."""
    family = config["model_type"]
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], _layers(config)
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads
    prefix = _LAYER + "self_attn."
    has_bias = config.get("attention_bias", family in ("qwen2", "qwen2_moe"))
    rules = []
    for part, (name, count, split) in enumerate(
        [("q", heads, Split.COLUMN), ("k", kv_heads, Split.KV), ("v", kv_heads, Split.KV)]
    ):
        for kind, shape in [("weight", (count * width, hidden)), ("bias", (count * width,))][: 1 + has_bias]:
            rules.append(
                TensorRule(
                    f"{prefix}{name}_proj.{kind}",
                    shape,
                    split,
                    f"{prefix}qkv_proj.{kind}",
                    part,
                    count,
                    layers,
                )
            )
    output = f"{prefix}o_proj.weight"
    rules.append(TensorRule(output, (hidden, heads * width), Split.ROW, output, 0, heads, layers))
    if has_bias and family == "llama":
        rules.append(_whole(f"{prefix}o_proj.bias", (hidden,), layers))
    if family in ("qwen3", "qwen3_moe"):
        rules += [_whole(f"{prefix}{name}_norm.weight", (width,), layers) for name in "qk"]
    return rules


def _latent_attention(config: Config) -> list[TensorRule]:
    """Multi-head latent attention of DeepSeek-V2 and V3."""
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], _layers(config)
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    query_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    prefix = _LAYER + "self_attn."
    down = prefix + "fused_qkv_a_proj.weight" if query_rank else prefix + "kv_a_proj_with_mqa.weight"
    rules = []
    if query_rank:
        name = prefix + "q_a_proj.weight"
        rules += [
            TensorRule(name, (query_rank, hidden), Split.WHOLE, down, 0, layers=layers),
            _whole(prefix + "q_a_layernorm.weight", (query_rank,), layers),
        ]
    up = prefix + ("q_b_proj.weight" if query_rank else "q_proj.weight")
    name, kv_up, output = (
        prefix + s for s in ("kv_a_proj_with_mqa.weight", "kv_b_proj.weight", "o_proj.weight")
    )
    return [
        *rules,
        TensorRule(up, (heads * (nope + rope), query_rank or hidden), Split.COLUMN, up, 0, heads, layers),
        TensorRule(name, (kv_rank + rope, hidden), Split.WHOLE, down, 1, layers=layers),
        _whole(prefix + "kv_a_layernorm.weight", (kv_rank,), layers),
        TensorRule(kv_up, (heads * (nope + value), kv_rank), Split.COLUMN, kv_up, 0, heads, layers),
        TensorRule(output, (hidden, heads * value), Split.ROW, output, 0, heads, layers),
    ]


def _dense(config: Config) -> tuple[list[TensorRule], list[TensorRule]]:
    feed_forward = _gated(
        _LAYER + "mlp.", config["hidden_size"], config["intermediate_size"], _layers(config)
    )
    return _grouped_attention(config), feed_forward


def _qwen_moe(config: Config) -> tuple[list[TensorRule], list[TensorRule]]:
    hidden, experts = config["hidden_size"], config["num_experts"]
    step, never = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
    sparse = tuple(n for n in _layers(config) if n not in never and (n + 1) % step == 0)
    dense = tuple(n for n in _layers(config) if n not in sparse)
    mlp = _LAYER + "mlp."
    rules = [_whole(mlp + "gate.weight", (experts, hidden), sparse)]
    rules += _gated(
        mlp + "experts.{expert}.", hidden, config["moe_intermediate_size"], sparse, experts=experts
    )
    if config.get("shared_expert_intermediate_size"):
        rules += _gated(mlp + "shared_expert.", hidden, config["shared_expert_intermediate_size"], sparse)
        rules.append(_whole(mlp + "shared_expert_gate.weight", (1, hidden), sparse))
    if dense:
        rules += _gated(mlp, hidden, config["intermediate_size"], dense)
    return _grouped_attention(config), rules


def _deepseek(config: Config) -> tuple[list[TensorRule], list[TensorRule]]:
    hidden, experts, width = (
        config["hidden_size"],
        config["n_routed_experts"],
        config["moe_intermediate_size"],
    )
    first, every = config.get("first_k_dense_replace", 0), config.get("moe_layer_freq", 1)
    sparse = tuple(n for n in _layers(config) if n >= first and n % every == 0)
    dense = tuple(n for n in _layers(config) if n not in sparse)
    mlp = _LAYER + "mlp."
    rules = [_whole(mlp + "gate.weight", (experts, hidden), sparse)]
    if config.get("topk_method") == "noaux_tc":
        rules.append(_whole(mlp + "gate.e_score_correction_bias", (experts,), sparse, itemsize=4))
    rules += _gated(mlp + "experts.{expert}.", hidden, width, sparse, experts=experts)
    if config.get("n_shared_experts"):
        rules += _gated(mlp + "shared_experts.", hidden, width * config["n_shared_experts"], sparse)
    if dense:
        rules += _gated(mlp, hidden, config["intermediate_size"], dense)
    return _latent_attention(config), rules


FAMILIES: dict[str, Callable[[Config], tuple[list[TensorRule], list[TensorRule]]]] = {
    "llama": _dense,
    "mistral": _dense,
    "qwen2": _dense,
    "qwen3": _dense,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
}
"""`model_type` to the rules of attention and of feed-forward blocks."""
