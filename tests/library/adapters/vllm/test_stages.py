"""Workers of pipeline stages on either side: each has the layers of its stage, and a request needs all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.adapters.kit.kinds import Heads
from pdtransfer.adapters.vllm.orders import Open, Orders
from pdtransfer.adapters.vllm.pools import Pools
from pdtransfer.wire import Ranks
from tests.library.adapters.vllm.vllm_ranks import World, arena_cache, chunk, pools_of, world

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 5, 16, 2, 8, 8
PROMPT, SOURCE, TARGET = 40, [7, 3, 5, 1, 2], [4, 9, 2, 8, 6]


def described(cache: np.ndarray, base: int, first_layer: int, ranks: Ranks) -> Pools:
    """Of a stage's cache, float32 (layers, blocks, heads, tokens, width), whose layers begin with this one."""
    names = [f"model.layers.{first_layer + index}.attn" for index in range(len(cache))]
    views = dict(zip(names, torch.from_numpy(cache), strict=True))
    return pools_of(views, blocks=BLOCKS, tokens=TOKENS, heads=Heads(HEADS, ranks), base=base)


@contextmanager
def engines(prefill_stages: int, decode_stages: int) -> Iterator[tuple[World, np.ndarray]]:
    """Engines of these stages, each with the part of prefill's cache that it has."""

    def parts(count: int) -> list[tuple[Ranks, slice]]:
        edges = [stage * LAYERS // count for stage in range(count + 1)]
        return [(Ranks(0, 1, stage, count), slice(*edges[stage : stage + 2])) for stage in range(count)]

    cache = np.random.default_rng(1).random((LAYERS, BLOCKS, HEADS, TOKENS, WIDTH), np.float32)
    with world() as made:
        for ranks, layers in parts(prefill_stages):
            part = cache[layers]
            made.add_prefill(part, described(part, part.ctypes.data, layers.start, ranks), part.ctypes.data, ranks)
        for ranks, layers in parts(decode_stages):
            arena, part = arena_cache(cache[layers].shape)
            made.add_decode(part, described(part, arena.mapping.address, layers.start, ranks), arena, ranks)
        yield made, cache


def landed(both: World) -> np.ndarray:
    """What all stages of decode have together."""
    return np.concatenate([rank.cache for rank in both.decode])


@pytest.mark.parametrize(("prefill_stages", "decode_stages"), [(1, 2), (2, 2), (3, 2), (2, 3), (2, 1)])
def test_each_stage_of_decode_receives_its_layers(prefill_stages: int, decode_stages: int) -> None:
    with engines(prefill_stages, decode_stages) as (both, cache):
        both.receive("r", "r", PROMPT, TARGET)
        both.send("r", "r", PROMPT, SOURCE)
        both.until_received("r")
        assert np.array_equal(landed(both)[:, TARGET], cache[:, SOURCE])
        assert not np.delete(landed(both), TARGET, axis=1).any()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_request_that_one_stage_gives_up_fails_on_all_and_alone(stage: int) -> None:
    with engines(2, 2) as (both, cache):
        both.receive("gone", "gone", PROMPT, TARGET)
        both.step(Orders(opens=[Open("gone", "gone", PROMPT)]))
        # As where its room fails there: the other stage has not been told, and learns it of prefill.
        both.decode[stage].begin(aborts=["gone"])
        both.until(lambda: all(rank.figures["rooms"].get("failed") for rank in both.prefill))
        both.step(Orders(chunks=[chunk("gone", SOURCE)]))
        both.until(lambda: all("gone" in rank.seen.received for rank in both.decode))
        assert both.decode[1 - stage].seen.failed == {"gone"}
        both.receive("next", "next", PROMPT, TARGET)
        both.send("next", "next", PROMPT, SOURCE)
        both.until(lambda: all("next" in rank.seen.received for rank in both.decode))
        assert not any("next" in rank.seen.failed for rank in both.decode)
        assert np.array_equal(landed(both)[:, TARGET], cache[:, SOURCE])
