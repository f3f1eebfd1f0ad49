"""A decode is killed while it streams: another goes on, and the client reads what it would have read anyway."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets import ENGINE, LIMITS, Gates, Site, prompts, running
from tests.support.healing import text_of
from tests.support.loads import named, strike
from tests.support.waiting import until

QUICK = replace(LIMITS, silence_ms=1_500, hisparse_wait_steps=1, hisparse_quantum_steps=2)
DRAWN = {
    "temperature": 0.9, "seed": 5, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
    "min_tokens": 10, "logprobs": 2,
}  # fmt: skip
HOT = {"enable_hisparse": True, "hot_tokens": 256, "device_slots": 1_028, "dense_slots": 1_024}
HYBRID = ("pools=deepseek_v4", "requests=12", "window_tokens=48")
SPARSE = ("layers=2", "top_k=256", "index_share=1")  # steps attend to all tokens, as prefill does
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # both workers, decode, the request
    "hisparse": ({"engine_option": SPARSE}, HOT, DRAWN | {"enable_hisparse": True}),
    "hybrid": ({"engine_option": HYBRID, "slots": 8_192}, {"page_size": 1, "host_layout": "page_first"}, {}),
}
TOKENS = 40
READ_MIN = 4  # tokens that the client has when decode is killed


@pytest.mark.parametrize("kind", ["hisparse", pytest.param("hybrid", marks=pytest.mark.full)])
async def test_a_stream_whose_decode_is_killed_reads_as_if_nothing_had_happened(
    tmp_path: Path, gates: Gates, kind: str
) -> None:
    both, decode, asked = KINDS[kind]
    both = {**both, "engine": ENGINE, "limits": QUICK}
    decode = both | decode | {"engine_option": (*both["engine_option"], f"gates={gates.directory}")}
    (prompt,) = prompts(1, 130)

    async def read(site: Site, events: list[dict[str, Any]]) -> None:
        async for event in site.events(prompt, max_tokens=TOKENS, enable_resume=True, **asked):
            assert "error" not in event, event
            events.append(event)

    async with running(
        tmp_path, ends_as=(-signal.SIGKILL,), prefills=[both], decodes=[decode] * 2, router={"limits": QUICK}
    ) as site:
        wanted = await site.complete(prompt, max_tokens=TOKENS, **asked)
        assert wanted.status == 200, wanted
        with gates.closed("decode"):
            events = list[dict[str, Any]]()
            reading = asyncio.ensure_future(read(site, events))
            await until(lambda: text_of(events), "the first token")
            while len(text_of(events)) < READ_MIN:  # a request that is admitted lets the others there have a step
                short = {**asked, "max_tokens": 2, "min_tokens": 0}
                nudges = await asyncio.gather(*(site.complete(text, **short) for text in (prompt, *prompts(2, 9, 9))))
                assert {each.status for each in nudges} == {200}
            assert len(text_of(events)) < TOKENS
            await strike(site, await decoding(site), signal.SIGKILL)
        await reading
        text, choices = wanted.text, [event["choices"][0] for event in events]
        assert text_of(events) == text
        assert choices[-1]["finish_reason"] == wanted.body["choices"][0]["finish_reason"]
        if "logprobs" in asked:
            scores = [score for choice in choices for score in choice["logprobs"]["token_logprobs"]]
            # A prompt's rows may differ from those of decode's own steps in their last bits.
            assert scores == pytest.approx(wanted.body["choices"][0]["logprobs"]["token_logprobs"], abs=1e-3)
        facts = events[-1]["pdtransfer"]
        assert facts["resumptions"] == 1
        if kind == "hybrid":  # of integers: no rounding
            assert facts["kv_digest"] == wanted.facts["kv_digest"]
        assert facts["enable_hisparse"] is wanted.facts["enable_hisparse"] is (kind == "hisparse")
        assert (await site.metrics(site.router))["pdtransfer_resumptions_total"] == 1


async def decoding(site: Site) -> str:
    """The decode that has a room."""
    found = [
        f"decode-{index}"
        for index in range(2)
        if (await site.metrics(named(site, f"decode-{index}")))["pdtransfer_rooms"]
    ]
    assert len(found) == 1, found
    return found[0]
