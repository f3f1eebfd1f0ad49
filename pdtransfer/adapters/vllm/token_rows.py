"""vLLM's KV cache by tokens: where the numbers of each token lie in the blocks, as vLLM's own code writes them.

Another engine cannot read these blocks, and the same engine cannot read blocks of another size. Every engine can read
tokens. So vLLM writes a token with known numbers into a block that no request ever gets. This module looks for them
where an attention backend may put them. What is not found cannot be transferred by tokens.

A head of a plane is one number of a model's head here. So keys that lie number by number in a block, as vLLM keeps them
for CPUs, pair with keys that lie side by side in a row.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ...errors import ConfigError
from ...limits import PLANES_MAX
from .drafter import KVLayers

Kinds = dict[str, torch.Tensor]
"""By kind: a view of a layer's KV cache, [pages, tokens, heads, numbers]; a latent one has one head."""


def kinds_of(name: str, layer: Any, view: torch.Tensor) -> Kinds:
    """The tokens in `view`, a layer's KV cache [pages, heads, tokens, width], whose first page nothing is kept in.

    `layer` is vLLM's. Raises ConfigError where its numbers are not found.
    """
    impl = getattr(layer, "impl", None)
    if not hasattr(impl, "do_kv_cache_update") or view.ndim != 4:
        raise ConfigError(f'{name}: {type(impl).__name__} is not known by tokens: set rows to "blocks"')
    tokens = view.shape[2]
    kinds: Kinds | None = None
    for token in sorted({0, tokens // 2, tokens - 1}):
        written = _write(layer, view, token)
        fitting = next(
            (candidate for candidate in _candidates(view, set(written)) if _holds(candidate, written, token)), None
        )
        view[0].zero_()
        if fitting is None or (kinds is not None and not _same(kinds, fitting)):
            raise ConfigError(
                f'{name}: {type(impl).__name__} packs the numbers of a token for this processor or this dtype '
                f'({view.dtype}), so its KV cache cannot be transferred by tokens: set rows to "blocks"'
            )  # fmt: skip
        kinds = fitting
    assert kinds is not None
    return kinds


def planes_of(kinds: Kinds, layers: KVLayers) -> int:
    """The planes of layers that keep their tokens as `kinds` does: one a kind and head, or a number of a head where
    these lie apart. A latent has one head."""
    return layers.count * sum(
        1 if kind == "latent" else layers.heads * (1 if view.stride(3) == 1 else layers.size)
        for kind, view in kinds.items()
    )


def too_many_planes(kinds: Iterable[Kinds], models: Sequence[KVLayers]) -> bool:
    """True if a model and its drafter are more planes together than a component may have. `kinds` are of some of their
    layers. All pipeline stages must decide equally: they count the layer with the most planes for every layer. With a
    drafter, which one stage alone has, they count the most planes that its numbers can make."""
    if len(models) > 1:
        return sum(layers.planes_max for layers in models) > PLANES_MAX
    counts = [sum(planes_of(layer_kinds, layers) for layers in models) for layer_kinds in kinds]
    return max(counts, default=0) > PLANES_MAX


def _write(layer: Any, view: torch.Tensor, token: int) -> Kinds:
    """Has vLLM write this token into the first page; returns what it wrote, by kind [1, heads, numbers]."""
    impl, heads, width = layer.impl, view.shape[1], view.shape[3]
    slot = torch.tensor([token], dtype=torch.int64, device=view.device)

    def numbers(heads: int, count: int, first: int) -> torch.Tensor:
        # Small integers, exact in every dtype of two bytes up to 256, and no two neighbours alike.
        values = 1 + (torch.arange(heads * count) * 7 + first) % 251
        return values.to(view.dtype).to(view.device).view(1, heads, count)

    if (rank := getattr(impl, "kv_lora_rank", None)) is not None:
        latent, rope = numbers(1, rank, 1), numbers(1, width - rank, 5)
        scale = torch.ones(1, device=view.device)
        impl.do_kv_cache_update(latent[0], rope, _own(layer, view), slot, impl.kv_cache_dtype, scale)
        return {"latent": torch.cat([latent, rope], dim=-1)}
    size = getattr(layer, "head_size", width // 2)
    key, value = numbers(heads, size, 1), numbers(heads, width - size, 5)
    impl.do_kv_cache_update(layer, key, value, _own(layer, view), slot)
    return {"k": key, "v": value}


def _own(layer: Any, view: torch.Tensor) -> torch.Tensor:
    """The KV cache as vLLM hands it to this layer."""
    cache = getattr(layer, "kv_cache", view)
    if isinstance(cache, (list, tuple)):
        cache = cache[0]
    return cache if cache.data_ptr() == view.data_ptr() else view


def _candidates(view: torch.Tensor, kinds: set[str]) -> Iterator[Kinds]:
    """Where attention backends put numbers. Each must be a view."""
    pages, heads, tokens, width = view.shape
    if kinds == {"latent"}:
        yield {"latent": view.transpose(1, 2)}
        return
    size = width // 2
    yield {"k": view.transpose(1, 2)[..., :size], "v": view.transpose(1, 2)[..., size:]}
    if view.stride(3) != 1 or view.stride(2) != width:
        return
    # All keys of a head, and then all values; keys number by number.
    flat = view.as_strided((pages, heads, tokens * width), (*view.stride()[:2], 1))
    keys, values = flat[..., : tokens * size], flat[..., tokens * size :]
    rows = values.unflatten(2, (tokens, size)).transpose(1, 2)
    yield {"k": keys.unflatten(2, (size, tokens)).permute(0, 3, 1, 2), "v": rows}
    yield {"k": keys.unflatten(2, (tokens, size)).transpose(1, 2), "v": rows}


def _holds(kinds: Kinds, written: Kinds, token: int) -> bool:
    """True if these views have the token that was written, and nothing else in the first page."""
    for kind, numbers in written.items():
        page = kinds[kind][0]
        if page.shape[1:] != numbers.shape[1:] or not torch.equal(page[token], numbers[0]):
            return False
        if int(page.count_nonzero()) != numbers.numel():
            return False
    return True


def _same(kinds: Kinds, other: Kinds) -> bool:
    return all(
        tensor.data_ptr() == other[kind].data_ptr() and tensor.stride() == other[kind].stride()
        for kind, tensor in kinds.items()
    )
