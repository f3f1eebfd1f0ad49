"""A plugin of SGLang's, for tests on a GPU: the weights of `--load-format dummy` are wide enough that an answer depends
on all KV. SGLang's own are so small that each token is nearly alike. Servers find it on PYTHONPATH."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from math import sqrt
from typing import Any
from zlib import crc32

import torch

SHARP = 4.0  # the norm of DeepSeek V4's keys, so that the logits of attention are as wide
KEY_NORMS = ("kv_norm.weight", "compressor.norm.weight")


def plugin() -> None:
    """Called in each of a server's processes."""
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = widen


def widen(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """The same weights in each server: as wide as keeps what they are multiplied with as wide as it is."""
    for name, weight in model.state_dict().items():
        if not torch.is_floating_point(weight):
            continue
        draw = torch.Generator(device=weight.device).manual_seed(crc32(name.encode()))
        if weight.ndim < 2 and "norm" in name:
            drawn = torch.full_like(weight, SHARP if name.endswith(KEY_NORMS) else 1.0)
        elif weight.ndim < 2:  # biases, sinks and scales
            drawn = torch.rand(weight.shape, generator=draw, device=weight.device) - 0.5
        else:
            inputs = 1 if "embed_tokens" in name else weight.shape[-1]
            drawn = torch.randn(weight.shape, generator=draw, device=weight.device, dtype=torch.bfloat16) / sqrt(inputs)
        weight.data.copy_(drawn.to(weight.dtype))
