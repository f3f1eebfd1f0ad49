"""The line at an engine's start: where its KV goes, and what decides whether a peer fits, for a person to read."""

from __future__ import annotations

from typing import Any

import pytest

from pdtransfer import NodeSettings, weights_digest
from pdtransfer.adapters.kit.facts import DIGITS, config_digest, first_line, model_facts
from tests.support.document_commands import section, stated_lines

FACTS = {
    "model_type": "llama", "hidden_size": "256", "rope.rope_theta": "10000.0", "dtype": "float32",
    "kv_dtype": "float32", "quantization": "null", "kv_cache_dtype": "auto", "config": "0123456789abcdef",
    "block_size": "128", "window": "0", "processor": "x86_64 avx512", "rows": "blocks", "engine": "vLLM 0.32.0",
}  # fmt: skip

# Of build/smollm2, as `to_dict` of transformers 5 has it.
CONFIG: dict[str, Any] = {
    "_model_name_or_path": "Smollm2 135M 8k Lc100K Mix1 Ep2", "architectures": ["LlamaForCausalLM"],
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "chunk_size_feed_forward": 0,
    "eos_token_id": 2, "head_dim": 64, "hidden_act": "silu", "hidden_size": 576,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "initializer_range": 0.02, "intermediate_size": 1536,
    "is_encoder_decoder": False, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "max_position_embeddings": 8192,
    "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
    "num_key_value_heads": 3, "output_attentions": False, "output_hidden_states": False, "pad_token_id": 2,
    "pretraining_tp": 1, "problem_type": None, "return_dict": True, "rms_norm_eps": 9.999999747378752e-06,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}, "tie_word_embeddings": True,
    "unk_token_id": 0, "use_cache": True, "vocab_size": 49152,
}  # fmt: skip


def line(**more: str) -> str:
    settings = NodeSettings(node="p0", model="llama (KV float32)", weights=bytes(range(32)), facts=FACTS | more)
    return first_line(settings.identity("prefill"), "listens on tcp://127.0.0.1:7801")


def test_it_has_the_address_the_engines_settings_and_a_digest_of_all_facts() -> None:
    assert line() == (
        "pdtransfer prefill: listens on tcp://127.0.0.1:7801; model='llama (KV float32)' dtype=float32 "
        "kv_dtype=float32 block_size=128 processor='x86_64 avx512' rows=blocks facts=00010203"
    )


def test_it_is_one_line_whatever_a_model_is_called() -> None:
    assert len(line(attention_backend="a\nb").splitlines()) == 1


def test_an_engine_that_sends_and_receives_is_both() -> None:
    identity = NodeSettings(node="p0", model="m", weights=b"w").identity("prefill")
    assert first_line(identity, "here", both=True) == "pdtransfer prefill and decode: here; model=m facts=77"


@pytest.mark.parametrize(
    ("document", "heading", "facts"),
    [
        (
            "vllm.md", "### On one CPU host",
            {
                "config": config_digest(CONFIG), "dtype": "torch.bfloat16", "cache": "bfloat16", "cache_dtype": "auto",
                "quantization": "None",
            },
        ),
        ("sglang.md", "### On a CPU", model_facts(CONFIG, dtype="float32", cache="float32", quantization=None)),
    ],
)  # fmt: skip
def test_the_documents_have_the_digests_of_the_model_and_the_dtype_of_their_commands(
    document: str, heading: str, facts: dict[str, Any]
) -> None:
    stated = [text.rpartition("facts=")[2] for text in stated_lines(section(document, heading))]
    assert stated == [weights_digest(facts).hex()[:DIGITS]] * 2
