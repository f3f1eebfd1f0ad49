"""Whose KV the benches move: prefill's pages of 64 tokens, and decode's arena of single tokens, of one component."""

from __future__ import annotations

from typing import Any, Literal

from pdtransfer.layout.layout import Component, Layout, Span
from pdtransfer.layout.layout_builders import host_layout
from pdtransfer.serve.settings.worker import DecodeConfig, HostLayout, PrefillConfig
from pdtransfer.serve.worker.daemon import create_engine

PAGE_SIZE = 64
BenchModel = Literal["deepseek", "mla", "gqa"]  # deepseek: 61 planes of MLA; else the small reference model
_SIZES = {"mla": ("head_bytes=2304",), "gqa": ("kv_heads=4", "head_bytes=256")}  # of a token, in each of 4 layers


def latent_layout(name: str, *, slots: int, page_size: int, layers: int = 61) -> Layout:
    """MLA as DeepSeek V3 has it: in each layer a row of 512 + 64 elements of bfloat16."""
    return host_layout(
        name,
        kinds=("latent",),
        layers=layers,
        heads=1,
        head_bytes=1_152,
        dtype="bfloat16",
        slots=slots,
        page_size=page_size,
    )


def components(
    model: BenchModel, *, source_slots: int, target_slots: int, source_layout: HostLayout = "layer_first"
) -> tuple[Component, Component]:
    """What the pool and the arena hold; `mla` and `gqa` are of the reference model's sizes, laid out as daemons do.

    `source_layout` is that of the pool of `deepseek`.
    """
    source_slots = -(-source_slots // PAGE_SIZE) * PAGE_SIZE
    if model == "deepseek":
        layouts = (
            latent_layout(source_layout, slots=source_slots, page_size=PAGE_SIZE),
            latent_layout("page_first", slots=target_slots, page_size=1),
        )
        source, target = (Component("kv", "dram", 1, Span(), layout) for layout in layouts)
        return source, target
    prefill = PrefillConfig(engine_option=_SIZES[model], slots=source_slots, page_size=PAGE_SIZE)
    decode = DecodeConfig(engine_option=_SIZES[model], slots=target_slots)
    return _of_engine(prefill), _of_engine(decode)


def _of_engine(config: PrefillConfig | DecodeConfig) -> Component:
    engine: Any = create_engine(config.factory, config.engine_config)
    (component,) = engine.description.components
    return component
