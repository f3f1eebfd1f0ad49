"""A decode daemon whose arena takes long to be backed with memory: it serves from what is ready."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.support.fleets import Gates, prompts, running
from tests.support.healing import decode, healed, met, prefill, right
from tests.support.waiting import until

ROW_BYTES = 64 << 10  # of one layer: 128 KiB a token
SLOTS = 2_048  # 256 MiB
CHUNK_SLOTS = 512  # 64 MiB are ready at first


@pytest.mark.full
async def test_a_restarted_decode_serves_from_the_first_chunk_of_its_arena_on(tmp_path: Path) -> None:
    gates = Gates(tmp_path)
    slowly = {"engine": "tests.support.engines.backing:create"}
    async with running(
        tmp_path,
        ends_as=(-signal.SIGKILL,),
        prefills=[prefill(64, row_bytes=ROW_BYTES) | {"slots": 1_024}],
        decodes=[decode(SLOTS, row_bytes=ROW_BYTES, gates=gates.directory) | slowly],
    ) as site:

        async def slots() -> float:
            return (await site.metrics(site.decode))["pdtransfer_slots"]

        async def whole() -> bool:
            return await slots() == SLOTS

        await until(whole, "all of the arena is backed")
        before = await met(site)
        site.decode.process.kill()
        await site.decode.process.wait()
        await site.usable(decode=0)  # the router knows, so that it meets the new process and not the old one's place
        with gates.closed("decode"):
            await site.restart(site.decode)
            assert await slots() == CHUNK_SLOTS
            await site.usable()
            texts = prompts(1, *[100] * 12)  # three times what the first chunk holds, growth included
            answers = await asyncio.gather(*(site.complete(text, max_tokens=30) for text in texts))
            assert all(right(text, answer, 30) for text, answer in zip(texts, answers, strict=True)), answers
            assert await slots() == CHUNK_SLOTS
        await until(whole, "all of the arena is backed")
        (long,) = prompts(2, 900)  # one that the first chunk could not hold
        assert right(long, await site.complete(long))
        await healed(site, before)
