"""When decode's scheduler admits a request. SGLang does once its prompt and --num-reserved-decode-tokens more are free,
and lets none pass one that came before it."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import logging
import time
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Any

from sglang.srt.disaggregation import utils

from .dialect import HAS

log = logging.getLogger(f"sglang.srt.{__name__}")

PASSED_MAX = 64  # requests that may pass the first one that waits, so that it is admitted in the end
LOGGED_S = 30.0  # between two lines on a wait that goes on
BRIEF_S = 1.0  # a wait that no line is worth


def capacity(scheduler: Any) -> int:
    """Tokens of the pool from which requests are admitted: with HiSparse the host's."""
    total = scheduler.max_total_num_tokens
    runner = scheduler.tp_worker.model_runner
    return getattr(runner, "max_token_pool_size", total) if scheduler.enable_hisparse else total


def context_tokens(scheduler: Any, *, reserved: int) -> int:
    """Tokens of a prompt and its answer that this engine takes at most, whatever else it has to do."""
    page_size = scheduler.page_size
    return max(1, min(scheduler.max_req_input_len, (capacity(scheduler) - reserved) // page_size * page_size))


def why_never(queue: Any, req: Any) -> str:
    """Why a new request can never be admitted, empty where it can. A pool whose parts share their bytes counts with the
    reserve itself."""
    needed, _ = queue._prealloc_required_tokens(req)  # noqa: SLF001 -- what SGLang compares with what is free
    total, allocator = capacity(queue.scheduler), queue.token_to_kv_pool_allocator
    has_ceiling = "prealloc_ceiling" in HAS and allocator.prealloc_ceiling_fits(needed, needed) is not None
    if req.output_ids or needed <= total or has_ceiling:
        return ""
    reserved = queue.num_reserved_decode_tokens
    return (
        f"a prompt of {len(req.origin_input_ids)} tokens and --num-reserved-decode-tokens {reserved} need {needed} "
        f"tokens in whole pages, decode's KV cache has {total}: use a shorter prompt, or start decode with a smaller "
        "reserve or a larger --max-total-tokens"
    )


def waiting(queue: Any) -> list[Any]:
    """The requests that prefill is ready to send, and that decode has no place for; then those that it has taken back.
    The first is the one that the others wait for."""
    return [request.req for request in queue.queue if request.waiting_for_input] + list(queue.retracted_queue)


def shown_wait(queue: Any) -> dict[str, object]:
    """How many wait, and for what, as JSON."""
    requests = waiting(queue)
    if not requests:
        return {"requests": 0, "why": ""}
    needed, _ = queue._prealloc_required_tokens(requests[0])  # noqa: SLF001
    places, reserved = queue.req_to_token_pool.available_size(), queue.num_reserved_decode_tokens
    free, total = queue.token_to_kv_pool_allocator.available_size(), capacity(queue.scheduler)
    why = (
        f"the first needs {needed} tokens, --num-reserved-decode-tokens {reserved} among them: {free} of {total} are "
        f"free, and each running request reserves as many; {places} more requests may run"
    )
    return {"requests": len(requests), "why": why}


def exceeds_capacity(original: Any, queue: Any, req: Any) -> bool:
    """SGLang refuses a prompt that is larger than the pool. One that fits it without the reserve alone would wait, and
    all behind it."""
    if original(queue, req):
        return True
    if not (why := why_never(queue, req)):
        return False
    log.error("%s: %s", req.rid, why)
    utils.prepare_abort(req, why, status_code=HTTPStatus.BAD_REQUEST)
    queue.scheduler.output_streamer.stream_output([req], req.return_logprob)
    return True


def pop_admitted(original: Any, queue: Any, *given: Any, **named: Any) -> Any:
    """What is admitted now. Where the first request does not fit and none was admitted, which SGLang counts within one
    call alone, those behind it that fit pass it. They are as many on each rank: nothing here depends on a clock."""
    original = partial(_pop_with_hisparse, original) if queue.scheduler.enable_hisparse else original
    admitted, failed = original(queue, *given, **named)
    first, *behind = waiting(queue) or [None]
    may_pass = not admitted and queue.pp_size == 1 and not given and not named
    if behind and may_pass and queue.req_to_token_pool.available_size() > 0:
        head, passed = getattr(queue, "pdtransfer_passed", ("", 0))
        passed = passed if head == first.rid else 0
        free = queue._allocatable_token_budgets()  # noqa: SLF001 -- what SGLang compares
        fits = (req.rid for req in behind if queue._prealloc_required_tokens(req)[0] <= free)  # noqa: SLF001
        if fits := list(islice(fits, PASSED_MAX - passed)):
            more, others = original(queue, fits)
            admitted, failed, passed = admitted + more, failed + others, passed + len(more)
        queue.pdtransfer_passed = first.rid, passed
    _log(queue, first is not None)
    return admitted, failed


def _pop_with_hisparse(original: Any, queue: Any, *given: Any, **named: Any) -> Any:
    """What SGLang admits. Where some KV stays on the device it passes the device's pages beside the host's. It checks
    by its name that the backend takes both: its own Mooncake backend, or this one. The call has no other use of it."""
    ours = queue.transfer_backend
    try:
        queue.transfer_backend = utils.TransferBackend.MOONCAKE
        return original(queue, *given, **named)
    finally:
        queue.transfer_backend = ours


def admit_direct(original: Any, coordinator: Any, req: Any) -> None:
    """A request's KV has arrived in HiSparse's host pool. If it has more rows than the buffer on the GPU, attention
    reads the newest one from a place behind the buffer. A step that computes a row leaves it there: in DeepSeek V4
    every fourth one. Before the first of these the newest row is the prompt's last, which SGLang does not load."""
    original(coordinator, req)
    newest, rows = coordinator.device_buffer_size, coordinator.host_token_len(req.kv.kv_allocated_len)
    if coordinator.is_dsv4_hisparse and rows > newest:
        index, pool = req.kv.req_pool_idx, coordinator.mem_pool_device
        last = coordinator.req_to_host_pool[index, rows - 1 : rows]
        place = coordinator.req_to_device_buffer[index, newest : newest + 1]
        for layer in range(pool.layer_num):
            coordinator.mem_pool_host.load_to_device_per_layer(pool, last, place, layer, io_backend="kernel")


def _log(queue: Any, waits: bool) -> None:
    """A line when a wait becomes long, again and again while it lasts, and when it has ended."""
    if queue.tp_rank:
        return
    now = time.monotonic()
    since, logged = getattr(queue, "pdtransfer_waits", (0.0, 0.0))
    if not waits:
        if logged:
            log.info("no request waits for memory of decode any more, after %.1f s", now - since)
        since = logged = 0.0
    else:
        since = since or now
        if now - since >= BRIEF_S and now - logged >= LOGGED_S:
            wait, logged = shown_wait(queue), now
            log.warning("%d requests wait for memory of decode: %s", wait["requests"], wait["why"])
    queue.pdtransfer_waits = since, logged
