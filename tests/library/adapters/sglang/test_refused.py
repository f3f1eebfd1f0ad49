"""What an engine refuses at its start, by the text that docs/compatibility.md has, and its rank: a manager with modules
and pools in the place of SGLang's."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

from pdtransfer.errors import ConfigError
from tests.library.adapters.sglang.sglang_modules import DisaggregationMode, ServerArgs, with_stand_ins
from tests.library.adapters.sglang.sglang_ranks import HEADS, Pool


def start(
    mode: DisaggregationMode, monkeypatch: pytest.MonkeyPatch, *, states: tuple[str, ...] = (), pp_size: int = 1,
    enable_hisparse: bool = False, raw: np.ndarray | None = None, **fields: Any,
) -> Any:  # fmt: skip
    """Starts a rank with a cache that SGLang has allocated, at the begin of `raw`. `fields` are of its KVArgs."""
    options: dict[str, Any] = {"enable_hisparse": enable_hisparse, "device": "cpu"}
    backend = with_stand_ins("backend", monkeypatch, **options)
    backend.dialect.HAS |= {"draft_buffers"}
    pool = Pool(raw, 4, HEADS, states, latent=False)
    args = pool.args
    args.state_types = [SimpleNamespace(value=name) for name in states]
    for name, value in fields.items():
        setattr(args, name, value)
    server_args = ServerArgs(pp_size=pp_size, disaggregation_mode=mode.value, **options)
    manager = backend.Manager(args, mode, server_args)
    manager.register_to_bootstrap()
    return manager


@pytest.mark.parametrize("state", ["swa", "dsa", "minimax_index_k"])
def test_states_without_layer_numbers_are_refused_with_pipeline_stages(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = r"(?m)^pp_size: states without layer numbers are not supported with several stages$"
    with pytest.raises(ConfigError, match=text):
        start(DisaggregationMode.PREFILL, monkeypatch, states=(state,), pp_size=2)


@pytest.mark.parametrize(
    ("of_cache", "text"),
    [
        ({"states": ("minimax_index_k",)}, "MiniMax's sparse KV is not supported with it"),
        (
            {"num_draft_entries": 2},
            "SGLang 0.5.17 does not report pages of the device beside the host's; 0.5.23 is the first that does",
        ),
    ],
)
def test_what_hisparse_cannot_have_is_refused(of_cache: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"(?m)^enable_hisparse: {re.escape(text)}$"):
        start(DisaggregationMode.DECODE, monkeypatch, enable_hisparse=True, **of_cache)


@pytest.mark.parametrize("is_below", [True, False], ids=["below the cache", "behind the cache"])
def test_a_host_pool_that_no_peer_can_write_is_refused(is_below: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang has allocated it elsewhere than the plugin has room for it. The text says where both lie."""
    byte_count = Pool(None, 4, HEADS, (), latent=False).raw.nbytes
    raw = np.zeros(2 * byte_count, np.uint8)
    cache, beside = (raw[byte_count:], raw) if is_below else (raw, raw[byte_count:])
    host = Pool(beside, 4, HEADS, (), latent=False)
    fields = {f"host_{name}": getattr(host.args, name) for name in ("kv_data_ptrs", "kv_data_lens", "kv_item_lens")}
    first = host.raw.ctypes.data
    text = (
        rf"^disaggregation_decode_host_receive_threshold: SGLang's host pool lies at {first:#x} to "
        rf"{first + byte_count:#x}, and peers can write 0x[0-9a-f]+ to 0x[0-9a-f]+ alone\. .*: leave out that option, "
    )
    with pytest.raises(ConfigError, match=text):
        start(DisaggregationMode.DECODE, monkeypatch, raw=cache, **fields)


def test_a_second_host_pool_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang names host pages of the windows as well, and the plugin would take them for pages of the device."""
    fields = {f"host_{name}": [1] for name in ("kv_data_ptrs", "kv_data_lens", "kv_item_lens")}
    text = "requests can land in one host pool, .* has another of swa"
    with pytest.raises(ConfigError, match=f"(?m)^disaggregation_decode_host_receive_threshold: {text}$"):
        start(DisaggregationMode.DECODE, monkeypatch, states=("swa",), host_state_data_ptrs=[[1]], **fields)


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
