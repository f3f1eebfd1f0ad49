"""Makes the status document out of what the router, its backend and its clients' requests know."""

from __future__ import annotations

import time
from collections.abc import Iterable

from .... import __version__
from ...settings.router import RouterConfig
from ..fleet.status import FleetStatus, RouterStatus, TotalsStatus, WorkerStatus
from .backend import BackendState
from .recent_requests import RecentRequests


def fleet_status(
    config: RouterConfig,
    recent: RecentRequests,
    backend: BackendState,
    workers: list[WorkerStatus],
    *,
    ready: bool,
    draining: bool,
    requests_open: int,
) -> FleetStatus:
    """Returns the whole document."""
    return FleetStatus(
        time=time.time(),
        router=RouterStatus(
            node=config.node,
            version=__version__,
            engine=config.engine if config.relays else "pdtransfer",
            ready=ready,
            draining=draining,
            uptime_s=recent.uptime_s,
            models=backend.models,
            requests_open=requests_open,
            requests_s=recent.requests_s,
            rooms=backend.rooms,
            retries=backend.retries,
            answers=dict(recent.answers),
            first_token_ms=recent.first_token_ms(),
        ),
        totals=totals(workers),
        workers=workers,
        failures=list(recent.failures),
    )


def totals(workers: Iterable[WorkerStatus]) -> TotalsStatus:
    """Adds up what the workers report; None where none of them reports it."""
    prefills, decodes = list[WorkerStatus](), list[WorkerStatus]()
    for each in workers:
        (prefills if each.role == "prefill" else decodes).append(each)
    held = [each.quarantined_bytes for each in decodes if each.quarantined_bytes is not None]
    return TotalsStatus(
        prompt_tokens_s=_sum(each.tokens_s for each in prefills),
        generated_tokens_s=_sum(each.tokens_s for each in decodes),
        kv_gb_s=_sum(each.kv_gb_s for each in decodes),
        quarantined_bytes=sum(held) if held else None,
    )


def _sum(rates: Iterable[float | None]) -> float | None:
    known = [each for each in rates if each is not None]
    return sum(known) if known else None
