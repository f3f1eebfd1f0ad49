"""The hot pool on the CPU, where the device is other memory of this process: every byte of every layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.errors import LocalProtocolError
from pdtransfer.hisparse.hot_pool import HotPool
from pdtransfer.kernels.pools import Pool
from tests.library.kernels.hot_world import LAYOUTS, MODELS, World, world
from tests.support.effort import some
from tests.support.layout_tensors import mla
from tests.support.planted_staging import stage

PROPERTY = settings(max_examples=some(25), deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("host", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_steps_find_the_bytes_of_every_position_in_any_layout(name: str, host: str) -> None:
    here = world(name, host, LAYOUTS[(LAYOUTS.index(host) + 1) % 4])
    here.start(0, 20, 12)
    here.start(1, 5, 10)
    here.start(2, 8, 3)
    for _ in range(3):
        here.step([2, 0, 1], padding=0)
    here.step([0])
    here.check_rest()


def test_a_request_that_starts_within_the_buffer_grows_beyond_it() -> None:
    here = world()
    here.start(1, 3, 29)
    for length in range(3, 32):
        assert len(here.tokens[1]) == length
        here.step([1])
    here.check_rest()
    counters = here.pool.counters()
    assert here.pool.admission_bytes == 3 * here.host.tensors.layout.row_bytes
    assert min(counters.hits, counters.misses) > 0


def test_a_staging_copy_of_a_prompt_shows_in_the_bytes_of_its_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    stage(monkeypatch)
    here = world()
    here.start(0, 20, 12)
    here.check_rest()  # a prompt that does not fit moves no byte
    here.start(1, 5, 10)
    here.device.check(here.device_slots[1][:5], here.tokens[1], here.layers)  # the bytes are right all the same
    with pytest.raises(AssertionError):
        here.check_rest()
    assert here.pool.admission_bytes == 2 * 5 * here.device.tensors.layout.row_bytes


def test_what_a_grown_request_has_in_its_places_is_not_brought_again() -> None:
    here = world()
    here.start(0, 8, 4)
    given = here.there([8]), here.there([0])
    here.grow([0], (given[1], given[0]), None)
    slots = here.pool.swap_in(0, here.there([[0, 1, 2, 5, 7, 6]]), here.there([9]), given[1])
    here.device.check(slots[0], np.array(here.tokens[0])[[0, 1, 2, 5, 7, 6]], range(2))
    counters = here.pool.counters()
    assert (counters.hits, counters.misses) == (6, 0)


@PROPERTY
@given(st.data())
def test_requests_come_grow_are_retracted_and_go(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(MODELS)))
    top = data.draw(st.integers(1, 9))
    here = world(
        name, data.draw(st.sampled_from(LAYOUTS)), data.draw(st.sampled_from(LAYOUTS)), rows=4, top=top,
        hot=data.draw(st.integers(top, 12)), page_size=1 << data.draw(st.integers(0, 3)),
        seed=data.draw(st.integers(0, 1 << 30)),
    )  # fmt: skip
    retracted: list[Any] = []
    for _ in range(data.draw(st.integers(1, 25))):
        free = [row for row in range(here.rows) if row not in here.tokens]
        running = [row for row in here.tokens if len(here.tokens[row]) < len(here.host_slots[row])]
        match data.draw(st.sampled_from(["start", "again", "stop", "retract", "step", "step", "step"])):
            case "start" if free and len(here.tokens) + len(retracted) < here.rows:
                tokens = data.draw(st.integers(1, here.tokens_max))
                here.start(
                    data.draw(st.sampled_from(free)), tokens, data.draw(st.integers(0, here.tokens_max - tokens))
                )
            case "again" if free and retracted:
                here.start(data.draw(st.sampled_from(free)), 0, 0, again=retracted.pop())
            case "stop" if here.tokens:
                here.stop(data.draw(st.sampled_from(sorted(here.tokens))))
            case "retract" if here.tokens:
                retracted.append(here.stop(data.draw(st.sampled_from(sorted(here.tokens))), drop=False))
            case "step" if running:
                batch = data.draw(st.permutations(running))[: data.draw(st.integers(1, len(running)))]
                padding = data.draw(st.integers(0, here.rows - len(batch)))
                here.step(batch, padding=padding, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
            case _:
                pass
    here.check_rest()


def test_what_is_held_is_not_brought_again_and_the_least_recent_goes_first() -> None:
    here = world(hot=4, top=3)
    here.start(0, 20, 1)
    lengths, rows = here.there([20]), here.there([0])

    def ask(*positions: int) -> tuple[int, int]:
        before = here.pool.counters()
        slots = here.pool.swap_in(0, here.there([positions]), lengths, rows).tolist()[0]
        here.device.check(slots, np.array(here.tokens[0])[list(positions)], range(2))
        after = here.pool.counters()
        assert after.swapped_bytes - before.swapped_bytes == (after.misses - before.misses) * 2 * 656
        return after.hits - before.hits, after.misses - before.misses

    assert ask(1, 2, 3) == (0, 3)
    assert ask(2, 2, 3) == (2, 0)
    assert ask(3, 9, 3) == (1, 1)  # into the place that was empty
    assert ask(11) == (0, 1)  # 1 goes
    assert ask(2, 3, 9) == (3, 0)
    assert ask(1) == (0, 1)  # 11 goes
    assert ask(2, 3, 9) == (3, 0)


def test_a_group_has_places_of_its_own() -> None:
    here = world(hot=4, top=2)
    here.start(0, 20, 1)
    lengths, rows = here.there([20]), here.there([0])
    here.pool.swap_in(0, here.there([[3, 4]]), lengths, rows)
    slots = here.pool.swap_in(1, here.there([[4, 5]]), lengths, rows).tolist()[0]
    here.device.check(slots, np.array(here.tokens[0])[[4, 5]], [2])
    assert here.pool.counters().misses == 4


# What is refused


@pytest.mark.parametrize("tokens", [5, 20])
def test_positions_beyond_the_sequence_fail_that_request_and_nobody_else(tokens: int) -> None:
    here = world()
    here.start(0, tokens, 4)
    here.start(1, 20, 4)
    here.start(2, 6, 4)
    rows, lengths = here.there([2, 0, 1]), here.there([6, tokens, 20])
    asked = [[0, 5, -1], [tokens, 1, 1 << 30], [19, 0, 19]]
    slots = here.pool.swap_in(0, here.there(asked), lengths, rows)
    assert here.pool.refused.tolist() == [2, 0, 0]
    assert (slots[1] >= 0).tolist() == [False, True, False]
    for request, row, good in ((0, 2, [0, 1]), (1, 0, [1]), (2, 1, [0, 1, 2])):
        wanted = np.array(here.tokens[row])[np.array(asked[request])[good]]
        here.device.check(slots[request][good], wanted, range(2))
    here.stop(0)
    here.start(0, tokens, 4)
    assert here.pool.refused.tolist() == [0, 0, 0], "whoever comes next starts anew"
    here.step([0, 1, 2])
    here.check_rest()


@pytest.mark.parametrize("hot", [8, 16])
def test_a_request_that_claims_to_be_longer_than_its_slots_is_refused(hot: int) -> None:
    here = world(hot=hot)
    here.start(0, 12, 0)
    here.start(1, 20, 4)
    rows = here.there([0, 1])
    before = here.host.tensors.memory.copy()
    slots = here.pool.swap_in(0, here.there([[12, 3], [12, 3]]), here.there([1 << 20, 20]), rows)
    assert here.pool.refused.tolist() == [1, 0, 0]
    here.device.check(slots[1], np.array(here.tokens[1])[[12, 3]], range(2))
    assert here.pool.newest(rows, here.there([12, 20])).tolist() == [-1, here.device_slots[1][-1]]
    here.pool.back_up(here.there([0]), here.there([12]))
    here.pool.back_up(here.there([0]), here.there([1 << 20]))
    assert here.pool.refused.tolist() == [4, 0, 0]
    assert np.array_equal(here.host.tensors.memory, before)


def test_a_row_that_nobody_has_is_refused_whatever_it_asks_for() -> None:
    here = world()
    here.start(0, 20, 4)
    here.step([0])
    before = here.device.tensors.memory.copy(), here.host.tensors.memory.copy()
    here.stop(0)
    here.pool.stop(0)
    for length in (5, 20):
        given = here.there([length]), here.there([0])
        assert here.pool.swap_in(1, here.there([[1, -1, 2]]), *given).tolist() == [[-1, -1, -1]]
        assert here.pool.newest(given[1], given[0]).tolist() == [-1]
        here.pool.back_up(given[1], given[0])
    assert here.pool.refused.tolist() == [8, 0, 0]
    assert np.array_equal(here.device.tensors.memory, before[0])
    assert np.array_equal(here.host.tensors.memory, before[1])


def test_padding_asks_for_nothing_and_gets_the_spare_slot() -> None:
    here = world(spare=2)
    here.start(1, 20, 4)
    rows, lengths = here.there([1, 0, 77]), here.there([20, 9, 1 << 30])
    asked = here.there([[1, 2], [3, 4], [5, 6]])
    slots = here.pool.swap_in(0, asked, lengths, rows, real=here.there([1]))
    assert slots[1:].tolist() == [[-1, -1], [-1, -1]]
    assert here.pool.newest(rows, lengths, real=here.there([1])).tolist() == [here.device_slots[1][-1], 2, 2]
    assert here.pool.newest(here.there([1, -1, 77]), lengths).tolist()[1:] == [2, 2]
    assert here.pool.refused.tolist() == [0, 0, 0]


def test_a_start_that_does_not_fit_reports_why_and_does_nothing() -> None:
    here = world()
    here.start(0, 20, 4)
    slots = np.arange(40, dtype=np.int64)

    def refused(match: str, row: int, host_slots: Any, tokens: int, device_slots: Any) -> None:
        with pytest.raises(LocalProtocolError, match=match):
            here.pool.start(row, host_slots, tokens, device_slots)

    refused("row: 0 is in use", 0, slots[:12], 10, slots[:9])
    refused(r"row: 3 is outside 0\.\.2", 3, slots[:12], 10, slots[:9])
    refused("tokens: 33, and 40 host slots of at most 32", 1, slots, 33, slots[:9])
    refused("tokens: 13, and 12 host slots", 1, slots[:12], 13, slots[:9])
    refused("tokens: 0, and 12", 1, slots[:12], 0, slots[:9])
    refused("device_slots: 10 for 10 tokens and a buffer of 8", 1, slots[:12], 10, slots[:10])
    refused("device_slots: 5 for 5 tokens and a buffer of 8", 1, slots[:12], 5, slots[:5])
    refused(r"host_slots: -1 is outside", 1, slots[:12] - 1, 10, slots[:9])
    refused(r"device_slots: 1000 is outside", 1, slots[:12], 10, np.append(slots[:8], 1000))
    refused("device_slots: a slot is repeated", 1, slots[:12], 8, slots[[0, 1, 2, 3, 4, 5, 6, 7, 7]])
    here.start(1, 5, 1)
    here.step([0, 1])
    here.check_rest()


def test_sizes_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="hot: 5, must be at least the 6 positions"):
        world(hot=5)
    with pytest.raises(LocalProtocolError, match="tokens_max 0: one is below 1"):
        world(tokens_max=0)
    with pytest.raises(LocalProtocolError, match="spare: 4000 is outside"):
        world(spare=4_000)
    here = world()
    pool = here.host.pool
    far = Pool(layout=pool.layout, address=pool.address, device=0, host=True)
    with pytest.raises(LocalProtocolError, match="the device's is of GPU None, the host's of GPU 0"):
        HotPool(far, here.device.pool, groups=here.groups, rows=1, hot=4, top=2, tokens_max=8)
    model = mla(layers=range(3), head_bytes=656)
    for groups in ((range(2),), (range(2), range(1, 3)), (range(2), range(2, 4))):
        with pytest.raises(LocalProtocolError, match=r"are not the layers 0\.\.2, each once"):
            World(
                model, host_layout="page_first", device_layout="page_first", groups=groups, rows=1, hot=4, top=2,
                tokens_max=8,
            )  # fmt: skip


def test_shapes_of_a_step_that_do_not_fit_are_refused() -> None:
    here = world()
    here.start(0, 20, 4)
    one = here.there([0])
    with pytest.raises(LocalProtocolError, match=r"positions: 7 of each request, not 1\.\.6"):
        here.pool.swap_in(0, here.there([[1] * 7]), here.there([20]), one)
    with pytest.raises(LocalProtocolError, match="positions: of 2 requests, and 1 lengths"):
        here.pool.swap_in(0, here.there([[1], [2]]), here.there([20]), one)
    with pytest.raises(LocalProtocolError, match="rows: 4 of 3, and 4 lengths"):
        here.pool.newest(here.there([0] * 4), here.there([0] * 4))


def test_fewer_places_than_the_buffer_has_are_as_many_tokens_as_there_may_be() -> None:
    here = world()
    host, device = np.arange(40, dtype=np.int64), np.arange(5, dtype=np.int64)
    here.pool.start(0, host, 3, device)
    here.device.check(device[:3], host[:3], range(3))
    row = here.there([0])
    assert here.pool.newest(row, here.there([3])).tolist() == [3]
    assert here.pool.refused.tolist() == [0, 0, 0]
    assert here.pool.newest(row, here.there([4])).tolist() == [-1]
    assert here.pool.refused.tolist() == [1, 0, 0]


def test_tables_are_counted() -> None:
    here = world()
    places = 3 * (8 + 32 + 1) + 2 * 2 * 3 * 8
    assert here.pool.table_bytes > 4 * places
