"""Models of which only the dimensions are known: their weights are random, the same in every process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdtransfer.errors import ConfigError

VOCABULARY = 512  # of the tiny shape

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": _QWEN3 | {
        "vocab_size": 151_936, "hidden_size": 4_096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
        "torch_dtype": "bfloat16",
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102_400,
        "hidden_size": 2_048, "intermediate_size": 10_944, "moe_intermediate_size": 1_408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163_840, "tie_word_embeddings": False, "hidden_act": "silu",
        "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
        "rope_scaling": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "beta_fast": 32, "beta_slow": 1,
            "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4_096,
        },
    },
    # The first layers of GLM-5, with as many tokens chosen by its index, and without experts.
    "glm-5-dense": {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "vocab_size": 154_880,
        "hidden_size": 6_144, "intermediate_size": 12_288, "moe_intermediate_size": 2_048, "num_hidden_layers": 16,
        "num_attention_heads": 64, "num_key_value_heads": 64, "kv_lora_rank": 512, "q_lora_rank": 2_048,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "index_n_heads": 32,
        "index_head_dim": 128, "index_topk": 2_048, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 16, "moe_layer_freq": 1,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"}, "max_position_embeddings": 202_752,
        "tie_word_embeddings": False, "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": 0, "torch_dtype": "bfloat16",
    },
    "tiny": _QWEN3 | {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4_096,
        "torch_dtype": "float32",
    },
}  # fmt: skip
"""As their config.json has them."""


def make_model(shape: str, folder: Path) -> Path:
    """A model of these dimensions without weights, and with a tokeniser that has a word for each token. Raises
    ConfigError for a shape that is not known."""
    if shape not in SHAPES:
        raise ConfigError(f"model = {shape!r}: neither a directory nor one of {', '.join(SHAPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    words = {
        "type": "WordLevel",
        "vocab": {f"t{index}": index for index in range(config["vocab_size"])},
        "unk_token": "t0",
    }
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "model": words,
    }  # fmt: skip
    kinds = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    for name, content in (("config", config), ("tokenizer", tokenizer), ("tokenizer_config", kinds)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
