"""The pools of a hybrid model as the reference engine fills and reads them: options, description, rows and their bytes.

There is no attention here. A row's bytes follow from its place in the model and from all tokens up to its last one. A
step reads rows of every component out of the pool, and its logits follow from the bytes that it found. So an answer is
that of a single process only where every component's rows are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
from msgspec import Meta, Struct
from numpy.typing import NDArray
from torch import Tensor

from pdtransfer.errors import ConfigError, LocalProtocolError
from pdtransfer.kernels.stream import Download, upload
from pdtransfer.layout.deepseek_v4 import PAGE_TOKENS, WINDOW_TOKENS, deepseek_v4
from pdtransfer.layout.geometry import Int64s
from pdtransfer.layout.layout import Component
from pdtransfer.limits import TOKENS_MAX
from pdtransfer.serve.engine_api import EngineConfig, EngineDescription

from .architecture import DIGEST_BYTES, NamedOptions
from .description import check_config, device_of
from .tokens import VOCABULARY

_PICKS = 32  # compressed rows of a component that a step reads, besides the last one
_DIGEST_ROWS = 256  # rows read at once: a digest does not copy a whole request
_FACTOR, _ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_LETTERS = range(97, 123)  # what answers are made of, so that a person can read them

Stamps = NDArray[np.uint64]
Slots = Mapping[str, Int64s]


class HybridOptions(NamedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the engine that has hybrid pools instead of the reference model's."""

    pools: Literal["deepseek_v4"]
    ratios: Annotated[str, Meta(pattern=r"^\d+(,\d+)*$", max_length=512)] = "0,4,128,4"  # of each layer: 0, 4 or 128
    requests: Annotated[int, Meta(ge=1, le=4_096)] = 64  # that have a window and states
    page_tokens: Annotated[int, Meta(ge=1, le=65_536)] = PAGE_TOKENS  # whatever --page-size says; 1: single rows
    window_tokens: Annotated[int, Meta(ge=1, le=65_536)] = WINDOW_TOKENS
    index_memory: Literal["dram", "hbm"] = "dram"  # of decode


def describe_hybrid(config: EngineConfig, options: HybridOptions) -> EngineDescription:
    """Describes the engine. Raises ConfigError for settings that make no pools."""
    check_config(config)
    if config.hisparse is not None:
        raise ConfigError(f"pools = {options.pools}: they are decoded from the arena; enable_hisparse is not for them")
    ranks = config.group.ranks
    if ranks.tp_size * ranks.pp_size > 1:
        raise ConfigError(f"tp_size = {ranks.tp_size}, pp_size = {ranks.pp_size}: one process has the hybrid pools")
    single = options.page_tokens == 1
    try:
        components = deepseek_v4(
            config.host_layout, ratios=[int(each) for each in options.ratios.split(",")], tokens=config.slots,
            requests=options.requests, page_tokens=options.page_tokens, page_align=8 if single else 576,
            window_tokens=options.window_tokens, window_page_size=1 if single else 64,
            index_memory=options.index_memory if config.role == "decode" else "dram",
        )  # fmt: skip
    except (LocalProtocolError, ValueError) as error:
        raise ConfigError(f"pools = {options.pools}, host_layout = {config.host_layout}: {error}") from None
    ends = {memory: [each.layout.end for each in components if each.memory == memory] for memory in ("dram", "hbm")}
    weights = blake2b(f"{options.seed};{options.ratios};{options.window_tokens}".encode(), digest_size=DIGEST_BYTES)
    return EngineDescription(
        model=f"reference-{options.pools}", weights=weights.digest(), components=components,
        memory_bytes=max(ends["dram"]), hbm_bytes=max(ends["hbm"], default=0), eos=options.eos,
        context_tokens=config.context_tokens(options.context_tokens),
    )  # fmt: skip


class HybridHandoff(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The data that decode needs besides the rows: a room's aux, with the digest of each component's rows."""

    format: Literal["hybrid/1"]
    prompt_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    first_token: Annotated[int, Meta(ge=0, lt=VOCABULARY)]
    logits_digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    digests: Annotated[dict[str, bytes], Meta(max_length=16)]

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, aux: bytes, prompt_tokens: int) -> HybridHandoff:
        """Raises ValueError unless it is that of a prompt of this length."""
        try:
            handoff = msgspec.msgpack.decode(aux, type=cls)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"aux of {len(aux)} bytes: {error}") from None
        if handoff.prompt_tokens != prompt_tokens:
            raise ValueError(f"aux: for a prompt of {handoff.prompt_tokens} tokens, the room's has {prompt_tokens}")
        return handoff


def stamps_of(ids: NDArray[np.int64]) -> Stamps:
    """uint64 (n,): a hash of each token and of all before it."""
    factors = np.cumprod(np.full(len(ids), _FACTOR))
    sums = np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * factors)
    return (sums ^ (sums >> np.uint64(31))) * _ODD


def last_tokens(component: Component, tokens: int) -> Int64s:
    """The last token of each row of this many tokens, in the order of the rows' tokens."""
    rows = component.rows(tokens)
    match component.span.kind:
        case "all":
            return np.minimum(np.arange(1, rows + 1) * component.tokens_per_row, tokens) - 1
        case "last":
            return np.arange(tokens - rows, tokens)
        case "once":
            return np.array([tokens - 1])


def row_of(component: Component, position: int, prompt_tokens: int) -> int:
    """The row that has this token. A window is a ring whose row 0 is the first token that the prompt left in it."""
    match component.span.kind:
        case "all":
            return position // component.tokens_per_row
        case "last":
            return (position - max(0, prompt_tokens - component.span.tokens)) % component.span.tokens
        case "once":
            return 0


class HybridRows:
    """The rows of a pool, or of an arena's memories, as int32 views of a flat tensor of each memory."""

    def __init__(self, memories: Mapping[str, Tensor], components: tuple[Component, ...], seed: int) -> None:
        self.components = components
        self._planes = {
            each.name: _views(memories[each.memory], each, [seed, at]) for at, each in enumerate(components)
        }
        self._page_size = {each.name: each.layout.page_size for each in components}

    def write(self, name: str, slots: Int64s, stamps: Stamps) -> None:
        """Writes the rows of tokens with these stamps to slots, in every plane."""
        mixed = (stamps & np.uint64(0x7FFFFFFF)).astype(np.int32)
        pages, rows = np.divmod(slots, self._page_size[name])
        for view, pattern in self._planes[name]:
            at = _there(pages, view), _there(rows, view)
            view[at] = pattern[None] ^ _there(mixed, view)[:, None]

    def read(self, name: str, slots: Int64s) -> list[NDArray[np.int32]]:
        """The rows' words in each plane, int32 (n, words); the planes by layer and kind, whatever the layout."""
        pages, rows = np.divmod(slots, self._page_size[name])
        found = [view[_there(pages, view), _there(rows, view)] for view, _ in self._planes[name]]
        downloads = [Download(each) if isinstance(each, Tensor) else each for each in found]
        return [each.get().numpy() if isinstance(each, Download) else each for each in downloads]

    def digest(self, component: Component, slots: Int64s, tokens: int, prompt_tokens: int) -> bytes:
        """Of the bytes of every row that this many tokens have, in their order."""
        digest = blake2b(digest_size=DIGEST_BYTES)
        order = [row_of(component, int(at), prompt_tokens) for at in last_tokens(component, tokens)]
        for first in range(0, len(order), _DIGEST_ROWS):
            for plane in self.read(component.name, slots[order[first : first + _DIGEST_ROWS]]):
                digest.update(np.ascontiguousarray(plane).data)
        return digest.digest()

    def logits(self, slots: Slots, ids: NDArray[np.int64], prompt_tokens: int) -> NDArray[np.float32]:
        """Logits (vocabulary,) by the bytes of rows of these tokens: windows and states whole, some of the rest."""
        digest, tokens, last = blake2b(digest_size=32), len(ids), int(stamps_of(ids)[-1])
        for each in self.components:
            own = np.array([row_of(each, int(at), prompt_tokens) for at in last_tokens(each, tokens)])
            if each.span.kind == "all" and len(own) > _PICKS:
                drawn = np.random.Generator(np.random.PCG64([last, each.tokens_per_row])).integers(0, len(own), _PICKS)
                own = np.append(own[drawn], own[-1])
            for plane in self.read(each.name, slots[each.name][own]):
                digest.update(np.ascontiguousarray(plane).data)
        logits = np.full(VOCABULARY, -1e3, np.float32)
        seed = int.from_bytes(digest.digest(), "little")
        drawn = np.random.Generator(np.random.PCG64(seed)).standard_normal(len(_LETTERS), dtype=np.float32)
        logits[_LETTERS.start : _LETTERS.stop] = drawn
        return logits


def _there(array: NDArray[Any], view: Any) -> Any:
    """The array where the view is: torch is slow where rows of memory are picked by the CPU."""
    return upload(torch.as_tensor(array), view.device) if isinstance(view, Tensor) else array


def _views(flat: Tensor, component: Component, seed: list[int]) -> list[tuple[Any, Any]]:
    """Each plane as (pages, page_size, words), and a pattern (words,) of its own; by layer and kind. Both are tensors
    on a GPU, otherwise arrays."""
    layout = component.layout
    made: list[tuple[Any, Any]] = []
    for at, plane in enumerate(sorted(layout.planes, key=lambda plane: (plane.layer, plane.kind))):
        assert not any(number % 4 for number in (plane.base, plane.page_stride, plane.row_stride, plane.row_bytes))
        sizes = layout.slots // layout.page_size, layout.page_size, plane.row_bytes // 4
        view = flat.as_strided(sizes, (plane.page_stride // 4, plane.row_stride // 4, 1), plane.base // 4)
        drawn = np.random.Generator(np.random.PCG64([*seed, at])).integers(0, 1 << 31, sizes[2], np.int32)
        made.append((view, torch.as_tensor(drawn, device=flat.device)) if flat.is_cuda else (view.numpy(), drawn))
    return made


def flat_words(byte_count: int, device: str) -> Tensor:
    """A pool in a GPU's memory, as int32."""
    return torch.zeros(-(-byte_count // 4), dtype=torch.int32, device=device_of(device))
