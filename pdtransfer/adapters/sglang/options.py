"""What SGLang's options have a decode engine do with drafters and pipeline stages, and what it cannot do with them.

SGLang's stages pass on, from the first to the last and then once more from the first, which requests have ended at all
of them. They do not pass on how each has ended: one stage would go on with a request that another one has dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...errors import ConfigError
from ..kit.facts import config_digest

_WITHOUT_KV = {"NGRAM", "FROZEN_KV_MTP", "UNO"}  # of their own
# What SGLang writes into a model's configuration because of an engine's options.
_OF_OPTIONS = {"context_len", "max_position_embeddings", "encoder_only", "language_only", "language_model_only"}


def drafter_with_kv(server_args: Any) -> str:
    """The name of the drafter whose KV is transferred with the model's; empty without one."""
    drafter = str(server_args.speculative_algorithm or "").upper()
    return "" if drafter in _WITHOUT_KV else drafter


def speculation(server_args: Any, config_of: Callable[[str, str | None], Mapping[str, Any]]) -> dict[str, str]:
    """The fact of a drafter; none where drafts need no KV of their own. `config_of` returns the configuration of the
    draft model at a path, of a revision; without one the drafter's layers are in the model's own checkpoint."""
    if not (drafter := drafter_with_kv(server_args)):
        return {}
    path = server_args.speculative_draft_model_path or server_args.model_path
    config = config_of(path, server_args.speculative_draft_model_revision)
    config = {name: value for name, value in config.items() if name not in _OF_OPTIONS}
    return {"speculation": f"{drafter} {config_digest(config)}"}


Ended = Mapping[str, str]
"""Requests that have ended, and why each has failed; empty for one that has landed."""

ELSEWHERE = "it failed at another rank of its decode engine"


def check_options(server_args: Any, *, on_host: bool) -> None:
    """Raises ConfigError for a prefill engine whose requests have pages that its cache on the device has not.

    On decode it raises for what loads a request at one stage when the others do not know it. So it does for a
    drafter's KV where requests land in the host pool (`on_host`). Peers can write to one, and SGLang makes the
    drafter's apart from the model's.
    """
    if server_args.disaggregation_mode == "prefill":
        if server_args.enable_hisparse:
            raise ConfigError("enable_hisparse: prefill cannot hand over from its host pool: use it on decode alone")
        return
    for option in ("enable_hierarchical_cache", "enable_hisparse"):
        if server_args.pp_size > 1 and getattr(server_args, option):
            raise ConfigError(f"{option}: stages of a decode engine do not agree yet when a request is loaded")
    if on_host and (drafter := drafter_with_kv(server_args)):
        raise ConfigError(
            f"disaggregation_decode_host_receive_threshold: the KV of a drafter ({drafter}) "
            "cannot land in host memory. Leave out this option, or speculative_algorithm on both engines"
        )


def ended_here(requests: Iterable[tuple[str, bool, bool, str]]) -> Ended:
    """Of the requests of one stage, by id: True if it has ended at all ranks of the stage, True if it has failed at
    one. And why at this one, where it is known."""
    return {rid: (reason or ELSEWHERE) if failed else "" for rid, ended, failed, reason in requests if ended}


def ended_so_far(before: Ended, here: Ended) -> Ended:
    """The requests that have ended at the stages before this one and at this one; the first stage that has a reason
    gives it."""
    return {rid: reason or here[rid] for rid, reason in before.items() if rid in here}
