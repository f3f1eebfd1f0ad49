"""Daemons with a hybrid model's pools, in each `--host-layout`: every answer and every row is a single process's."""

from __future__ import annotations

import asyncio

import pytest

from pdtransfer.layout.layout_builders import ITEM_LAYOUTS
from pdtransfer.serve.commands.cli import main
from tests.support.fleets import equal, generated, prompts, running

OPTIONS = {"pools": "deepseek_v4", "requests": "12", "window_tokens": "48"}
DECODES = [
    pytest.param("layer_first", 256, "dram", marks=pytest.mark.full),
    pytest.param("page_first", 1, "dram", marks=pytest.mark.full),
    ("page_first_direct", 256, "hbm"),
]
COMMON = prompts(1, 300)[0]
TEXTS = (
    *prompts(2, 1, 3, 4, 47, 48, 127, 129, 256, 511),
    *(COMMON + prompt for prompt in prompts(3, 5, 60, 200)),
    COMMON,
)
LONG = COMMON + prompts(4, 90)[0]  # past every border, from a prefix


def _options(**more: str) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in (OPTIONS | more).items())


@pytest.mark.parametrize(("host_layout", "page_tokens", "index"), DECODES)
async def test_daemons_of_a_hybrid_model_serve_from_every_host_layout(
    tmp_path_factory: pytest.TempPathFactory, host_layout: str, page_tokens: int, index: str
) -> None:
    prefill = {"slots": 8_192, "chunk_tokens": 100, "engine_option": _options()}
    decode = {"host_layout": host_layout, "slots": 8_192, "verify": True}
    decode["engine_option"] = _options(page_tokens=str(page_tokens), index_memory=index)
    logs = tmp_path_factory.mktemp("f")
    async with running(logs, prefills=[prefill], decodes=[decode]) as site:
        answers = await asyncio.gather(*(site.complete(each, max_tokens=20) for each in TEXTS))
        again = await site.complete(LONG, max_tokens=150)
        for text, answer in zip(TEXTS, answers, strict=True):
            assert equal(answer, generated(text, 20, _options())), answer
        assert equal(again, generated(LONG, 150, _options())), again
        assert again.body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
        await site.settled()
        assert (await site.metrics(site.decode))["pdtransfer_grants_mismatched_total"] == 0


def test_a_host_layout_that_a_component_does_not_have_is_one_line_with_both_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--bind=tcp://127.0.0.1:0", "--listen=127.0.0.1:0", "--host-layout=page_head"]
    assert main(["decode", "--engine-option=pools=deepseek_v4", *flags]) == 2
    output = capsys.readouterr().err
    assert "component 'c4'" in output
    assert "'page_head' must be one of " + ", ".join(ITEM_LAYOUTS) in output
    assert len(output.splitlines()) == 1
