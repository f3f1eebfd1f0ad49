"""The stamp engine's options, the part of one rank, and the description that daemons get of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Literal, Self

from msgspec import Meta, Struct

from .... import schema
from ....errors import ConfigError, LocalProtocolError
from ....layout.deepseek_v4 import PAGE_TOKENS, WINDOW_TOKENS, deepseek_v4
from ....layout.layout import Component, Layout, Span
from ....layout.layout_builders import DSA_INDEX_PARTS, host_layout, item_layout
from ....wire import Ranks
from ...engine_api import EngineConfig, EngineDescription
from ...sampling import DIGEST_BYTES
from ..shell.facts import ModelFacts
from .tokens import EOS, VOCABULARY

KV, INDEX = "kv", "index"
TOP_MAX = 4_096  # positions that one swap plan takes from a request
_INDEX_PAGE_SIZE = 64  # of the index, whatever the page size of the KV is
_ALIGNMENT = 4_096


class StampOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options, set by `--engine-option name=value`. With `pools`, the components are those of a hybrid model."""

    seed: Annotated[int, Meta(ge=0)] = 0
    context_tokens: Annotated[int, Meta(ge=2, le=1 << 20)] = 131_072
    eos: Annotated[int, Meta(ge=0, lt=VOCABULARY)] = EOS
    layers: Annotated[int, Meta(ge=1, le=128)] = 4
    kv_heads: Annotated[int, Meta(ge=0, le=256)] = 0  # K and V of this many heads (GQA); 0: one latent (MLA)
    head_bytes: Annotated[int, Meta(ge=8, le=1 << 16, multiple_of=4)] = 256  # of one kind of one head of a token
    top_k: Annotated[int, Meta(ge=0, le=TOP_MAX)] = 0  # positions that a step reads besides; 0: none, and no index
    index_share: Annotated[int, Meta(ge=1, le=64)] = 2  # layers that share the positions
    layers_per_cell: Annotated[int, Meta(ge=0, le=64)] = 0  # layers in each cell that prefill offers; 0: all
    check: Annotated[int, Meta(ge=0, le=1)] = 0  # 1: a wrong byte fails its request with a text that names its row
    pools: Literal["", "deepseek_v4"] = ""
    ratios: Annotated[str, Meta(pattern=r"^\d+(,\d+)*$", max_length=512)] = "0,4,128,4"  # of each layer: 0, 4 or 128
    requests: Annotated[int, Meta(ge=1, le=4_096)] = 64  # that have a window and states
    page_tokens: Annotated[int, Meta(ge=1, le=65_536)] = PAGE_TOKENS  # whatever --page-size says; 1: single rows
    window_tokens: Annotated[int, Meta(ge=1, le=65_536)] = WINDOW_TOKENS
    index_memory: Literal["dram", "hbm"] = "dram"  # of decode, with pools

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """Raises ConfigError, naming the option, if one is unknown, not an integer or out of bounds."""
        return schema.options(options, cls)

    @property
    def model(self) -> str:
        """The name that both ends must have in common."""
        return f"stamp-{self.pools or ('gqa' if self.kv_heads else 'mla')}"

    @property
    def weights(self) -> bytes:
        """The digest of everything that tokens or bytes depend on."""
        names = ["seed", "layers", "kv_heads", "head_bytes", "top_k", "index_share"]
        if self.pools:
            names = ["seed", "ratios", "window_tokens"]
        text = ";".join(f"{name}={getattr(self, name)}" for name in names)
        return blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of KV in each layer."""
        return ("k", "v") if self.kv_heads else ("latent",)

    def groups(self) -> list[range]:
        """The layers that share positions."""
        step = self.index_share
        return [range(first, min(first + step, self.layers)) for first in range(0, self.layers, step)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StampShard:
    """The layers and heads that one rank keeps, as replica `replica` of `replicas`. If there are more ranks than heads,
    neighbouring ranks keep the same ones."""

    layers: range
    heads: range
    replica: int
    replicas: int

    @classmethod
    def of(cls, options: StampOptions, ranks: Ranks) -> StampShard:
        """Raises ConfigError if the ranks cannot divide the heads and layers."""
        tp, pp, heads, layers = ranks.tp_size, ranks.pp_size, options.kv_heads or 1, options.layers
        if options.pools and tp * pp > 1:
            raise ConfigError(f"tp_size = {tp}, pp_size = {pp}: one process has the pools of {options.pools}")
        if heads % tp and tp % heads:
            raise ConfigError(f"tp_size = {tp}: must divide the {heads} kv_heads, or be a multiple of them")
        if pp > layers:
            raise ConfigError(f"pp_size = {pp}: must be at most the {layers} layers")
        head_count, replicas = max(1, heads // tp), max(1, tp // heads)
        first = ranks.tp_rank // replicas * head_count
        return cls(
            layers=range(ranks.pp_rank * layers // pp, (ranks.pp_rank + 1) * layers // pp),
            heads=range(first, first + head_count),
            replica=ranks.tp_rank % replicas,
            replicas=replicas,
        )


def _check(config: EngineConfig) -> None:
    if config.device != "cpu":
        raise ConfigError(f"device = {config.device!r}: the stamp engine runs on cpu alone")
    if config.chunk_tokens < 1 or config.batch_max < 1:
        raise ConfigError(f"chunk_tokens: {config.chunk_tokens}, batch_max: {config.batch_max}: must be at least 1")


def facts_of(config: EngineConfig, options: StampOptions) -> ModelFacts:
    """Describes the engine. Raises ConfigError for settings that it cannot follow."""
    _check(config)
    description = _description(config, options)
    return ModelFacts(
        description=description, aux_format="stamp/1", vocabulary=VOCABULARY, context_tokens=options.context_tokens,
        eos=(options.eos,),
    )  # fmt: skip


def _description(config: EngineConfig, options: StampOptions) -> EngineDescription:
    shard = StampShard.of(options, config.group.ranks)
    try:
        components = components_of(config, options, shard)
    except (LocalProtocolError, ValueError) as error:
        text = f"slots {config.slots}, page_size {config.page_size}, host_layout {config.host_layout}"
        raise ConfigError(f"{text}: {error}") from None
    ends = {
        memory: [component.layout.end for component in components if component.memory == memory]
        for memory in ("dram", "hbm")
    }
    ranks = config.group.ranks
    replicas = {} if options.pools else {KV: (shard.replica, shard.replicas), INDEX: (ranks.tp_rank, ranks.tp_size)}
    return EngineDescription(
        model=options.model, weights=options.weights, components=components, memory_bytes=max(ends["dram"]),
        hbm_bytes=max(ends["hbm"], default=0), eos=options.eos, full_sampling=True,
        replicas={name: replica for name, replica in replicas.items() if name in {part.name for part in components}},
        context_tokens=config.context_tokens(options.context_tokens),
    )  # fmt: skip


def components_of(config: EngineConfig, options: StampOptions, shard: StampShard) -> tuple[Component, ...]:
    """The components of a rank with these heads and layers. Raises LocalProtocolError or ValueError for settings that
    make none."""
    return _hybrid(config, options) if options.pools else _dense(config, options, shard)


def kv_layout(name: str, options: StampOptions, shard: StampShard, *, slots: int, page_size: int) -> Layout:
    """The named layout of this rank's KV."""
    return host_layout(
        name, kinds=options.kinds, layers=shard.layers, heads=shard.heads, head_bytes=options.head_bytes, dtype="uint8",
        slots=slots, page_size=page_size,
    )  # fmt: skip


def _dense(config: EngineConfig, options: StampOptions, shard: StampShard) -> tuple[Component, ...]:
    """The KV, and an index with `top_k`. With HiSparse, the index and the KV of dense requests are in HBM."""
    kv = kv_layout(config.host_layout, options, shard, slots=config.slots, page_size=config.page_size)
    components = [_component(KV, "dram", kv)]
    # A group's index has the number of its first layer; a stage of a pipeline may have none.
    leaders = [group.start for group in options.groups() if group.start in shard.layers] if options.top_k else []
    if config.hisparse is not None:
        dense = kv_layout("layer_first", options, shard, slots=config.hisparse.dense_slots, page_size=1)
        components.append(_component(KV, "hbm", dense))
        if leaders:
            index = _index(leaders, config.slots + dense.slots, base=_aligned(dense.end))
            components.append(_component(INDEX, "hbm", index))
    elif leaders:
        components.append(_component(INDEX, "dram", _index(leaders, config.slots, base=_aligned(kv.end))))
    return tuple(components)


def _hybrid(config: EngineConfig, options: StampOptions) -> tuple[Component, ...]:
    if config.hisparse is not None:
        raise ConfigError(f"pools = {options.pools}: enable_hisparse is not for them, they are read in the arena")
    single = options.page_tokens == 1
    return deepseek_v4(
        config.host_layout, ratios=[int(ratio) for ratio in options.ratios.split(",")], tokens=config.slots,
        requests=options.requests, page_tokens=options.page_tokens, page_align=8 if single else 576,
        window_tokens=options.window_tokens, window_page_size=1 if single else 64,
        index_memory=options.index_memory if config.role == "decode" else "dram",
    )  # fmt: skip


def _index(layers: list[int], slots: int, *, base: int) -> Layout:
    slots = -(-slots // _INDEX_PAGE_SIZE) * _INDEX_PAGE_SIZE
    return item_layout(
        "layer_first", parts=DSA_INDEX_PARTS, layers=layers, slots=slots, page_size=_INDEX_PAGE_SIZE, base=base
    )


def _component(name: str, memory: Literal["dram", "hbm"], layout: Layout) -> Component:
    return Component(name=name, memory=memory, tokens_per_row=1, span=Span(), layout=layout)


def _aligned(byte_count: int) -> int:
    return -(-byte_count // _ALIGNMENT) * _ALIGNMENT
