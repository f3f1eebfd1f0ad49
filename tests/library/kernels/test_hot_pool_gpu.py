"""The hot pool on a GPU, whose host memory is a registered arena: the same checks as on the CPU, and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.errors import LocalProtocolError
from pdtransfer.hisparse.hot_pool import HotPool
from pdtransfer.kernels import driver
from tests.library.kernels.hot_world import LAYOUTS, MODELS, World, world

if driver.count() == 0:
    pytest.skip("no GPU here, or no driver and bindings for it", allow_module_level=True)
pytestmark = pytest.mark.gpu


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def here(name: str) -> Iterator[World]:
    with closing(world(name, on_gpu=True, spare=1)) as made:
        yield made


@pytest.mark.parametrize("host", LAYOUTS)
@pytest.mark.parametrize("device", ["layer_first", "page_first"])
def test_steps_find_the_bytes_of_every_position_in_any_layout(name: str, host: str, device: str) -> None:
    with closing(world(name, host, device, on_gpu=True)) as here:
        for row, tokens, growth in ((0, 20, 12), (1, 5, 10), (2, 8, 3)):
            here.start(row, tokens, growth)
        for dtype in (torch.int32, torch.int64):
            here.step([2, 0, 1], dtype=dtype)
        here.step([0], padding=2)
        here.check_rest()


def test_a_request_that_starts_within_the_buffer_grows_beyond_it(here: World) -> None:
    here.start(1, 3, 29)
    for _ in range(3, 32):
        here.step([1])
    here.check_rest()


@pytest.mark.parametrize("seed", range(3))
def test_requests_come_grow_are_retracted_and_go(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes: dict[str, Any] = {"rows": 5, "hot": 40, "top": 33, "tokens_max": 150, "seed": seed}
    with closing(world(name, "page_first_direct", on_gpu=True, **sizes)) as here:
        retracted: list[Any] = []
        for _ in range(40):
            free = [row for row in range(here.rows) if row not in here.tokens]
            match random.choice(["start", "again", "stop", "retract", "step", "step", "step"]):
                case "start" if free and len(here.tokens) + len(retracted) < here.rows:
                    tokens = int(random.integers(1, 100))
                    here.start(free[0], tokens, 150 - tokens)
                case "again" if free and retracted:
                    here.start(free[-1], 0, 0, again=retracted.pop())
                case "stop" if here.tokens:
                    here.stop(int(random.choice(sorted(here.tokens))))
                case "retract" if here.tokens:
                    retracted.append(here.stop(int(random.choice(sorted(here.tokens))), drop=False))
                case _ if here.tokens:
                    here.step(sorted(here.tokens)[::-1], padding=here.rows - len(here.tokens))
        here.check_rest()


@pytest.mark.parametrize("tokens", [5, 20])
def test_positions_beyond_the_sequence_fail_that_request_and_nobody_else(here: World, tokens: int) -> None:
    for row, count in ((0, tokens), (1, 20), (2, 6)):
        here.start(row, count, 4)
    rows, lengths = here.there([2, 0, 1]), here.there([6, tokens, 20])
    asked = [[0, 5, -1], [tokens, 1, 1 << 30], [19, 0, 19]]
    slots = here.pool.swap_in(0, here.there(asked), lengths, rows).cpu()
    assert here.pool.refused.tolist() == [2, 0, 0]
    here.device.look()
    for request, row, good in ((0, 2, [0, 1]), (1, 0, [1]), (2, 1, [0, 1, 2])):
        wanted = np.array(here.tokens[row])[np.array(asked[request])[good]]
        here.device.check(slots[request][good], wanted, here.groups[0])
    here.pool.newest(here.there([0, 99, -1]), here.there([1 << 30, 3, 3]))
    here.pool.back_up(here.there([0, 99, -1]), here.there([1 << 30, 3, 3])).wait()
    assert here.pool.refused.tolist() == [4, 0, 0]
    here.stop(0)
    here.start(0, tokens, 4)
    here.step([0, 1, 2])
    here.check_rest()


def test_steps_of_a_graph_are_replayed_with_what_its_arrays_hold_then(here: World) -> None:
    here.start(0, 20, 12)
    here.start(2, 6, 20)  # grows beyond its buffer meanwhile
    rows, lengths, real = here.there([2, 0, -1]), here.there([6, 20, 0]), here.there([2])
    asked = [here.there(np.zeros((3, 6))) for _ in here.groups]
    found = [torch.zeros(3, 6, dtype=torch.int32, device="cuda") for _ in here.groups]
    newest = torch.zeros(3, dtype=torch.int32, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def step() -> None:
        for index in range(len(here.groups)):
            found[index].copy_(here.pool.swap_in(index, asked[index], lengths, rows, real=real))
        newest.copy_(here.pool.newest(rows, lengths, real=real))

    step()  # what is compiled and loaded once
    here.pool.store(here.there([-1]), here.there([0]))
    torch.cuda.synchronize()
    stores = torch.cuda.CUDAGraph()
    for one, work in ((graph, step), (stores, lambda: here.pool.store(rows, lengths, real=real))):
        with torch.cuda.graph(one, stream=stream):
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            work()
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    for _ in range(10):
        lengths.copy_(here.there([len(here.tokens[2]), len(here.tokens[0]), 0]))
        picks = [np.stack([here.random.integers(0, len(here.tokens[row]), 6) for row in (2, 0, 2)]) for _ in asked]
        for to, of in zip(asked, picks, strict=True):
            to.copy_(here.there(of))
        graph.replay()
        here.device.look()
        for index, layers in enumerate(here.groups):
            assert found[index][2].tolist() == [-1] * 6
            for request, row in enumerate((2, 0)):
                wanted = np.array(here.tokens[row])[picks[index][request]]
                here.device.check(found[index][request].cpu(), wanted, layers)
        fresh = np.arange(here.next_token, here.next_token + 2)
        here.next_token += 2
        here.device.write(newest[:2].cpu(), fresh)
        stores.replay()
        here.pool.fence().wait()
        here.host.look()
        for row, token in zip((2, 0), fresh.tolist(), strict=True):
            here.tokens[row].append(token)
            here.host.check(here.host_slots[row][: len(here.tokens[row])], here.tokens[row], here.layers)
    here.check_rest()


def test_a_pool_whose_host_memory_the_card_cannot_reach_is_refused(here: World) -> None:
    there = world()
    with pytest.raises(LocalProtocolError, match="the device's is of GPU 0, the host's of GPU None"):
        HotPool(there.host.pool, here.device.pool, groups=here.groups, rows=1, hot=4, top=2, tokens_max=8)
