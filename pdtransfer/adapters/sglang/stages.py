"""How the pipeline stages of a decode engine end a request: together, and all as a failure if it failed at one of them.

SGLang's stages pass on, from the first to the last and then once more from the first, which requests have ended at all
of them. They do not pass on how each has ended: one stage would go on with a request that another one has dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import ConfigError

Ended = Mapping[str, str]
"""Requests that have ended, and why each has failed; empty for one that has landed."""

ELSEWHERE = "it failed at another rank of its decode engine"


def check_options(server_args: Any) -> None:
    """Raises ConfigError for what loads a request at one stage of a decode engine when the others do not know it."""
    if server_args.pp_size > 1 and server_args.disaggregation_mode == "decode":
        for option in ("enable_hierarchical_cache", "enable_hisparse"):
            if getattr(server_args, option):
                raise ConfigError(f"{option}: stages of a decode engine do not agree yet when a request is loaded")


def ended_here(requests: Iterable[tuple[str, bool, bool, str]]) -> Ended:
    """Of the requests of one stage: by its id, whether each has ended at all ranks of the stage, whether it has failed
    at one of them, and why at this one, where it is known."""
    return {rid: (reason or ELSEWHERE) if failed else "" for rid, ended, failed, reason in requests if ended}


def ended_so_far(before: Ended, here: Ended) -> Ended:
    """The requests that have ended at the stages before this one and at this one; the first stage that has a reason
    gives it."""
    return {rid: reason or here[rid] for rid, reason in before.items() if rid in here}
