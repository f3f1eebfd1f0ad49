"""Bytes that one token's KV takes, from a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pdtransfer.errors import ConfigError

_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e4m3": 1, "fp8": 1}
_MOST = 1 << 20  # of any count in a configuration


def kv_bytes_per_token(config: Mapping[str, Any], *, dtype: str = "") -> int:
    """Of all layers; `dtype` is the cache's, by default the weights'. Layers with a sliding window count as all others
    do: the upper bound. Raises ConfigError that names the field."""
    text: Any = config.get("text_config")
    if isinstance(text, dict):
        config = cast("dict[str, Any]", text)
    name = (dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"dtype = {name[:40]!r}: must be one of {', '.join(_DTYPES)}")
    layers = _count(config, "num_hidden_layers")
    if config.get("kv_lora_rank") is not None:
        return layers * (_count(config, "kv_lora_rank") + _count(config, "qk_rope_head_dim")) * _DTYPES[name]
    heads = _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads") if config.get("num_key_value_heads") is not None else heads
    width = _count(config, "head_dim") if config.get("head_dim") else _count(config, "hidden_size") // heads
    return layers * 2 * kv_heads * width * _DTYPES[name]


def _count(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        raise ConfigError(f"config.json: {field} = {value!r}: must be a number from 1 to {_MOST}")
    return value
