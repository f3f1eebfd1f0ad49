"""Builds the model and the EngineDescription from a daemon's configuration, for both roles."""

from __future__ import annotations

from typing import Literal

import torch

from pdtransfer.errors import ConfigError, LocalProtocolError
from pdtransfer.layout.layout import Component, Layout, Span
from pdtransfer.layout.layout_builders import DSA_INDEX_PARTS, host_layout, item_layout
from pdtransfer.serve.engine_api import EngineConfig, EngineDescription
from pdtransfer.serve.engines.shell.facts import ModelFacts

from .architecture import Architecture, EngineOptions, Options
from .model import Model, Transformer
from .numerics import VECTOR, exp2
from .tokens import VOCABULARY

COMPONENT, INDEX = "kv", "index"
INDEX_PAGE_SIZE = 64  # of a DSA index, independent of the KV's page size
_ALIGNMENT = 4_096


def build_model(config: EngineConfig, options: Options) -> Model:
    """The configured model. Raises ConfigError."""
    check_config(config)
    architecture = Architecture(
        attention=options.attention, seed=options.seed, layers=options.layers, context_tokens=options.context_tokens,
        kv_heads=options.kv_heads, top_k=options.top_k, index_share=options.index_share,
    )  # fmt: skip
    if architecture.gqa_heads % architecture.kv_heads:
        raise ConfigError(f"kv_heads: {architecture.kv_heads} does not divide {architecture.gqa_heads} query heads")
    return Model(architecture, device_of(config.device), config.group)


def check_config(config: EngineConfig) -> None:
    """Raises ConfigError for values that no model supports."""
    if config.chunk_tokens < 1 or config.batch_max < 1:
        raise ConfigError(f"chunk_tokens: {config.chunk_tokens}, batch_max: {config.batch_max}: both are at least 1")


def device_of(name: str) -> torch.device:
    """The device named `name`, with full float32 precision for products. Raises ConfigError."""
    if name == "cpu":
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type != "cuda":
        raise ConfigError(f"device: {name!r}, the reference engine runs on cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = device.index or 0
    if number >= count:
        raise ConfigError(f"device: {name!r}, torch {torch.__version__} sees {count} cards")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.set_device(number)
    device = torch.device("cuda", number)
    exp2(torch.zeros(VECTOR, device=device))  # compile it now: peers must not wait for that
    return device


def facts_of(config: EngineConfig, model: Transformer, options: EngineOptions) -> ModelFacts:
    """Describes the engine. Raises ConfigError if slots, page size and layout do not make a pool."""
    return ModelFacts(
        description=_description(config, model, options), aux_format="reference/1", vocabulary=VOCABULARY,
        context_tokens=model.architecture.context_tokens, eos=(options.eos,),
    )  # fmt: skip


def _description(config: EngineConfig, model: Transformer, options: EngineOptions) -> EngineDescription:
    kv = _kv(config.host_layout, model, slots=config.slots, page_size=config.page_size)
    components = [_component(COMPONENT, "dram", kv)]
    replicas = {COMPONENT: (model.shard.replica, model.shard.replicas)}
    memory_bytes, hbm_bytes = kv.end, 0
    # A pipeline stage in which no group of layers begins has no index.
    layers = model.architecture.index_layers(model.shard.layers)
    if layers:
        replicas[INDEX] = config.group.ranks.tp_rank, config.group.ranks.tp_size
    if config.hisparse is not None:
        # The index and dense requests are in HBM, where a step reads them fastest.
        dense = _kv("layer_first", model, slots=config.hisparse.dense_slots, page_size=1)
        index = _index(layers, config.slots + dense.slots, base=_aligned(dense.end))
        components += [_component(COMPONENT, "hbm", dense), _component(INDEX, "hbm", index)]
        hbm_bytes = index.end
    elif layers:
        index = _index(layers, config.slots, base=_aligned(kv.end))
        components.append(_component(INDEX, "dram", index))
        memory_bytes = index.end
    return EngineDescription(
        model=model.architecture.name, weights=model.digest, components=tuple(components), memory_bytes=memory_bytes,
        hbm_bytes=hbm_bytes, eos=options.eos, full_sampling=True, replicas=replicas,
        context_tokens=config.context_tokens(model.architecture.context_tokens),
    )  # fmt: skip


def kv_layout(name: str, model: Transformer, *, slots: int, page_size: int) -> Layout:
    """The named layout of the KV that this rank keeps."""
    sizes, shard = model.architecture, model.shard
    return host_layout(
        name, kinds=sizes.kinds, layers=shard.layers, heads=shard.kv_heads, head_bytes=sizes.head_bytes,
        dtype=sizes.dtype, slots=slots, page_size=page_size,
    )  # fmt: skip


def _kv(name: str, model: Transformer, *, slots: int, page_size: int) -> Layout:
    try:
        return kv_layout(name, model, slots=slots, page_size=page_size)
    except (LocalProtocolError, ValueError) as error:
        raise ConfigError(f"no pool of {slots} slots, page_size {page_size}: {error}") from None


def _index(layers: range, slots: int, *, base: int) -> Layout:
    """A group's planes have the number of its first layer."""
    slots = -(-slots // INDEX_PAGE_SIZE) * INDEX_PAGE_SIZE
    return item_layout(
        "layer_first", parts=DSA_INDEX_PARTS, layers=layers, slots=slots, page_size=INDEX_PAGE_SIZE, base=base
    )


def _component(name: str, memory: Literal["dram", "hbm"], layout: Layout) -> Component:
    return Component(name=name, memory=memory, tokens_per_row=1, span=Span(), layout=layout)


def _aligned(byte_count: int) -> int:
    return -(-byte_count // _ALIGNMENT) * _ALIGNMENT
