"""A drafter whose layers have other KV heads than its model's: each rank of decode gets those that it has."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer import ArenaMemory
from pdtransfer.adapters.kit.kinds import Heads
from pdtransfer.adapters.vllm.pools import Pools
from pdtransfer.wire import Ranks
from tests.library.adapters.vllm.vllm_ranks import pools_of, world
from tests.support.covered import check_covered

BLOCKS, TOKENS, MODEL, PROMPT = 8, 4, 8, 12
SOURCE, TARGET = [5, 1, 3], [2, 7, 4]
TP_SIZES = [(8, 4), (4, 8), (8, 2), (4, 2), (2, 4), (1, 8), (2, 1), (8, 8)]


class Rank:
    """One rank's cache: a layer of a model of eight heads, or of one latent, and two of a drafter."""

    def __init__(
        self, tp_rank: int, tp_size: int, raw: np.ndarray | None = None, *, latent: bool, drafter: int, size: int,
        rows: str,
    ) -> None:  # fmt: skip
        totals = {"model.layers.0.attn": (1, 12) if latent else (MODEL, 8)}
        totals |= dict.fromkeys(("model.layers.1.attn", "draft_model.layers.0.attn"), (drafter, 2 * size))
        self.heads: dict[str, range] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (total, width) in totals.items():
            count, first = max(1, total // tp_size), tp_rank * total // tp_size
            self.heads[name], shapes[name] = range(first, first + count), (BLOCKS, count, TOKENS, width)
        ends = np.cumsum([0, *[4 * int(np.prod(shape)) for shape in shapes.values()]]).tolist()
        raw = np.zeros(ends[-1], np.uint8) if raw is None else raw
        self.views = {
            name: raw[first:end].view(np.float32).reshape(shape)
            for (name, shape), (first, end) in zip(shapes.items(), pairwise(ends), strict=True)
        }
        base = raw.ctypes.data
        views = {name: torch.from_numpy(view) for name, view in self.views.items()}
        kinds = {name: tokens_of(view, latent and name.startswith("model.layers.0")) for name, view in views.items()}
        model = Heads(1 if latent else MODEL, Ranks(tp_rank, tp_size), 4)

        def described(**more: Any) -> Pools:
            of_drafter = dict.fromkeys(list(views)[1:], drafter)
            return pools_of(views, blocks=BLOCKS, tokens=TOKENS, heads=model, base=base, totals=of_drafter, **more)

        match rows:
            case "blocks":
                self.pools = described()
            case "tokens":
                self.pools = described(kinds=kinds)
            case fact:
                self.pools = described().or_tokens(described(kinds=kinds), fact)

    def fill(self) -> None:
        """Each number has its layer, head, block, token and place."""
        for index, (name, view) in enumerate(self.views.items()):
            for place, head in enumerate(self.heads[name]):
                view[:, place] = numbers(index, head, view.shape[3])

    def has_landed(self) -> bool:
        return all(
            np.array_equal(view[TARGET, place], numbers(index, head, view.shape[3])[SOURCE])
            for index, (name, view) in enumerate(self.views.items())
            for place, head in enumerate(self.heads[name])
        )


def tokens_of(view: torch.Tensor, latent: bool) -> dict[str, torch.Tensor]:
    by_token = view.transpose(1, 2)
    size = view.shape[3] // 2
    return {"latent": by_token} if latent else {"k": by_token[..., :size], "v": by_token[..., size:]}


def numbers(layer: int, head: int, width: int) -> np.ndarray:
    """(blocks, tokens, width)."""
    of_head = np.arange(BLOCKS * TOKENS * width, dtype=np.float32).reshape(BLOCKS, TOKENS, width)
    return of_head + 100_000 * layer + 10_000 * head


@pytest.mark.parametrize("rows", ["blocks", "tokens", "auto"])
@pytest.mark.parametrize(("latent", "drafter", "size"), [(False, 4, 4), (False, 8, 2), (True, 8, 4), (True, 2, 4)])
@pytest.mark.parametrize(("prefill", "decode"), TP_SIZES)
def test_each_head_of_a_drafter_has_one_sender(
    prefill: int, decode: int, latent: bool, drafter: int, size: int, rows: str
) -> None:
    model: dict[str, Any] = {"latent": latent, "drafter": drafter, "size": size, "rows": rows}
    check_covered(lambda tp_rank, tp_size: Rank(tp_rank, tp_size, **model).pools, prefill, decode)


@pytest.mark.parametrize("rows", ["blocks", "tokens", "auto", "auto, other blocks"])
@pytest.mark.parametrize(
    ("prefill", "decode", "latent", "drafter"),
    [(4, 2, False, 2), (2, 4, False, 2), (4, 4, False, 2), (2, 1, True, 8), (4, 2, True, 2), (1, 4, False, 2)],
)
def test_the_heads_of_a_drafter_land_at_the_ranks_that_have_them(
    prefill: int, decode: int, latent: bool, drafter: int, rows: str
) -> None:
    model: dict[str, Any] = {"latent": latent, "drafter": drafter, "size": 4, "rows": rows}

    with world() as made:
        for tp_rank in range(prefill):
            rank = Rank(tp_rank, prefill, **model)
            rank.fill()
            base = next(iter(rank.views.values())).ctypes.data
            made.add_prefill(rank, rank.pools, base, Ranks(tp_rank, prefill))
        for tp_rank in range(decode):
            arena = ArenaMemory.create(1 << 16)
            rank = Rank(tp_rank, decode, np.frombuffer(arena.mapping.view, np.uint8), **model | {"rows": rows[:6]})
            made.add_decode(rank, rank.pools, arena, Ranks(tp_rank, decode))
        made.receive("r", "r", PROMPT, TARGET)
        made.send("r", "r", PROMPT, SOURCE)
        made.until_received("r")
        assert all(rank.cache.has_landed() for rank in made.decode)


def test_layers_of_which_a_rank_cannot_know_the_heads_are_other_components_at_other_sizes() -> None:
    """One head at each rank, where the configuration has more: whether ranks share it is not known."""

    def name(tp_size: int) -> str:
        views = {"model.layers.0.attn": torch.zeros(BLOCKS, 1, TOKENS, 8)}
        heads = Heads(MODEL, Ranks(1, tp_size))
        [component] = pools_of(views, blocks=BLOCKS, tokens=TOKENS, heads=heads).components
        return component.name

    assert [name(size) for size in (2, 4, 8)] == ["group0-2", "group0-4", "group0"]
