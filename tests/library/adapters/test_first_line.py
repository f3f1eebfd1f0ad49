"""The line at an engine's start: where its KV goes, and what decides whether a peer fits, for a person to read."""

from __future__ import annotations

from pdtransfer import NodeSettings
from pdtransfer.adapters.kit.first_line import first_line

FACTS = {
    "model_type": "llama", "hidden_size": "256", "rope.rope_theta": "10000.0", "dtype": "float32",
    "kv_dtype": "float32", "quantization": "null", "kv_cache_dtype": "auto", "config": "0123456789abcdef",
    "block_size": "128", "window": "0", "processor": "x86_64 avx512", "rows": "blocks", "engine": "vLLM 0.32.0",
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
