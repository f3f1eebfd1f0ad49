"""A prefill that knows only the protocol's text, behind a real router, which writes into a real decode's arena."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdtransfer.serve.settings.router import RouterConfig
from tests.serve.stranger import cast, model
from tests.support.engines.plain import text
from tests.support.fleets import LIMITS, decode_config, free_address
from tests.support.lone_daemons import TRANSPORTS, complete, lone_daemons

PROMPTS = ["x", "a prompt of some length", "z" * 150]


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_real_decode_answers_from_what_a_stranger_prefill_has_written(
    tmp_path: Path, directory: Path, transport: str
) -> None:
    """Its engine compares every row with what it should be; with --verify so does decode, with the checksums."""
    decode = decode_config(
        directory,
        engine="tests.support.engines.plain:create",
        engine_option=("twin=1",),
        transport=transport,
        enable_hisparse=True,
        verify=True,
    )
    with cast.prefill(transport) as prefill:
        router = RouterConfig(
            listen=free_address(), node="router", limits=LIMITS, prefill=(prefill.endpoint,), decode=(decode.bind,)
        )
        with lone_daemons(tmp_path, decode, router) as (_, front):
            for prompt in PROMPTS:
                for sparse in (False, True):
                    answer = complete(front, prompt, max_tokens=5, enable_hisparse=sparse)
                    assert answer["choices"][0]["text"] == text(prompt, 5)
                    assert answer["pdtransfer"]["enable_hisparse"] is sparse
                    assert prefill.landed.pop() == len(prompt) * model.LAYERS * model.ROW_BYTES
            assert prefill.rejects == []
