"""Prompts shared through the clients, over shared memory: what is sent, to the byte, and what may not."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pdtransfer.errors import LocalProtocolError
from pdtransfer.handoff.effects import RoomReady
from tests.library.client.async_pair import AsyncPair
from tests.support.client_pair import Expected, Pair, client_pair, slots_of_pages

BLOCK = 64
PROMPT = np.arange(150)  # two blocks, and 22 tokens more
ROW_BYTES = 2 * 1152


pytestmark = pytest.mark.given(target=("page_first", 1, 1024), source=("layer_first", 16, 1024))


def room(pair: Pair, number: int, prompt: np.ndarray, **more: object) -> tuple[RoomReady, np.ndarray]:
    """One room from expect to READY, from pages of its own: whatever crosses differs from what another room sent."""
    pair.expect(number, len(prompt), prompt=prompt, **more)
    pages = pair.send(number, len(prompt))
    return pair.ready(number), slots_of_pages(pages, pair.source.page_size, len(prompt))


def test_only_the_rest_of_a_prompt_crosses_and_no_other_byte_changes(pair: Pair) -> None:
    expected = Expected(pair.target)
    first, source = room(pair, 1, PROMPT, growth=5)
    expected.land(source, first.slots["kv"][:150])
    assert (first.prefix, first.kv_bytes) == (0, 150 * ROW_BYTES)
    other = np.concatenate([PROMPT[:140], np.arange(60)])
    second, source = room(pair, 2, other, growth=5)
    assert (second.prefix, second.kv_bytes) == (128, 72 * ROW_BYTES)
    assert second.slots["kv"][:128].tolist() == first.slots["kv"][:128].tolist()
    expected.land(source[128:], second.slots["kv"][128:200])
    assert expected.holds(pair.arena)
    third, _ = room(pair, 3, PROMPT[:128])
    assert (third.prefix, third.kv_bytes, len(third.slots["kv"])) == (128, 0, 128)
    assert expected.holds(pair.arena)


def test_a_prompt_outlives_its_room_and_gives_way_to_one_that_needs_the_slots(pair: Pair) -> None:
    room(pair, 1, PROMPT)
    pair.decode.release(1)
    again, _ = room(pair, 2, PROMPT)
    assert again.prefix == 128
    pair.decode.release(2)
    pair.whole_arena_is_free(3)
    after, _ = room(pair, 4, PROMPT)
    assert after.prefix == 0


@pytest.mark.parametrize("more", [{"salt": b"other"}, {"prompt": None}], ids=str)
def test_neither_another_salt_nor_a_room_without_a_prompt_shares(pair: Pair, more: dict[str, object]) -> None:
    room(pair, 1, PROMPT)
    pair.decode.expect(2, tokens=150, sources=[pair.prefill.endpoint], **({"prompt": PROMPT} | more))
    pair.send(2, 150)
    assert pair.ready(2).prefix == 0


def test_a_client_without_the_cache_sends_all(pair: Pair) -> None:
    del pair
    with client_pair(target=("page_first", 1, 1024), source=("layer_first", 16, 1024), prefix_cache=False) as off:
        for number in (1, 2):
            ready, _ = room(off, number, PROMPT)
            assert (ready.prefix, ready.kv_bytes) == (0, 150 * ROW_BYTES)
            off.decode.release(number)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (np.arange(149), "(149,)"),
        (np.arange(150.0), "float64"),
        (np.arange(150) - 1, "from -1"),
        (np.arange(150) + (1 << 32), "u32"),
    ],
    ids=["length", "kind", "negative", "beyond"],
)
def test_a_prompt_that_is_none_is_refused_and_its_label_stays_free(pair: Pair, prompt: np.ndarray, words: str) -> None:
    with pytest.raises(LocalProtocolError, match="prompt") as refused:
        pair.expect(1, 150, prompt=prompt)
    assert words in str(refused.value)
    room(pair, 1, PROMPT)


async def test_a_coroutine_shares_prompts_too(it: AsyncPair) -> None:
    for number, prefix in ((1, 0), (2, 128)):
        sources = [it.prefill.client.endpoint]
        hand = it.decode.expect(number, tokens=150, sources=sources, prompt=PROMPT, salt=b"s", time_left_s=20.0)
        it.pair.send(number, 150)
        assert (await asyncio.wait_for(hand.ready(), 20)).prefix == prefix
        hand.release()
