"""Daemons with a hybrid model's pools, in each `--host-layout`: every answer and every row is a single process's."""

from __future__ import annotations

import asyncio
from functools import cache

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[reference]'")

from pdtransfer_lab.models.factory import Generation, generate_many

from pdtransfer.layout.layout_builders import ITEM_LAYOUTS
from pdtransfer.serve.commands.cli import main
from pdtransfer.serve.engine_api import EngineConfig
from pdtransfer.wire import Sampling
from tests.support.fleets import Site, equal, prompts, running

OPTIONS = {"pools": "deepseek_v4", "requests": "12", "window_tokens": "48"}
DECODES = [("layer_first", 256, "dram"), ("page_first", 1, "dram"), ("page_first_direct", 256, "hbm")]
COMMON = prompts(1, 300)[0]
TEXTS = (*prompts(2, 1, 3, 4, 47, 48, 127, 129, 256, 511), *(COMMON + each for each in prompts(3, 5, 60, 200)), COMMON)
LONG = COMMON + prompts(4, 90)[0]  # past every border, from a prefix


def _options(**more: str) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in (OPTIONS | more).items())


@cache
def expected() -> list[Generation]:
    """Of a single process, with other chunks and another layout."""
    config = EngineConfig(
        role="decode", slots=8_192, page_size=64, host_layout="page_first", chunk_tokens=70, options=OPTIONS
    )
    asked = [(text, 20) for text in TEXTS] + [(LONG, 150)]
    return generate_many(
        config,
        [
            (np.frombuffer(text.encode(), np.uint8).astype(np.int64), Sampling(max_tokens=count, ignore_eos=True))
            for text, count in asked
        ],
    )


@pytest.mark.parametrize(("host_layout", "page_tokens", "index"), DECODES)
def test_daemons_of_a_hybrid_model_serve_from_every_host_layout(
    tmp_path_factory: pytest.TempPathFactory, host_layout: str, page_tokens: int, index: str
) -> None:
    prefill = {"slots": 8_192, "chunk_tokens": 100, "engine_option": _options()}
    decode = {"host_layout": host_layout, "slots": 8_192, "verify": True}
    decode["engine_option"] = _options(page_tokens=str(page_tokens), index_memory=index)

    async def case(site: Site) -> None:
        answers = await asyncio.gather(*(site.complete(each, max_tokens=20) for each in TEXTS))
        again = await site.complete(LONG, max_tokens=150)
        for answer, wanted in zip((*answers, again), expected(), strict=True):
            assert equal(answer, wanted), answer
        assert again.body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
        await site.settled()
        assert (await site.metrics(site.decode))["pdtransfer_grants_mismatched_total"] == 0

    logs = tmp_path_factory.mktemp("f")
    with running(logs, prefills=[prefill], decodes=[decode]) as on:
        on(case)


def test_a_host_layout_that_a_component_does_not_have_is_one_line_with_both_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--bind=tcp://127.0.0.1:0", "--http=127.0.0.1:0", "--host-layout=page_head"]
    assert main(["decode", "--engine-option=pools=deepseek_v4", *flags]) == 2
    said = capsys.readouterr().err
    assert "component 'c4'" in said
    assert "'page_head' must be one of " + ", ".join(ITEM_LAYOUTS) in said
    assert len(said.splitlines()) == 1
