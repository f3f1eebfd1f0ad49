"""SGLang's drafters: which of them have a KV cache, and what a decode engine cannot do with it."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError

_WITHOUT_KV = {"NGRAM", "FROZEN_KV_MTP", "UNO"}  # of their own


def drafter_with_kv(server_args: Any) -> str:
    """The name of the drafter whose KV crosses with the model's; empty without one."""
    drafter = str(server_args.speculative_algorithm or "").upper()
    return "" if drafter in _WITHOUT_KV else drafter


def check_drafter(server_args: Any, *, on_host: bool) -> None:
    """Raises ConfigError for a drafter's KV in the host pool that requests land in (`on_host`): peers can write to one
    host pool, and SGLang makes the drafter's apart from the model's."""
    if on_host and server_args.disaggregation_mode == "decode" and (drafter := drafter_with_kv(server_args)):
        raise ConfigError(
            f"disaggregation_decode_host_receive_threshold: the KV of a drafter ({drafter}) "
            "cannot land in host memory yet. Leave out this option, or speculative_algorithm on both engines"
        )
