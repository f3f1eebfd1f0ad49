"""Loads a checkpoint's directory, and refuses what cannot be served, each with the reason."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from msgspec import Meta, Struct
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.utils import logging as transformers_logging

from .... import schema
from ....adapters.kit.facts import dtype_name, model_facts
from ....client.labels import weights_digest
from ....errors import ConfigError
from ....hisparse.hot_requests import capacity_of
from ...engine_api import EngineConfig, EngineDescription
from ..shell.facts import ModelFacts
from .latent import ATTENTION, absorb, has_latents
from .layers import LayerShape, pick_groups, shapes_of
from .ranks import keep

log = logging.getLogger(__name__)

_DTYPES = ("float32", "bfloat16", "float16")
_SAMPLES = 1_024  # numbers of each tensor that the digest of the weights reads
_TYPES = {None, "full_attention", "sliding_attention", "indexed_attention"}  # of layers
_SHARED_ROPE = ("dynamic", "longrope")
_ERRORS = (
    ValueError, OSError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, IndexError, AssertionError,
    SafetensorError, StrictDataclassError,
)  # fmt: skip


class ModelOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engine's options, as `--engine-option name=value` gives them."""

    model: str = ""  # the checkpoint's directory, by --model
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of weights and KV; auto: the checkpoint's
    weights: Literal["checkpoint", "random"] = "checkpoint"  # random: config.json is enough
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0  # of random weights
    digests: bool = False  # of logits and KV; each request is then computed by itself, and its bits are always the same
    layers_per_cell: Annotated[int, Meta(ge=0, le=4_096)] = 0  # in each cell of prefill; 0: one on a GPU, or all
    window_slots: Annotated[int, Meta(ge=0)] = 0  # of layers with a window, in the arena; 0: by batch_max
    threads: Annotated[int, Meta(ge=0, le=4_096)] = 0  # that compute on the CPU; 0: one for each core
    kv_memory: Literal["auto", "dram", "hbm"] = "auto"  # of decode; auto: hbm on a GPU

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """Raises ConfigError, naming the option, if one is unknown or its value is."""
        return schema.options(options, cls)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model that is ready to compute, and what engines must know of it."""

    model: Any
    name: str
    digest: bytes
    shapes: tuple[LayerShape, ...]  # of the layers that keep something, in order
    eos: frozenset[int]
    vocabulary: int
    context_tokens: int
    top: int  # tokens that a sparse index picks; 0: the model has none
    by_layer_type: bool  # whether the model takes a mask for each type of layer, and not one
    device: torch.device
    threads: int  # on the CPU; 0: torch's own number

    def facts(self, options: ModelOptions, description: EngineDescription) -> ModelFacts:
        """What the shells of both roles know of the model."""
        return ModelFacts(
            description=description, aux_format="transformers/1", vocabulary=self.vocabulary,
            context_tokens=self.context_tokens, eos=tuple(self.eos), digests=options.digests, every_token=True,
        )  # fmt: skip

    def computing(self) -> AbstractContextManager[object]:
        """Called on the thread that is about to compute: these are settings of a thread."""
        self.enter()
        return torch.inference_mode()

    def enter(self) -> None:
        """As `computing`, for the start."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        elif self.threads and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)


def load(config: EngineConfig, options: ModelOptions) -> Checkpoint:
    """The checkpoint on its device. Raises ConfigError for one that cannot be served."""
    directory = Path(options.model)
    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        return _load(config, options, directory)
    except ConfigError as error:
        raise ConfigError(f"model = {options.model!r}: {error}") from error.__cause__


def _load(config: EngineConfig, options: ModelOptions, directory: Path) -> Checkpoint:
    device = _device(config)
    if config.group.ranks.tp_size > 1:
        if options.digests:
            raise ConfigError(f"digests: of one process, tp_size is {config.group.ranks.tp_size}")
        device = torch.device("cpu")  # where it is whole; `placed` puts a rank's share on its GPU
    configuration = _configuration(directory)
    text = configuration.get_text_config(decoder=True)
    _check(configuration, text)
    top = _top(text)
    if config.hisparse is not None:
        if not top:
            raise ConfigError("enable_hisparse: the model has no sparse index, so each step reads every token")
        capacity_of(config.hisparse, top, rows=config.batch_max, slots=config.slots)
    dtype = _dtype(options.dtype, configuration)
    if options.weights == "random":
        torch.manual_seed(options.seed)
        with device:
            model = _tried("config.json", lambda: AutoModelForCausalLM.from_config(configuration, dtype=dtype))
    else:
        given = {"dtype": dtype, "local_files_only": True, "use_safetensors": True, "output_loading_info": True}
        model, report = _tried(
            "its weights", lambda: AutoModelForCausalLM.from_pretrained(directory, config=configuration, **given)
        )
        if wrong := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
            raise ConfigError(f"its weights: {len(wrong)} are missing or of another shape: {', '.join(wrong[:3])}")
        model = model.to(device)
    model.eval()
    shapes = kept_by(model, device)
    if config.hisparse is not None and not pick_groups(shapes):
        raise ConfigError("enable_hisparse: some layers attend to more than the picks of an index over latents")
    if has_latents(model):
        absorb(model)
        model.set_attn_implementation(ATTENTION)
    types: list[str] = getattr(text, "layer_types", None) or []
    return Checkpoint(
        model=model,
        name=_name(directory),
        digest=_digest(model, text, dtype),
        shapes=shapes,
        eos=_eos(directory, text),
        vocabulary=text.vocab_size,
        context_tokens=_context(text) or config.slots,
        top=top,
        by_layer_type=len(set(types)) > 1,
        device=device,
        threads=options.threads,
    )


def placed(checkpoint: Checkpoint, config: EngineConfig, model: Any, shapes: tuple[LayerShape, ...]) -> Checkpoint:
    """The checkpoint with this rank's share of the model, on its device."""
    device = _device(config)
    keep(model)
    return replace(checkpoint, model=model.to(device), shapes=shapes, device=device)


def _device(config: EngineConfig) -> torch.device:
    ranks = config.group.ranks
    if ranks.pp_size > 1:
        raise ConfigError(f"pp_size = {ranks.pp_size}: a checkpoint is split by heads alone")
    try:
        device = torch.device(config.device)
    except RuntimeError:
        raise ConfigError(f"device: {config.device!r} is neither cpu nor cuda:N") from None
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type != "cuda" or (device.index or 0) >= count:
        raise ConfigError(f"device: {config.device!r}, torch {torch.__version__} sees {count} GPUs")
    torch.cuda.set_device(device.index or 0)
    return torch.device("cuda", device.index or 0)


def _tried(step: str, make: Any) -> Any:
    """What a call into transformers returns; its errors, of whatever type, are about the checkpoint."""
    try:
        return make()
    except _ERRORS as error:
        raise ConfigError(f"{step}: {' '.join(str(error).split())[:400]}") from error


def _configuration(directory: Path) -> Any:
    """config.json, as transformers reads it without code of the checkpoint."""
    file = directory / "config.json"
    try:
        given = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        if not directory.is_dir():
            raise ConfigError("no such directory; a checkpoint is not fetched by its name") from None
        raise ConfigError(f"config.json: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"config.json: {type(given).__name__}, expected an object")
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        why = "it needs code of its own, which is not run" if "auto_map" in given else "transformers does not know it"
        raise ConfigError(f"config.json: model_type {kind!r}: {why} (transformers {transformers.__version__})")
    return _tried("config.json", lambda: AutoConfig.from_pretrained(directory, local_files_only=True))


def _check(configuration: Any, text: Any) -> None:
    """Raises ConfigError for what no engine here can serve."""
    kind = configuration.model_type
    if configuration.is_encoder_decoder:
        raise ConfigError(f"model_type {kind!r}: an encoder and a decoder; only decoders are served")
    if text is not configuration:
        others = [name for name in configuration.sub_configs if getattr(configuration, name, None) not in (None, text)]
        raise ConfigError(f"model_type {kind!r}: it has {', '.join(others) or 'several parts'}; only text is served")
    if type(configuration) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"model_type {kind!r}: it generates no text")
    if (quantized := getattr(configuration, "quantization_config", None)) is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else type(quantized).__name__
        raise ConfigError(f"quantization_config: {method}: no quantised weights are served")
    types: list[str] = getattr(text, "layer_types", None) or []
    if strange := sorted(set(types) - _TYPES, key=str):
        raise ConfigError(f"layer_types: {', '.join(strange)}: only attention that keeps keys of tokens is served")
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *[value for value in rope.values() if isinstance(value, dict)]):
        if parameters.get("rope_type") in _SHARED_ROPE:
            name = parameters["rope_type"]
            raise ConfigError(f"rope_type {name!r}: one request's length would turn the keys of others in its batch")


def with_cache(model: Any, kept: Any) -> dict[str, Any]:
    """The argument by which this model takes a cache: transformers has renamed it, one family after the other."""
    return {"cache" if "cache" in _arguments(type(model)) else "past_key_values": kept}


@cache
def _arguments(model: type) -> frozenset[str]:
    return frozenset(signature(model.forward).parameters)


def kept_by(model: Any, device: torch.device) -> tuple[LayerShape, ...]:
    """What each layer keeps of a token, by what transformers' own cache holds after one. Raises ConfigError."""
    kept = _tried("config.json", lambda: DynamicCache(config=model.config.get_text_config(decoder=True)))

    def first_token() -> None:
        with torch.inference_mode():
            model(torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=True, **with_cache(model, kept))

    _tried("a first token", first_token)
    return shapes_of(kept, latent=has_latents(model))


def _dtype(wanted: str, configuration: Any) -> torch.dtype:
    name = dtype_name(getattr(configuration, "dtype", None) or torch.float32) if wanted == "auto" else wanted
    if name not in _DTYPES:
        raise ConfigError(f"dtype: {name}, only {', '.join(_DTYPES)} are served")
    return getattr(torch, name)


def _name(directory: Path) -> str:
    """The directory's name; in a cache of the Hugging Face hub, the model's."""
    whole = directory.resolve()
    if whole.parent.name == "snapshots":
        return whole.parent.parent.name.removeprefix("models--").replace("--", "/")[-90:]
    return whole.name[-90:]


def _context(text: Any) -> int:
    """Tokens that the model has positions for; 0 where its configuration has no such number."""
    lengths = [getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    return min([length for length in lengths if length], default=0)


def _top(text: Any) -> int:
    """Tokens that a sparse index picks for a step; 0 where the configuration has no such number."""
    top = getattr(text, "index_topk", None)
    return top if isinstance(top, int) and top > 0 else 0


def _eos(directory: Path, text: Any) -> frozenset[int]:
    """Every id that ends a request. One beyond the vocabulary ends none. Raises ConfigError for what is not an id."""
    ids = getattr(text, "eos_token_id", None)
    if (directory / "generation_config.json").is_file():
        generation = _tried("generation_config.json", lambda: GenerationConfig.from_pretrained(directory))
        ids = ids if generation.eos_token_id is None else generation.eos_token_id
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if strange := [token_id for token_id in ids if type(token_id) is not int]:
        raise ConfigError(f"eos_token_id: {strange[0]!r} is not an id")
    if beyond := [token_id for token_id in ids if not 0 <= token_id < text.vocab_size]:
        log.warning("eos_token_id: %s: not within [0, %d), so it ends no request", beyond, text.vocab_size)
    return frozenset(ids) - frozenset(beyond)


def _digest(model: Any, text: Any, dtype: torch.dtype) -> bytes:
    """Of the configuration, and of some numbers out of each tensor: models that differ in one tensor differ in most."""
    digest = sha256(weights_digest(model_facts(text.to_dict(), dtype=dtype, cache=dtype, quantization=None)))
    state: dict[str, Tensor] = model.state_dict()
    for name, tensor in sorted(state.items()):
        numbers = tensor.detach().flatten()
        sampled = numbers[:: max(1, len(numbers) // _SAMPLES)].contiguous().view(torch.uint8)
        digest.update(f"{name}{tuple(tensor.shape)}".encode() + sampled.cpu().numpy().tobytes())
    return digest.digest()
