"""Scales of a cache of 8 bits: which caches are refused, and which engines' scales are alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.adapters.vllm.kv_scales import Scales, check_cache_dtype, scales_fact, scales_of
from pdtransfer.errors import ConfigError

HERE = [0.25, 0.5]  # of the keys of two layers; values have twice as much


def layer(*scales: float) -> SimpleNamespace:
    keys = torch.tensor(scales)
    return SimpleNamespace(_k_scale=keys, _v_scale=2 * keys)


def fact(
    layers: dict[str, Any], *, dtype: torch.dtype = torch.uint8, tp_size: int = 1, others: Scales | None = None
) -> dict[str, str]:
    """`others` are those of another stage."""
    views = {name: torch.zeros(4, dtype=dtype) for name in layers}
    return scales_fact([scales_of(layers, views), others or {}], tp_size=tp_size)


LAYERS = {f"model.layers.{index}.self_attn.attn": layer(scale) for index, scale in enumerate(HERE)}


def test_engines_with_other_scales_have_another_fact() -> None:
    [(name, expected)] = fact(LAYERS).items()
    assert name == "kv_scales"
    assert fact({key: layer(*of.__dict__["_k_scale"].tolist()) for key, of in LAYERS.items()}) == {name: expected}
    first, second = LAYERS
    for other in ({first: layer(0.26)}, {second: layer(0.25)}, {first: layer(0.5), second: layer(0.25)}):
        assert fact(LAYERS | other) != {name: expected}
    values = SimpleNamespace(_k_scale=torch.tensor(0.25), _v_scale=torch.tensor(0.25))
    assert fact(LAYERS | {first: values}) != {name: expected}


def test_without_scales_there_is_no_fact() -> None:
    """vLLM has 1 for what a checkpoint does not have, and reads no scale with a cache that has the numbers whole."""
    ones = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))
    assert fact({"a": ones, "b": SimpleNamespace()}) == {}
    assert fact(LAYERS, dtype=torch.bfloat16) == {}
    assert fact(LAYERS, dtype=torch.float8_e4m3fn) == fact(LAYERS)


def test_stages_have_the_fact_of_all_layers() -> None:
    first, second = LAYERS
    both = {first: [[0.25], [0.5]], second: [[0.5], [1.0]]}
    for mine, other in ((first, second), (second, first)):
        assert fact({mine: LAYERS[mine]}, others={other: both[other]}) == fact(LAYERS)


def test_scales_of_each_head_are_compared_on_one_rank_and_refused_on_several() -> None:
    of_heads = {"a": layer(0.25, 0.5)}
    assert fact(of_heads) != fact({"a": layer(0.25, 0.75)})
    assert fact(LAYERS, tp_size=2) == fact(LAYERS)
    with pytest.raises(ConfigError, match="a scale of each KV head: not supported with tensor parallelism"):
        fact(LAYERS | of_heads, tp_size=2)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla"])
def test_caches_whose_scales_are_known_start(dtype: str) -> None:
    check_cache_dtype(SimpleNamespace(cache_dtype=dtype))
    check_cache_dtype(SimpleNamespace(cache_dtype=dtype, calculate_kv_scales=False))


@pytest.mark.parametrize(
    "dtype", ["int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "nvfp4", "turboquant_k8v4"]
)
def test_other_quantized_caches_are_refused_by_name(dtype: str) -> None:
    text = rf"(?m)^kv_cache_dtype: {dtype} is not supported; must be one of auto, .*ds_mla$"
    with pytest.raises(ConfigError, match=text):
        check_cache_dtype(SimpleNamespace(cache_dtype=dtype))


def test_scales_that_an_engine_computes_are_refused() -> None:
    """As versions before 0.32 do."""
    with pytest.raises(ConfigError, match=r"^calculate_kv_scales: each engine computes other scales"):
        check_cache_dtype(SimpleNamespace(cache_dtype="fp8", calculate_kv_scales=True))
