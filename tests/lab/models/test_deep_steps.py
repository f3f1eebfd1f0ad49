"""Steps of the deep model that are replayed: all that differs between two of a shape is in what the graph reads.

A graph is played here: what was queued while it was captured is done again, with the arrays of then.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from pdtransfer_lab.models import deep_steps
from pdtransfer_lab.models.attention import KEY_BLOCK
from pdtransfer_lab.models.deep import create
from pdtransfer_lab.models.deep_steps import DeepSteps
from pdtransfer_lab.models.steps import PositionTables, reach

from pdtransfer.hisparse.capture import Captures
from pdtransfer.limits import Limits
from pdtransfer.serve.engine_api import HiSparse
from tests.lab.models.deep_model import OPTIONS, TOP, model_of
from tests.support.engine_pair import Decode, Prefill, prompts, request

LENGTHS = (5, 60, 200, 250, 253, 256, 511)  # three of them come to a further block of keys while they are decoded
TOKENS = 12


class Played:
    """A torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.work: Any = None
        self.result = torch.empty(0)
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.result.copy_(self.work())


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Played]:
    """The graphs that were captured."""
    graphs: list[Played] = []
    capturing: list[Played] = []
    queue = DeepSteps._queue

    @contextmanager
    def captured(_: object) -> Generator[Played]:
        capturing.append(Played())
        yield capturing[0]
        graphs.append(capturing.pop())

    def noted(self: DeepSteps, step: Any, inputs: Any) -> torch.Tensor:
        result = queue(self, step, inputs)
        for graph in capturing:
            graph.work, graph.result = lambda: queue(self, step, inputs), result
        return result

    monkeypatch.setattr(deep_steps, "captured", captured)
    monkeypatch.setattr(DeepSteps, "_queue", noted)
    monkeypatch.setattr(Captures, "side_stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(deep_steps, "WORTH", 2)  # for more replays of fewer steps
    return graphs


def outcomes(
    attention: str, *, graphs: bool, sparse: tuple[int, ...] = (), hot: bool = False, batch_max: int = 4
) -> list[Any]:
    """Of rooms of these lengths, the `sparse` ones of which want HiSparse; with `hot` all of them have picks."""
    options = OPTIONS[attention] | (TOP if hot else {})
    limits = Limits(hisparse_wait_steps=2, hisparse_quantum_steps=3)
    hisparse = HiSparse(device_slots=100, hot_tokens=40, dense_slots=2048, limits=limits) if hot else None
    rooms = [
        request(index, prompt, max_tokens=TOKENS, sparse=index in sparse)
        for index, prompt in enumerate(prompts(3, LENGTHS))
    ]
    prefill = Prefill.of(factory=create, attention=attention, options=options, slots=4096).run(*rooms)
    decode = Decode.of(
        factory=create, attention=attention, options=options, slots=4096, hisparse=hisparse, batch_max=batch_max
    )
    model = model_of(decode.engine)
    model._steps = DeepSteps(
        model._forward, model.device, top=model.architecture.top_k, indexer=model.indexer, graphs=graphs
    )
    return decode.served(rooms, prefill)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*(pytest.param(case, marks=pytest.mark.full) for case in ("dense", "picks", "hot")), "mixed"]
)
def test_a_replayed_step_is_bitwise_the_step_that_is_queued(attention: str, case: str, played: list[Played]) -> None:
    """Rooms take turns, grow, and are retracted, so that a shape comes again with others."""
    sparse = {"dense": (), "picks": (), "hot": tuple(range(len(LENGTHS))), "mixed": (1, 3, 4)}[case]
    hot, batch_max = case != "dense", 2 if case == "dense" else 4
    queued = outcomes(attention, graphs=False, sparse=sparse, hot=hot, batch_max=batch_max)
    assert not played
    assert outcomes(attention, graphs=True, sparse=sparse, hot=hot, batch_max=batch_max) == queued
    assert len(played) > 1
    assert sum(graph.replays for graph in played) > 4


@pytest.mark.slow
def test_requests_whose_keys_are_many_are_read_some_at_a_time(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this model's two batches differ in last bits: ids are asked."""
    ids = [outcome.tokens for outcome in outcomes(attention, graphs=False, hot=True)]
    monkeypatch.setattr(deep_steps, "KEYS_TOGETHER", 2 * KEY_BLOCK)
    assert [outcome.tokens for outcome in outcomes(attention, graphs=False, hot=True)] == ids


def test_a_table_stays_as_long_as_its_requests_do_and_reaches_as_far_as_they_need() -> None:
    tables = PositionTables()
    short, long = torch.arange(KEY_BLOCK), 1_000 + torch.arange(3 * KEY_BLOCK)
    made = tables.of([short, long], KEY_BLOCK + 1)
    assert made.shape == (2, 2 * KEY_BLOCK)
    assert torch.equal(made[1], long[: 2 * KEY_BLOCK])
    assert torch.equal(made[0], torch.cat((short, short[:1].expand(KEY_BLOCK))))
    assert tables.of([short, long], 2 * KEY_BLOCK) is made
    assert tables.of([short, long], 2 * KEY_BLOCK + 1).shape == (2, 3 * KEY_BLOCK)
    assert torch.equal(tables.of([short, long.clone()], KEY_BLOCK)[1], long[:KEY_BLOCK])
    assert tables.of([long], KEY_BLOCK).shape == (1, KEY_BLOCK)
    two = tables.of([torch.stack((short, short))], KEY_BLOCK + 1)
    assert two.shape == (1, 2, 2 * KEY_BLOCK)


def test_a_reach_is_at_most_an_eighth_more_than_whole_blocks_and_there_are_few() -> None:
    found = [reach(tokens) for tokens in range(1, 65_537)]
    for tokens, width in enumerate(found, 1):
        blocks = -(-tokens // KEY_BLOCK)
        assert width % KEY_BLOCK == 0
        assert blocks <= width // KEY_BLOCK <= blocks * 9 / 8
    assert found == sorted(found)
    assert len(set(found)) <= 16 + 8 * 4
