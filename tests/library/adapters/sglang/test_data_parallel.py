"""Data parallel engines behind one address: a manager with modules and pools in the place of SGLang's."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

from tests.library.adapters.sglang.sglang_modules import DisaggregationMode, ServerArgs, with_stand_ins
from tests.library.adapters.sglang.sglang_ranks import HEADS, Pool


@pytest.mark.parametrize(("dp_size", "rank"), [(2, 0), (2, 1), (1, 0)])
def test_an_engine_has_the_rank_that_rooms_choose(dp_size: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's sender fails a request whose room names another rank. Without DP attention SGLang itself takes all these
    engines for the first one there."""
    backend = with_stand_ins("backend", monkeypatch)
    args = Pool(None, 4, HEADS, (), latent=False).args
    args.system_dp_rank = rank
    mode = DisaggregationMode.PREFILL
    manager = backend.Manager(args, mode, ServerArgs(dp_size=dp_size, disaggregation_mode=mode.value))
    assert manager.attn_dp_rank == rank
