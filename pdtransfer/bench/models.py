"""Whose KV the benches move: prefill's pages of 64 tokens, and decode's arena of single tokens, of one component."""

from __future__ import annotations

from typing import Any

from ..config import BenchModel, DecodeConfig, PrefillConfig
from ..daemon import create_engine
from ..layout import Component, Span
from ..layouts import host_layout

PAGE_SIZE = 64
_LAYERS, _ROW_BYTES = 61, 1_152  # DeepSeek V3: 512 + 64 elements of bfloat16 a token and layer


def components(model: BenchModel, *, source_slots: int, target_slots: int) -> tuple[Component, Component]:
    """What the pool and the arena hold; `mla` and `gqa` are the reference engine's own, laid out as daemons do."""
    source_slots = -(-source_slots // PAGE_SIZE) * PAGE_SIZE
    if model == "deepseek":
        return (
            _latent("layer_first", slots=source_slots, page_size=PAGE_SIZE),
            _latent("page_first", slots=target_slots, page_size=1),
        )
    prefill = PrefillConfig(attention=model, slots=source_slots, page_size=PAGE_SIZE)
    decode = DecodeConfig(attention=model, slots=target_slots)
    return _of_engine(prefill), _of_engine(decode)


def _latent(name: str, *, slots: int, page_size: int) -> Component:
    layout = host_layout(
        name,
        kinds=("latent",),
        layers=_LAYERS,
        heads=1,
        head_bytes=_ROW_BYTES,
        dtype="bfloat16",
        slots=slots,
        page_size=page_size,
    )
    return Component("kv", "dram", 1, Span(), layout)


def _of_engine(config: PrefillConfig | DecodeConfig) -> Component:
    engine: Any = create_engine(config.engine, config.engine_config)
    (component,) = engine.card.components
    return component
