"""Scales of a quantized KV cache, as far as they are no part of it: a number is what the cache has, times its layer's.

vLLM reads them from the model's checkpoint. Bytes that were written with one scale are other numbers with another, so
peers compare them.
"""

# pyright: basic

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import ConfigError

# The dtypes whose scales are those of a checkpoint, or in the blocks as `fp8_ds_mla` has them.
_DTYPES = "auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"

Scales = dict[str, list[list[float]]]  # by the layer's name: of keys and of values, one or one for each head


def check_cache_dtype(cache_config: Any) -> None:
    """Raises ConfigError for a cache of which it is not known that its blocks and these scales are all that a peer
    needs."""
    if getattr(cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales: each engine computes other scales, from its first request. Use a checkpoint that has "
            "them, and leave out this option"
        )
    if (name := str(cache_config.cache_dtype)) not in _DTYPES:
        raise ConfigError(f"kv_cache_dtype: {name} is not supported; must be one of {', '.join(_DTYPES)}")


def scales_of(layers: Mapping[str, Any], views: Mapping[str, Any]) -> Scales:
    """Those of this rank; `layers` are vLLM's by name, `views` the caches of those on this rank."""
    return {name: _scales(layers.get(name)) for name, view in views.items() if view.itemsize == 1}


def scales_fact(stages: Iterable[Scales], *, tp_size: int) -> dict[str, str]:
    """The fact of an engine's scales, those of all its pipeline stages; none where all of them are 1. Raises
    ConfigError for scales of each head, of which several ranks have a part each."""
    scales = {name: of_layer for stage in stages for name, of_layer in stage.items()}
    numbers = [values for of_layer in scales.values() for values in of_layer]
    if all(value == 1.0 for values in numbers for value in values):
        return {}
    if tp_size > 1 and any(len(values) > 1 for values in numbers):
        raise ConfigError("the checkpoint has a scale of each KV head: not supported with tensor parallelism")
    text = json.dumps(scales, sort_keys=True)
    return {"kv_scales": hashlib.sha256(text.encode()).hexdigest()[:16]}


def _scales(layer: Any) -> list[list[float]]:
    """Of keys and of values. Backends read them as tensors, or as the numbers that were made of these."""
    return [
        [float(value) for value in scale.flatten().tolist()]
        for name in ("_k_scale", "_v_scale")
        if (scale := getattr(layer, name, None)) is not None
    ]
