"""The stamp engine behind real daemons: answers of a single process, and processes that never import torch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdtransfer.serve.engine_api import EngineConfig
from pdtransfer.serve.engines.generation import Generation
from pdtransfer.serve.engines.stamp.factory import generate_many
from pdtransfer.serve.settings.config import STAMP
from pdtransfer.wire import Sampling
from tests.support.fleets import LIMITS, SLOTS, TOKENS, Running, Site, equal, prompts, running

BOTH = {"model": STAMP, "limits": LIMITS}
FLEETS: dict[str, tuple[dict[str, str], dict[str, Any], dict[str, Any]]] = {
    "mla 64 to 1": (
        {"layers": "2"},
        {"page_size": 64, "host_layout": "layer_first"},
        {"page_size": 1, "host_layout": "page_first", "verify": True},
    ),
    "gqa 16 to 16, chunks of 8 and a layer": (
        {"layers": "2", "kv_heads": "4", "layers_per_cell": "1"},
        {"page_size": 16, "host_layout": "page_first", "chunk_tokens": 8},
        {"page_size": 16, "host_layout": "page_head"},
    ),
    "hisparse": (
        {"layers": "4", "top_k": "16", "index_share": "1"},
        {"page_size": 64},
        {
            "enable_hisparse": True, "hot_tokens": 48, "device_slots": 98, "dense_slots": 1_024,
            "limits": replace(LIMITS, hisparse_wait_steps=1, hisparse_quantum_steps=2),
        },
    ),
    "hybrid": (
        {"pools": "deepseek_v4", "requests": "32"},
        {"page_size": 64},
        {"page_size": 64},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=FLEETS, ids=lambda name: name.replace(" ", "-"))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[str, str], Running]]:
    options, prefill, decode = FLEETS[request.param]
    both = BOTH | {"engine_option": tuple(f"{name}={value}" for name, value in options.items())}
    logs = tmp_path_factory.mktemp("f")
    with running(logs, prefills=[both | prefill], decodes=[both | decode], router={"model": STAMP}) as made:
        yield options, made


def expected(options: dict[str, str], texts: list[str]) -> list[Generation]:
    config = EngineConfig(role="decode", slots=SLOTS, page_size=64, host_layout="layer_first", options=options)
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    return generate_many(
        config, [(np.frombuffer(text.encode(), np.uint8).astype(np.int64), sampling) for text in texts]
    )


def mapped(pid: int) -> str:
    """What a process has in its memory."""
    return Path(f"/proc/{pid}/maps").read_text()


def test_answers_are_those_of_a_single_process_and_no_worker_imports_torch(
    pair: tuple[dict[str, str], Running],
) -> None:
    options, on = pair
    texts = prompts(1, 1, 2, 15, 16, 17, 63, 64, 65, 130, 200, 700)
    texts += [texts[-1] + "and more"]  # a prefix that decode may have kept
    wanted = expected(options, texts)
    sparse = "top_k" in options

    async def case(site: Site) -> None:
        for _ in range(2):
            answers = await asyncio.gather(*(site.complete(text, enable_hisparse=sparse) for text in texts))
            for answer, one in zip(answers, wanted, strict=True):
                assert equal(answer, one), answer
                assert answer.text == "".join(map(chr, one.tokens))
                assert answer.facts["enable_hisparse"] is sparse
        await site.settled()
        metrics = await site.metrics(site.decode)
        if sparse:
            assert metrics["pdtransfer_hot_misses_total"] > 0
        for daemon in (site.prefill, site.decode):
            libraries = mapped(daemon.process.pid)
            assert "numpy" in libraries
            assert "libtorch" not in libraries

    on(case)


def test_a_stream_and_a_cancelled_one(pair: tuple[dict[str, str], Running]) -> None:
    options, on = pair
    (text,) = prompts(2, 90)
    (one,) = expected(options, [text])

    async def case(site: Site) -> None:
        async for _ in site.events(text, max_tokens=400):
            break  # the client hangs up
        *pieces, last = await site.stream(text)
        assert "".join(piece["choices"][0]["text"] for piece in [*pieces, last]) == "".join(map(chr, one.tokens))
        await site.settled()

    on(case)
