"""A decode that knows only the protocol's text, behind a real router, with KV of a real prefill."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdtransfer.serve.settings.router import RouterConfig
from tests.serve.stranger import cast, model
from tests.support.engines.plain import text
from tests.support.fleets import LIMITS, free_address, prefill_config
from tests.support.lone_daemons import TRANSPORTS, complete, lone_daemons
from tests.support.waiting import wait_for

PROMPTS = ["x", "a prompt of some length", "z" * 150]


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stranger_decode_answers_from_what_a_real_prefill_has_written(tmp_path: Path, transport: str) -> None:
    prefill = prefill_config(engine="examples.engine:create", engine_option=(), transport=transport)
    with cast.decode(transport, sparse=True) as decode:
        router = RouterConfig(
            listen=free_address(), node="router", limits=LIMITS, prefill=(prefill.bind,), decode=(decode.endpoint,)
        )
        with lone_daemons(tmp_path, prefill, router) as (_, front):
            for prompt in PROMPTS:
                for sparse in (False, True):
                    answer = complete(front, prompt, max_tokens=5, enable_hisparse=sparse)
                    assert answer["choices"][0]["text"] == text(prompt, 5)
                    assert answer["pdtransfer"]["enable_hisparse"] is sparse
                    assert decode.landed.pop() == len(prompt) * model.LAYERS * model.ROW_BYTES
            free = [cast.SLOTS] * 2
            wait_for(lambda: [len(slots) for slots in decode.free.values()] == free, "slots given back")
            assert decode.rejects == []
