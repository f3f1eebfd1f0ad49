"""Whole daemons over Mooncake on hosts of their own: whatever befalls them, each request ends once, and they go on."""

from __future__ import annotations

import pytest

from pdtransfer.transports.mooncake.host import why_not
from tests.serve.integration.far import CASES, DECODES, PREFILLS
from tests.support import networks


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(why := why_not() or networks.why_not()), reason=why)
def test_daemons_that_are_killed_cut_off_or_left_without_engines_lose_no_request_that_another_can_take() -> None:
    outcome = networks.apart("tests.serve.integration.far", seconds=380)
    for name in DECODES:
        assert outcome.pop(name) == {"mooncake": len(PREFILLS)}, "all sessions are over Mooncake"
    assert outcome.keys() == {case.__name__ for case in CASES}
    streams = outcome.pop("decode_killed_while_it_streams")
    assert streams["told"] > 0, "what decodes there is lost with it, and says so"
    assert streams["served"] > 0, "and the others come to their end"
    assert all(each["served"] > 0 for each in outcome.values())
    for name in ("decode_killed_while_kv_is_on_its_way", "prefill_killed_while_kv_is_on_its_way"):
        assert outcome[name]["told"] == 0, "another takes over"
