"""The status document: what a router knows of its fleet, as `GET /status` returns it.

The status page and `pdtransfer top` show this document and nothing else. A value that the router does not know is null.
Ratios are from 0 to 1; a rate covers the last few seconds, in a worker's own time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar, cast

from msgspec import Struct

from .roles import Role

SCHEMA = 1  # grows when a field changes its meaning; new fields may come at any time

Figure = TypeVar("Figure", int, float)
WorkerState = Literal["connecting", "starting", "ready", "draining", "unusable"]


class SlotsStatus(Struct, frozen=True, kw_only=True):
    """Slots of a pool or an arena, in tokens."""

    free: int
    total: int
    quarantined: int = 0  # their writer has not been proven quiet


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """One worker, or one HTTP server of vLLM or SGLang."""

    role: Role
    address: str  # that the router dials, without its key
    node: str | None = None
    model: str | None = None
    state: WorkerState
    why: str | None = None  # why it takes no rooms
    leaves: bool = False  # it was removed, and is forgotten once its rooms have ended
    uptime_s: float | None = None
    rooms_here: int  # of this router: not ended on the worker
    rooms_running: int | None = None  # of all routers, as the next ones
    rooms_queued: int | None = None
    rooms: dict[str, int] | None = None  # by state
    rooms_done: int | None = None  # since the worker's start, as the next ones
    rooms_failed: int | None = None
    rooms_cancelled: int | None = None
    sessions: dict[str, int] | None = None  # with peers, by transport
    slots: SlotsStatus | None = None
    sparse_slots: SlotsStatus | None = None  # for HiSparse requests, where they have their own
    quarantined_bytes: int | None = None
    kv_bytes: int | None = None  # since the start
    kv_gb_s: float | None = None  # 10^9 bytes a second of rooms that have landed
    tokens_s: float | None = None  # prefill: of prompts that have landed; decode: generated
    prefix_hit_ratio: float | None = None
    hot_hit_ratio: float | None = None
    hisparse_running: int | None = None
    hisparse_waiting: int | None = None


class RouterStatus(Struct, frozen=True, kw_only=True):
    """The router's own figures. Totals count since its start."""

    node: str
    version: str
    engine: str  # pdtransfer, vllm or sglang
    ready: bool
    draining: bool
    overloaded: bool = False  # new requests are refused
    uptime_s: float
    models: list[str]
    requests_open: int
    requests_s: float | None = None  # answered
    rooms: dict[str, int]  # by what the client waits for
    retries: int
    answers: dict[str, int]  # by HTTP status
    first_token_ms: dict[str, float] | None = None  # quantiles of the latest requests: p50, p99


class TotalsStatus(Struct, frozen=True, kw_only=True):
    """Of all workers that report it together."""

    prompt_tokens_s: float | None = None
    generated_tokens_s: float | None = None
    kv_gb_s: float | None = None  # landed at decode
    quarantined_bytes: int | None = None

    @classmethod
    def of(cls, workers: Sequence[WorkerStatus]) -> TotalsStatus:
        """Adds up what the workers report; None where none of them reports it."""
        prefills, decodes = ([worker for worker in workers if worker.role == role] for role in ("prefill", "decode"))
        return cls(
            prompt_tokens_s=_sum(worker.tokens_s for worker in prefills),
            generated_tokens_s=_sum(worker.tokens_s for worker in decodes),
            kv_gb_s=_sum(worker.kv_gb_s for worker in decodes),
            quarantined_bytes=_sum(worker.quarantined_bytes for worker in decodes),
        )


class FailureStatus(Struct, frozen=True, kw_only=True):
    """A request, or one attempt at it, that failed; or several in a row that differ in their ids alone."""

    count: int = 1
    time: float  # of the last one: seconds since the epoch, by the router's clock
    room: str | None = None
    request_id: str | None = None
    cause: str
    detail: str
    status: int | None = None  # of the answer; None for an attempt that was retried
    prefill: str | None = None
    decode: str | None = None
    retried: bool = False


class FleetStatus(Struct, frozen=True, kw_only=True):
    """The whole document."""

    schema: int = SCHEMA
    time: float  # when it was made, in seconds since the epoch
    router: RouterStatus
    totals: TotalsStatus
    workers: list[WorkerStatus]
    failures: list[FailureStatus]  # newest first


def _sum(figures: Iterable[Figure | None]) -> Figure | None:
    given = [figure for figure in figures if figure is not None]
    return cast("Figure", sum(given)) if given else None
