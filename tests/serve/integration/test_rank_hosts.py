"""Ranks of one worker on different hosts, each beside its own of the other side: answered as by one process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.serve.integration.rank_hosts import served
from tests.support.networks import VETH, apart, why_not_apart


@pytest.mark.full
@pytest.mark.timeout(300)
def test_ranks_at_another_address_find_their_leaders_and_write_to_their_own_decode_rank(tmp_path: Path) -> None:
    mapped = asyncio.run(served(tmp_path, "127.0.0.2", "127.0.0.3", [], {}))
    assert mapped == [{"decode-0"}, {"decode-0-tp1"}]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_ranks_in_another_network_namespace_serve_with_keys_of_their_own() -> None:
    if why := why_not_apart(VETH, "nsenter"):
        pytest.skip(why)
    mapped = apart("tests.serve.integration.rank_hosts", seconds=240)
    assert mapped == [["decode-0"], ["decode-0-tp1"]], "each has mapped the arena of its own host, and no other"
