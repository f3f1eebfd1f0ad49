"""doctor compares daemons that run, at their HTTP addresses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdtransfer.serve.commands.cli import main
from tests.support.fleets import fleet


async def test_daemons_are_compared_by_what_their_peers_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"engine_option": ("layers=3",)}
    async with fleet(tmp_path, decodes=[{}, other], ready=False) as site:
        prefill, *decodes = (f"http://{each.ready['http']}" for each in (site.prefill, *site.fleet.of("decode")))
        statuses = [await asyncio.to_thread(main, ["doctor", prefill, decode]) for decode in decodes]
        assert statuses == [0, 1]
        printed = capsys.readouterr().out.splitlines()
        assert [line for line in printed if line.startswith("The engines")] == [
            "The engines fit.", "The engines do not fit: weights.",
        ]  # fmt: skip
        assert await asyncio.to_thread(main, ["doctor", *decodes]) == 1
        assert "role: " in capsys.readouterr().out
