"""Workers of pipeline stages on either side: each has the layers of its stage, and a request needs all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer import ArenaMemory, DecodeClient, NodeSettings, PrefillClient, WriterOptions, room_id
from pdtransfer.adapters.kit.kinds import Heads
from pdtransfer.adapters.vllm import figures
from pdtransfer.adapters.vllm.kinds import PAGED
from pdtransfer.adapters.vllm.orders import Chunk, KVGroup, Open, Orders, Receive, Rows
from pdtransfer.adapters.vllm.pools import Pools, pools
from pdtransfer.adapters.vllm.worker import WorkerSide
from pdtransfer.wire import Ranks
from tests.support.client_pair import LIMITS
from tests.support.waiting import wait_for

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 5, 16, 2, 8, 8
PROMPT, SOURCE, TARGET = 40, [7, 3, 5, 1, 2], [4, 9, 2, 8, 6]


def described(cache: np.ndarray, base: int, first_layer: int, ranks: Ranks) -> Pools:
    """Of a stage's cache, float32 (layers, blocks, heads, tokens, width), whose layers begin with this one."""
    names = [f"model.layers.{first_layer + index}.attn" for index in range(len(cache))]
    views = dict(zip(names, torch.from_numpy(cache), strict=True))
    return pools(
        views, [(KVGroup(0, PAGED.of(TOKENS)), names)], blocks=BLOCKS, locate=lambda _: (base, "dram"),
        heads=Heads(HEADS, ranks),
    )  # fmt: skip


def settings(name: str, ranks: Ranks) -> NodeSettings:
    return NodeSettings(node=f"{name}{ranks.pp_rank}", model="m", weights=b"w", limits=LIMITS, ranks=ranks)


@dataclass
class Engines:
    """Prefill's stages and decode's, each with the part of the cache that it has."""

    cache: np.ndarray
    prefill: list[WorkerSide] = field(default_factory=list[WorkerSide])
    sources: list[str] = field(default_factory=list[str])
    decode: list[WorkerSide] = field(default_factory=list[WorkerSide])
    targets: list[np.ndarray] = field(default_factory=list[np.ndarray])
    received: list[set[str]] = field(default_factory=list[set[str]])
    failed: list[set[str]] = field(default_factory=list[set[str]])

    def receive(self, name: str) -> None:
        order = Receive(name, room_id(name), tuple(self.sources), PROMPT, 0, (tuple(TARGET),))
        for stage in self.decode:
            stage.begin(Orders(receives=[order]))

    def open(self, name: str) -> None:
        for stage in self.prefill:
            stage.begin(Orders(opens=[Open(name, name, PROMPT)]))
            stage.end(lambda: None)

    def push(self, name: str) -> None:
        chunk = Chunk(name, (Rows(0, 0, len(SOURCE), tuple(SOURCE)),), last=True)
        for stage in self.prefill:
            stage.begin(Orders(chunks=[chunk]))
            stage.end(lambda: None)

    def send(self, name: str) -> None:
        self.open(name)
        self.push(name)

    def until_prefill_fails(self) -> None:
        """Waits until each of prefill's stages has counted a room that failed."""
        failed = [0] * len(self.prefill)

        def polled() -> bool:
            for index, stage in enumerate(self.prefill):
                stage.results(())
                failed[index] += (stage.take_figures() or figures.empty())["rooms"].get("failed", 0)
            return all(failed)

        wait_for(polled)

    def until_all(self, sets: list[set[str]], name: str) -> None:
        """Waits until each of decode's stages has reported this request."""

        def polled() -> bool:
            for stage in self.prefill:
                stage.results(())
            for index, stage in enumerate(self.decode):
                results = stage.results(())
                self.received[index] |= results.received
                self.failed[index] |= results.failed
            return all(name in reported for reported in sets)

        wait_for(polled)


@contextmanager
def engines(prefill_stages: int, decode_stages: int) -> Iterator[Engines]:
    def parts(count: int) -> list[tuple[Ranks, slice]]:
        edges = [stage * LAYERS // count for stage in range(count + 1)]
        return [(Ranks(0, 1, stage, count), slice(*edges[stage : stage + 2])) for stage in range(count)]

    cache = np.random.default_rng(1).random((LAYERS, BLOCKS, HEADS, TOKENS, WIDTH), np.float32)
    made = Engines(cache)
    with ExitStack() as stack:
        for ranks, layers in parts(prefill_stages):
            base = cache[layers].ctypes.data
            components = described(cache[layers], base, layers.start, ranks)
            client = PrefillClient(settings("p", ranks), components.components, writer=WriterOptions(pool_address=base))
            stack.enter_context(client)
            made.prefill.append(WorkerSide(pools=components, prefill=client, decode=None, time_left_s=60))
            made.sources.append(client.endpoint)
        for ranks, layers in parts(decode_stages):
            shape: Any = cache[layers].shape
            arena = ArenaMemory.create(cache[layers].nbytes)
            target = np.frombuffer(arena.mapping.view, np.float32, int(np.prod(shape))).reshape(shape)
            components = described(target, arena.mapping.address, layers.start, ranks)
            client = DecodeClient(
                settings("d", ranks), components.components, arena, engine_slots=True, prefix_cache=False, verify=True
            )
            stack.enter_context(client)
            made.decode.append(WorkerSide(pools=components, prefill=None, decode=client, time_left_s=60))
            made.targets.append(target)
            made.received.append(set())
            made.failed.append(set())
        yield made


@pytest.mark.parametrize(("prefill_stages", "decode_stages"), [(1, 2), (2, 2), (3, 2), (2, 3), (2, 1)])
def test_each_stage_of_decode_receives_its_layers(prefill_stages: int, decode_stages: int) -> None:
    with engines(prefill_stages, decode_stages) as both:
        both.receive("r")
        both.send("r")
        both.until_all(both.received, "r")
        assert not any(both.failed)
        landed = np.concatenate(both.targets)
        assert np.array_equal(landed[:, TARGET], both.cache[:, SOURCE])
        untouched = sorted(set(range(BLOCKS)) - set(TARGET))
        assert not landed[:, untouched].any()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_request_that_one_stage_gives_up_fails_on_all_and_alone(stage: int) -> None:
    with engines(2, 2) as both:
        both.receive("gone")
        both.open("gone")
        # As where its room fails there: the other stage has not been told, and learns it of prefill.
        both.decode[stage].begin(Orders(aborts=["gone"]))
        both.until_prefill_fails()
        both.push("gone")
        both.until_all(both.received, "gone")
        assert both.failed[1 - stage] == {"gone"}
        both.receive("next")
        both.send("next")
        both.until_all(both.received, "next")
        assert "next" not in both.failed[0] | both.failed[1]
        assert np.array_equal(np.concatenate(both.targets)[:, TARGET], both.cache[:, SOURCE])
