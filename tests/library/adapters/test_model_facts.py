"""The facts that engines of all kinds compare: alike where the model is, whatever an engine adds."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer import weights_digest
from pdtransfer.adapters.kit.facts import model_facts, model_name, named_facts

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
LATENT = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def digest(
    config: dict[str, Any], dtype: object = torch.float32, cache: object = "float32", quant: Any = None
) -> bytes:
    return weights_digest(model_facts(config, dtype=dtype, cache=cache, quantization=quant))


@pytest.mark.parametrize(
    "added",
    [
        {"head_dim": 64},  # which follows
        {"v_head_dim": 64},  # what one engine adds for models without latents
        {"torch_dtype": "float32", "transformers_version": "5.19.0", "_name_or_path": "elsewhere"},
        {"q_lora_rank": None, "sliding_window": None},
        {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None},  # as older transformers write it
    ],
)
def test_what_engines_add_changes_nothing(added: dict[str, Any]) -> None:
    assert digest(LLAMA | added) == digest(LLAMA)


@pytest.mark.parametrize(
    "other",
    [
        {"num_hidden_layers": 5}, {"num_key_value_heads": 4}, {"head_dim": 128}, {"rms_norm_eps": 1e-5},
        {"model_type": "mistral"},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}},
    ],
)  # fmt: skip
def test_another_model_has_other_facts(other: dict[str, Any]) -> None:
    assert digest(LLAMA | other) != digest(LLAMA)


def test_latents_count_where_there_are_some() -> None:
    assert digest(LLAMA | LATENT | {"head_dim": 64}) == digest(LLAMA | LATENT | {"head_dim": 192})
    assert digest(LLAMA | LATENT | {"v_head_dim": 128}) != digest(LLAMA | LATENT | {"v_head_dim": 64})


def test_dtypes_and_quantization_count() -> None:
    ways = [(torch.float32, "float32", None), ("bfloat16", "float32", None), ("float32", "bfloat16", None)]
    ways.append(("float32", "float32", "fp8"))
    assert len({digest(LLAMA, *way) for way in ways}) == 4
    assert digest(LLAMA, torch.bfloat16, torch.bfloat16) == digest(LLAMA, "bfloat16", "bfloat16")


def test_a_name_shows_how_the_cache_is_stored() -> None:
    assert model_name("org/model", torch.bfloat16) == "org/model (KV bfloat16)"
    assert len(model_name("x" * 500, "float32")) < 128


def test_peers_see_facts_by_the_names_that_users_know() -> None:
    config = {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4, "sliding_window": None}
    facts = model_facts(config, dtype="torch.float32", cache="torch.bfloat16", quantization=None)
    assert named_facts(facts, block_size="16", attention="A/B") == {
        "hidden_size": "64", "num_attention_heads": "4", "head_dim": "16", "rope.rope_theta": "10000.0",
        "rope.rope_type": "default", "dtype": "float32", "kv_dtype": "bfloat16", "quantization": "null",
        "block_size": "16", "attention_backend": "A/B",
    }  # fmt: skip
