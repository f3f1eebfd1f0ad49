"""The drafter of a vLLM engine: a model, or layers of one, whose KV is transferred with the model's."""

# pyright: basic

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..kit.facts import config_digest

_WITHOUT_KV = {"ngram", "ngram_gpu", "suffix", "medusa"}  # methods of speculation


@dataclass(frozen=True, slots=True)
class KVLayers:
    """The layers of a model, all ranks together."""

    count: int
    heads: int  # of keys and values, in each
    size: int  # numbers of a head
    latent: bool = False  # one for all heads

    @property
    def planes_max(self) -> int:
        """Its planes by tokens where keys lie number by number, wherever they lie."""
        return self.count * (1 if self.latent else self.heads * (self.size + 1))


def speculation(vllm_config: Any) -> dict[str, str]:
    """The fact of a drafter; none where drafts need no KV."""
    if (speculative := _drafting(vllm_config)) is None:
        return {}
    drafter = getattr(speculative, "draft_model_config", None)
    config = drafter.hf_config.to_dict() if drafter is not None else {}
    return {"speculation": f"{speculative.method} {config_digest(config)}"}


def layers_with_kv(vllm_config: Any) -> list[KVLayers]:
    """Of the model, and of its drafter, which the last stage alone has."""
    models = [vllm_config.model_config]
    if (drafter := getattr(_drafting(vllm_config), "draft_model_config", None)) is not None:
        models.append(drafter)
    return [
        KVLayers(
            model.get_total_num_hidden_layers(), model.get_total_num_kv_heads(), model.get_head_size(), model.use_mla
        )
        for model in models
    ]


def drafter_layers(vllm_config: Any, names: Iterable[str]) -> set[str]:
    """Those of a drafter, by vLLM's names: it counts on behind the model's layers, or writes what the drafter is. One
    step computes them once for each token that it drafts."""
    model, *drafters = layers_with_kv(vllm_config)

    def is_of_drafter(name: str) -> bool:
        parts = name.split(".")
        numbers = [int(part) for part in parts if part.isdigit()]
        return not {"draft_model", "mtp"}.isdisjoint(parts) or (bool(numbers) and numbers[0] >= model.count)

    return {name for name in names if drafters and is_of_drafter(name)}


def _drafting(vllm_config: Any) -> Any:
    """How vLLM speculates; None where drafts need no KV."""
    speculative = vllm_config.speculative_config
    return None if speculative is None or speculative.method in _WITHOUT_KV else speculative
