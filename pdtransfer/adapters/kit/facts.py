"""What peers of any engine compare: the model that a KV cache is of, and how its numbers are stored.

Layouts are compared when a session begins. These facts are what no layout shows: that the same token has the same
numbers in both caches. An engine logs them at its start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ...wire import Identity

_SHAPE = (  # of a model's configuration: what makes its keys and values
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "rms_norm_eps", "layer_norm_eps", "attention_bias", "sliding_window",
    "n_routed_experts", "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip
_LATENT = "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
OF_MODEL = frozenset({*_SHAPE, *_LATENT, "head_dim", "config"})  # facts that follow from the model's configuration
_SHOWN = {"cache": "kv_dtype", "cache_dtype": "kv_cache_dtype", "attention": "attention_backend"}
_OF_THE_HOST = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}  # of a model's configuration
_ROPE = "rope_parameters", "rope_scaling"  # by newer and by older configurations


def model_facts(config: Mapping[str, Any], *, dtype: object, cache: object, quantization: object) -> dict[str, Any]:
    """The facts of a model for weights_digest, alike in all engines.

    `config` is that of the text model, as transformers' `to_dict` has it. `dtype` is that of the weights, `cache` that
    of the KV cache, and both may be torch's. What engines add to a configuration of their own is not in it.
    """
    facts = {name: config[name] for name in _SHAPE if config.get(name) is not None}
    # Engines write sizes of heads into the configurations of models that have no use for them.
    if config.get("kv_lora_rank") is not None:
        facts |= {name: config[name] for name in _LATENT if config.get(name) is not None}
    elif config.get("head_dim") or "num_attention_heads" in facts:
        facts["head_dim"] = config.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
    facts["rope"] = _rope(config)
    return {
        "model": facts,
        "dtype": dtype_name(dtype),
        "cache": dtype_name(cache),
        "quantization": None if quantization is None else str(quantization),
    }


def named_facts(facts: Mapping[str, Any], **others: object) -> dict[str, str]:
    """Facts as peers show them where they differ: by the name of each number, and by what users call it. `others` stand
    behind them, whether they are digested or not."""
    named: dict[str, str] = {}
    _flatten({name: value for name, value in facts.items() if name not in others} | others, "", named)
    return {_SHOWN.get(name, name): value for name, value in named.items()}


def _flatten(facts: Mapping[str, Any], prefix: str, named: dict[str, str]) -> None:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            _flatten(value, "" if name == "model" else f"{prefix}{name}.", named)  # pyright: ignore[reportUnknownArgumentType]
        else:
            named[prefix + name] = value if isinstance(value, str) else json.dumps(value, default=str)


def config_digest(config: Mapping[str, Any]) -> str:
    """Of a model's configuration, without what a host adds to it, in configurations within it as well."""
    text = json.dumps(_without_host(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_host(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_host(value) if isinstance(value, Mapping) else value  # pyright: ignore[reportUnknownArgumentType]
        for key, value in config.items()
        if key not in _OF_THE_HOST
    }


def model_name(name: str, cache: object) -> str:
    """The model as peers compare it: its name, and how its cache is stored."""
    return f"{name[-90:]} (KV {dtype_name(cache)})"


def dtype_name(dtype: object) -> str:
    """As torch prints it, without torch's own name."""
    return str(dtype).removeprefix("torch.")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """How positions turn keys; for models of several kinds of layers, that of each kind."""
    rope: dict[str, Any] = {}
    if config.get("rope_theta") is not None:
        rope["rope_theta"] = config["rope_theta"]
    for name in _ROPE:
        given: Mapping[str, Any] = config.get(name) or {}
        rope |= {key: value for key, value in given.items() if value is not None}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    return rope


DIGITS = 8  # of the digest: two engines whose line has the same ones fit
_USUAL = "", "0", "null", "None", "auto"


def first_line(identity: Identity, where: str, *, both: bool = False) -> str:
    """One line. `where` is what the engine does with KV. The facts of the model's configuration are many: the digest
    stands for them, and `pdtransfer doctor` lists them."""
    facts = {fact.name: fact.value for fact in identity.facts}
    settings = "".join(f"{name}={_word(value)} " for name, value in facts.items() if _is_shown(name, value))
    role = "prefill and decode" if both else identity.role
    digest = identity.weights.hex()[:DIGITS]
    return f"pdtransfer {role}: {where}; model={_word(identity.model)} {settings}facts={digest}"


def _is_shown(name: str, value: str) -> bool:
    return name not in OF_MODEL | {"engine"} and not name.startswith("rope.") and value not in _USUAL


def _word(value: str) -> str:
    return value if value.isprintable() and value and not set(value) & set(" ='\"") else repr(value)
