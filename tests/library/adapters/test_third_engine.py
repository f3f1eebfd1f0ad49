"""An engine that nobody knows, with an adapter made of the kit alone: one kind of KV, one rank."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer import DecodeClient, PrefillClient, RoomDrained, RoomFailed
from pdtransfer.adapters.kit.cache_memory import CacheMemory, Extent
from pdtransfer.adapters.kit.ends import FailuresInARow, Quiescence
from pdtransfer.adapters.kit.facts import model_facts, named_facts
from pdtransfer.adapters.kit.kinds import CacheKind
from pdtransfer.adapters.kit.rank import Rank
from pdtransfer.adapters.kit.settings import Settings
from pdtransfer.layout.layout_builders import strided_layout
from pdtransfer.wire import Ranks
from tests.library.adapters.warnings_in_a_row import in_a_row
from tests.support.waiting import wait_for

LAYERS, SLOTS, WIDTH = 3, 64, 8


class Engine:
    """Its cache is float32 (layers, slots, width), in pages of this many tokens that its scheduler hands out."""

    def __init__(self, name: str, page_size: int, **model: Any) -> None:
        memory, self.failures = CacheMemory([LAYERS * SLOTS * WIDTH * 4]), FailuresInARow()
        with memory.pooled():
            self.cache = torch.zeros(LAYERS, SLOTS, WIDTH)
        first, self.kind = self.cache.data_ptr(), CacheKind("token", "exact", "heads").of(page_size)
        facts = model_facts({"num_hidden_layers": LAYERS} | model, dtype="float32", cache="float32", quantization=None)
        self.rank = Rank(
            settings=Settings.of({"time_left_s": 20, "verify": True}, "options"), name=name, number=0, ranks=Ranks(),
            model="tiny", facts=facts, shown=named_facts(facts), memory=memory,
            extent=Extent(first, first + self.cache.nbytes),
        )  # fmt: skip
        views = {(layer, "latent"): self.cache[layer] for layer in range(LAYERS)}
        planes = strided_layout(views, axes=("row",), origin=memory.base(self.rank.extent)).planes
        self.component = self.kind.component("kv", "dram", planes, SLOTS)

    def slots(self, draw: np.random.Generator, tokens: int) -> np.ndarray:
        return self.kind.slots(draw.permutation(SLOTS // self.kind.page_size), tokens)

    def ended(self, client: PrefillClient | DecodeClient) -> bool:
        """Whether the one room of this client is over."""
        events = list(client.poll())
        for failed in (event for event in events if isinstance(event, RoomFailed)):
            self.failures.failed(failed.cause, failed.detail)
        return any(isinstance(event, RoomDrained) for event in events)


def handed_over(sender: Engine, receiver: Engine, tokens: int, rooms: int) -> tuple[np.ndarray, np.ndarray]:
    """What each has of the prompt of the last of these rooms."""
    draw, target = np.random.default_rng(tokens), receiver.rank.memory.target(receiver.rank.extent)
    prefill, endpoint = sender.rank.prefill([sender.component], {})
    with closing(prefill), closing(receiver.rank.decode([receiver.component], target)) as decode:
        for room in range(1, rooms + 1):
            sent, received = sender.slots(draw, tokens), receiver.slots(draw, tokens)
            decode.expect(room, tokens=tokens, sources=[endpoint], slots={"kv": received}, time_left_s=20)
            prefill.open(room, tokens=tokens, time_left_s=20)
            sender.cache[:, sent] = torch.from_numpy(draw.random((LAYERS, tokens, WIDTH), np.float32))
            prefill.push(room, sent, rows=(0, tokens))
            prefill.finish(room)
            wait_for(lambda: receiver.ended(decode))
            Quiescence(prefill, time.monotonic).wait([(room, "a request")])
    return sender.cache[:, sent].numpy(), receiver.cache[:, received].numpy()


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 40])
def test_two_of_it_hand_over_between_pages_of_unequal_sizes(tokens: int) -> None:
    sent, landed = handed_over(Engine("one", 16), Engine("two", 4), tokens, rooms=2)
    assert sent.any()
    assert np.array_equal(sent, landed)


def test_another_model_is_refused_by_the_fact_that_differs(caplog: pytest.LogCaptureFixture) -> None:
    _, landed = handed_over(Engine("one", 4), Engine("two", 4, vocab_size=7), 9, rooms=5)
    assert not landed.any()
    [warning] = in_a_row(caplog)
    assert "vocab_size" in warning
