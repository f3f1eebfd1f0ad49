"""What differs between vLLM's versions, and what this package reads of vLLM's configuration."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from typing import Any

import torch
import vllm
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.logger import init_logger

from ...errors import ConfigError
from ...wire import Ranks
from ..kit.facts import config_digest, dtype_name, model_facts, named_facts
from ..kit.kinds import CacheKind, Heads, StatePart, described
from ..kit.versions import VLLM_SINCE, capabilities
from . import kv_scales, token_rows
from .drafter import drafter_layers, layers_with_kv, speculation
from .kinds import KINDS, PAGED, kind_of, parts_of, specs_of
from .orders import KVGroup
from .token_rows import Kinds

log = init_logger(f"vllm.{__name__}")

HAS = capabilities("vLLM", VLLM_SINCE, vllm.__version__)

Groups = list[tuple[KVGroup, list[str]]]  # those whose KV is transferred, each with its layers' names
Views = dict[str, Any]  # the caches of layers, by name


def join_logs() -> None:
    """What this package logs goes where vLLM's own lines go."""
    ours, theirs = logging.getLogger("pdtransfer"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), theirs.propagate
        ours.setLevel(theirs.level)


def prefill_context_rank(vllm_config: Any) -> int:
    """This worker's number among those that compute a prompt together and have all of its KV each."""
    if getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1) == 1:
        return 0
    from vllm.distributed.parallel_state import get_pcp_group

    return get_pcp_group().rank_in_group


def groups_of(kv_cache_config: Any, dcp_sizes: tuple[int, int] = (1, 1)) -> Groups:
    """The groups whose KV is transferred, each with its layers' names; `dcp_sizes` as kinds.dcp_sizes_of has them.
    Raises ConfigError for a group that cannot be transferred."""
    groups: Groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if not getattr(group, "enable_kv_transfer", True):
            continue
        spec = group.kv_cache_spec
        inner = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
        kinds = {_kind(index, of_layer, spec.block_size): type(of_layer).__name__ for of_layer in inner}
        if len({(kind.row, kind.window, kind.chunk) for kind in kinds}) > 1:
            windows = ", ".join(f"{kind.window or kind.chunk or 'all'} tokens ({name})" for kind, name in kinds.items())
            raise ConfigError(f"KV cache group {index} mixes attention windows: {windows}")
        kind, *_ = kinds
        sharded = kind.row == "page" and not kind.window and not kind.chunk and getattr(spec, "dcp_sharded", True)
        size, stripes = dcp_sizes if sharded else (1, 1)
        host = getattr(group, "host_resident", False)
        groups.append((KVGroup(index, kind, dcp_size=size, stripes=stripes, host=host), list(group.layer_names)))
    return groups


def _kind(index: int, spec: Any, block_size: int) -> CacheKind:
    name = type(spec).__name__
    supported = [spec_class for spec_class, kind in KINDS.items() if kind.row != "request" or "states" in HAS]
    if name in KINDS and name not in supported:
        first = VLLM_SINCE["states"].text
        raise ConfigError(f"KV cache group {index}: {name} needs vLLM {first}, found {vllm.__version__}")
    if name not in supported:
        raise ConfigError(f"KV cache group {index}: {name} is not supported; must be one of {', '.join(supported)}")
    return kind_of(spec, block_size)


def heads_of(vllm_config: Any, ranks: Ranks) -> Heads:
    """The KV heads of the model."""
    model, *_ = layers_with_kv(vllm_config)
    return Heads(1 if model.latent else model.heads, ranks, model.size)


def head_totals(vllm_config: Any, kv_cache_config: Any) -> dict[str, int]:
    """The KV heads of each layer, all ranks together, as the model's or its drafter's configuration has them."""
    model, *drafters = layers_with_kv(vllm_config)
    of_text = getattr(vllm_config.model_config, "hf_text_config", None)
    of_windows = getattr(of_text, "swa_num_key_value_heads", None)  # MiMo's, which has more in windows
    specs = specs_of(kv_cache_config)
    totals, drafts = dict[str, int](), drafter_layers(vllm_config, specs)
    for name, spec in specs.items():
        layers = drafters[0] if name in drafts else model
        kind = KINDS.get(type(spec).__name__, PAGED)
        heads = (kind.window and of_windows) or layers.heads
        totals[name] = 1 if layers.latent or kind.holder == "every" else heads
    return totals


def sizes_of(kv_cache_config: Any) -> list[int]:
    """The sizes in bytes of the tensors that vLLM allocates for its KV cache, but for HiSparse's host pool."""
    tensors = [tensor for tensor in kv_cache_config.kv_cache_tensors if not getattr(tensor, "host_resident", False)]
    if "one_allocation" in HAS:
        return [tensor.size for tensor in tensors[:1]]
    packed = [tensor.size for tensor in tensors if tensor.block_stride > 0]
    return packed[:1] + [tensor.size for tensor in tensors if tensor.block_stride == 0]


def ranks_here(vllm_config: Any) -> Ranks:
    """This worker's place in its engine."""
    parallel = vllm_config.parallel_config
    return Ranks(
        get_tensor_model_parallel_rank(), parallel.tensor_parallel_size, get_pp_group().rank_in_group,
        parallel.pipeline_parallel_size,
    )  # fmt: skip


def number_of(vllm_config: Any, ranks: Ranks) -> int:
    """The number of a rank among those of this host that share the settings, data parallel ones included."""
    engine = getattr(vllm_config.parallel_config, "data_parallel_rank_local", None) or 0
    return engine * ranks.tp_size * ranks.pp_size + ranks.pp_rank * ranks.tp_size + ranks.tp_rank


def facts_of(vllm_config: Any, views: Views) -> dict[str, Any]:
    """The settings that must be equal for two engines to produce compatible KV."""
    model = vllm_config.model_config
    return {
        "config": config_digest(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "cache": _cache_dtype(views),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "quantization": str(model.quantization),
        **speculation(vllm_config),
    }


def facts_of_blocks(vllm_config: Any, views: Views, groups: Groups, indices: frozenset[str]) -> dict[str, Any]:
    """All that makes blocks of these tokens the same bytes, whatever the engines' tensor parallel sizes."""
    stripes = max(group.stripes for group, _ in groups)
    return {
        **({"dcp_size": stripes} if stripes > 1 else {}),
        "attention": _backends(vllm_config, views),
        # Not how many layers they have here: of a stage's layers these are a part, and the configuration has them all.
        # With HiSparse a sparse index is in a group of its own, whose blocks are those of what it chooses from.
        "groups": [
            [group.kind.page_size, group.kind.window, group.kind.chunk]
            for group, names in groups
            if not group.state and not indices.issuperset(names)
        ],
        # On the CPU the kernels pack keys for what the processor can do.
        "processor": _processor() if all(view.device.type == "cpu" for view in views.values()) else "",
    }


def states_of(kv_cache_config: Any, groups: Groups) -> dict[str, list[StatePart]]:
    """The parts of each layer's page of states, by the layer's name."""
    specs = specs_of(kv_cache_config)
    return {name: _parts(specs[name]) for group, names in groups if group.state for name in names}


def _parts(spec: Any) -> list[StatePart]:
    if spec.tp_replicated:
        return parts_of("", spec.shapes, [dtype.itemsize for dtype in spec.dtypes], channels_first=False)
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    items = [dtype.itemsize for dtype in spec.dtypes]
    first, drafts = is_conv_state_dim_first(), spec.num_speculative_blocks
    return parts_of(spec.mamba_type.name, spec.shapes, items, channels_first=first, drafts=drafts)


def states_fact(kv_cache_config: Any, groups: Groups, tp_size: int) -> dict[str, str]:
    """The fact that names the states of the groups; none of a model without states."""
    parts = states_of(kv_cache_config, groups)
    texts = [
        f"{group.name} {'all of ' if group.kind.holder == 'every' else ''}{text}"
        for group, names in groups
        if group.state
        for text in dict.fromkeys(
            described(parts[name], 1 if group.kind.holder == "every" else tp_size) for name in names
        )
    ]
    return {"states": ", ".join(texts)} if texts else {}


def scales_fact(vllm_config: Any, views: Views, ranks: Ranks) -> dict[str, str]:
    """As kv_scales.scales_fact. All ranks of the engine call it."""
    scales = kv_scales.scales_of(vllm_config.compilation_config.static_forward_context, views)
    stages: list[Any] = [scales] * ranks.pp_size
    if ranks.pp_size > 1:
        torch.distributed.all_gather_object(stages, scales, group=get_pp_group().cpu_group)
    return kv_scales.scales_fact(stages, tp_size=ranks.tp_size)


def kv_views(views: Views, groups: Groups) -> dict[str, Any]:
    """Those that hold KV and no states, as far as there are any."""
    states = {name for group, names in groups if group.state for name in names}
    return {name: view for name, view in views.items() if name not in states} or views


def facts_of_model(vllm_config: Any, views: Views) -> dict[str, Any]:
    """The settings that must be equal for two caches to hold the same KV of a token, in any engine."""
    model = vllm_config.model_config
    facts = model_facts(
        model.hf_text_config.to_dict(), dtype=model.dtype, cache=_cache_dtype(views), quantization=model.quantization
    )
    return facts | speculation(vllm_config)


def shown_facts(vllm_config: Any, views: Views, facts: dict[str, Any], rows: str) -> dict[str, str]:
    """Facts by the names that peers see where one differs; those of the model in any case, since a digest of its
    configuration explains nothing."""
    of_model = facts_of_model(vllm_config, views)
    by_group = list(zip(*facts.get("groups", ()), strict=True))
    sizes = {
        name: "/".join(map(str, dict.fromkeys(values)))
        for name, values in zip(("block_size", "window", "attention_chunk"), by_group, strict=False)
    }
    shown_otherwise = {"groups", "attention", *of_model}
    others = {name: value for name, value in facts.items() if name not in shown_otherwise} | sizes
    if "attention" in facts:
        others["attention"] = "/".join(facts["attention"])
    return named_facts(of_model, **others, rows=rows, engine=f"vLLM {vllm.__version__}")


def served_name(vllm_config: Any) -> str:
    """What clients call the model, as other engines compare it: by default its name or path."""
    name = getattr(vllm_config.model_config, "served_model_name", None) or vllm_config.model_config.model
    return str(name[0] if isinstance(name, list) else name)


def rows_of(
    wanted: str, vllm_config: Any, views: Views, groups: Groups, described_as: Callable[..., object]
) -> tuple[str, dict[str, Kinds] | None]:
    """What is transferred where the settings want "auto", "blocks" or "tokens", and where the tokens of each layer are.

    "auto" becomes "blocks" on GPUs, with several groups, a window or decode context parallelism. So it does where it is
    not known how blocks hold tokens, or `described_as` refuses these `kinds`, or they are too many planes. Those of the
    whole model and its drafter count, so that its ranks decide alike whatever their number and their layers.
    """
    striped = any(group.stripes > 1 for group, _ in groups)
    if wanted == "tokens":
        if striped:
            raise ConfigError('rows = "tokens": decode context parallelism needs rows = "blocks"')
        return wanted, kinds_of(vllm_config, views)
    on_cpu = all(view.device.type == "cpu" for view in views.values())
    whole = [group for group, _ in groups if not (group.state or group.kind.window or group.kind.chunk)]
    if wanted == "blocks" or striped or not on_cpu or len(whole) != 1 or len(groups) != 1:
        return "blocks", None
    try:
        kinds = kinds_of(vllm_config, views)
        if not token_rows.too_many_planes(kinds.values(), layers_with_kv(vllm_config)):
            described_as(kinds=kinds)
            return wanted, kinds
    except (ConfigError, RuntimeError, TypeError) as error:  # the latter two: of an attention backend that is not known
        log.info("blocks of another size are not supported: %s", error)
    return "blocks", None


def kinds_of(vllm_config: Any, views: Views) -> dict[str, Kinds]:
    """Where the numbers of tokens are in each layer's cache. Raises ConfigError where that is not known."""
    layers = vllm_config.compilation_config.static_forward_context
    return {name: token_rows.kinds_of(name, layers.get(name), view) for name, view in views.items()}


def _cache_dtype(views: Views) -> str:
    return "/".join(sorted({dtype_name(view.dtype) for view in views.values()}))


def _backends(vllm_config: Any, views: Views) -> list[str]:
    layers = vllm_config.compilation_config.static_forward_context
    attention_layers = [layers[name] for name in views if hasattr(layers.get(name), "get_attn_backend")]
    return sorted({layer.get_attn_backend().get_name() for layer in attention_layers})


def _processor() -> str:
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    avx512 = getattr(torch.cpu, "_is_avx512_supported", lambda: False)()
    return f"{platform.machine()}{' avx512' if avx512 else ''}{' amx' if amx else ''}"
