"""A router that knows only the protocol's text, before a real prefill and a real decode."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.stranger import model
from tests.serve.stranger.router import Router
from tests.support.engines.plain import text
from tests.support.fleets import decode_config, prefill_config
from tests.support.lone_daemons import TRANSPORTS, lone_daemons

ENGINE = {"engine": "tests.support.engines.plain:create"}


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stranger_router_collects_answers_of_real_daemons(tmp_path: Path, directory: Path, transport: str) -> None:
    prefill = prefill_config(**ENGINE, engine_option=(), transport=transport)
    decode = decode_config(
        directory, **ENGINE, engine_option=("twin=1",), enable_hisparse=True, transport=transport, prefix_cache=False
    )
    with (
        lone_daemons(tmp_path, prefill, decode),
        Router(node="strange-router", prefill=prefill.bind, decode=decode.bind) as router,
    ):
        for prompt in ("x", "a prompt of some length", "z" * 150):
            for sparse in (False, True):
                room = router.complete(prompt.encode(), 5, enable_hisparse=sparse)
                assert bytes(room.tokens).decode() == text(prompt, 5)
                assert {role: end["reason"] for role, end in room.ends.items()} == {
                    "prefill": "done",
                    "decode": "length",
                }
                size = len(prompt) * model.LAYERS * model.ROW_BYTES
                assert {end["kv_bytes"] for end in room.ends.values()} == {size}
        assert router.rejects == []
