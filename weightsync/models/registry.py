"""Published configurations by name: the keys of each `config.json` that say shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightsync.errors import ConfigError

_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_shared_experts": 1, "moe_layer_freq": 1,
    "topk_method": "noaux_tc", "tie_word_embeddings": False,
}  # fmt: skip

_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama-3-8b": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "llama-3-70b": _LLAMA | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "llama-3-405b": _LLAMA | {
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
    },
    "qwen3-30b-a3b": _QWEN | {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "qwen3-235b-a22b": _QWEN | {
        "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    "deepseek-v3": _DEEPSEEK | {
        "vocab_size": 129280, "num_attention_heads": 128, "n_routed_experts": 256, "first_k_dense_replace": 3,
    },
    "kimi-k2": _DEEPSEEK | {
        "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64, "n_routed_experts": 384,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip


def names() -> list[str]:
    """Models that are known by name."""
    return list(_CONFIGS)


def named_config(name: str) -> Mapping[str, Any]:
    """The configuration published under this name. Raises ConfigError that lists the names there are."""
    found = _CONFIGS.get(name.lower())
    if found is None:
        raise ConfigError(f"no model {name!r}; there are {', '.join(_CONFIGS)} (or give a config.json)")
    return found


def load_config(path: Path) -> Mapping[str, Any]:
    """A Hugging Face `config.json`; of a multimodal model, its text part. Raises ConfigError."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a JSON object was expected, not {type(content).__name__}")
    text = content.get("text_config")
    return text if isinstance(text, dict) else content
