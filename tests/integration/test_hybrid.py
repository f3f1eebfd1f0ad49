"""Daemons that serve a hybrid model: every component of every room is right at every step, in each `--host-layout`."""

from __future__ import annotations

import asyncio

import pytest

from pdtransfer.commands.cli import main
from pdtransfer.layout.layout_builders import ITEM_LAYOUTS
from tests.support.engines import hybrid, plain
from tests.support.fleets import Site, prompts, running

ENGINE = {"engine": "tests.support.engines.hybrid:create", "engine_option": ()}
DECODES = [("layer_first", 256, "dram"), ("page_first", 1, "dram"), ("page_first_direct", 256, "hbm")]


@pytest.mark.parametrize(("host_layout", "page_size", "index"), DECODES)
def test_daemons_of_a_hybrid_model_serve_from_every_host_layout(
    tmp_path_factory: pytest.TempPathFactory, host_layout: str, page_size: int, index: str
) -> None:
    prefill = {"host_layout": "layer_first", "page_size": 256, "slots": 8_192, "chunk_tokens": 100}
    decode = {"host_layout": host_layout, "page_size": page_size, "slots": 8_192, "verify": True}
    decode["engine_option"] = (f"index={index}",)

    async def case(site: Site) -> None:
        common = prompts(1, 300)[0]
        texts = [*prompts(2, 1, 3, 4, 47, 48, 127, 129, 256, 511), *(common + each for each in prompts(3, 5, 60, 200))]
        answers = await asyncio.gather(*(site.complete(each, max_tokens=20) for each in (*texts, common)))
        again = await site.complete(common + prompts(4, 90)[0], max_tokens=150)  # past every border, from a prefix
        for text, answer in zip((*texts, common), answers, strict=True):
            assert (answer.status, answer.text) == (200, plain.text(text, 20)), answer
        assert again.text == plain.text(common + prompts(4, 90)[0], 150)
        assert again.body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
        await site.settled()
        assert (await site.metrics(site.decode))["pdtransfer_grants_mismatched_total"] == 0

    logs = tmp_path_factory.mktemp("f")
    with running(logs, prefills=[ENGINE | prefill], decodes=[ENGINE | decode]) as on:
        on(case)


def test_a_host_layout_that_a_component_does_not_have_is_one_line_with_both_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--bind=tcp://127.0.0.1:0", "--http=127.0.0.1:0", "--host-layout=page_head", "--page-size=256"]
    assert main(["decode", f"--engine={hybrid.__name__}:create", *flags]) == 1
    said = capsys.readouterr().err
    assert "component 'c4'" in said
    assert "'page_head' is none of " + ", ".join(ITEM_LAYOUTS) in said
    assert len(said.splitlines()) == 1
