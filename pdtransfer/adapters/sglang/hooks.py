"""What the plugin changes of SGLang, by SGLang's own hooks: the backend's name, its classes, and where KV lies."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from functools import partial, wraps
from typing import Any

import torch
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_disagg, get_exec, get_memory, get_parallel
from sglang.srt.server_args import add_disagg_transfer_backend_choices
from torch.distributed import ReduceOp

from ..kit.cache_memory import CacheMemory, made_in_one_piece
from ..kit.peers import RequestError
from . import admission, dialect, process
from .options import Ended, check_options, ended_here, ended_so_far
from .peers import NO_SERVER, dp_ranks, server_fields
from .pools import Buffers, extent_of

NAME = "pdtransfer"

_ENDED = (KVPoll.Success, KVPoll.Failed)


def register() -> None:
    """Adds the backend."""
    add_disagg_transfer_backend_choices([NAME])
    kind = utils.TransferBackend
    member = object.__new__(kind)
    member._name_, member._value_, member._sort_order_ = NAME.upper(), NAME, len(kind._member_names_)
    kind._member_names_.append(NAME.upper())
    kind._member_map_[NAME.upper()] = kind._value2member_map_[NAME] = member
    for target, hook in HOOKS:
        HookRegistry.register(target, hook, HookType.AROUND)


def _is_ours() -> bool:
    disagg = get_disagg()
    return disagg.disaggregation_mode != "null" and disagg.disaggregation_transfer_backend == NAME


def _where_ours(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that leaves engines alone whose transfer backend is another one."""

    @wraps(hook)
    def around(original: Any, *args: Any, **named: Any) -> Any:
        return hook(original, *args, **named) if _is_ours() else original(*args, **named)

    return around


def _get_kv_class(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    if transfer_backend.value != NAME:
        return original(transfer_backend, class_type)
    from . import backend

    return {
        utils.KVClassType.KVARGS: KVArgs,
        utils.KVClassType.MANAGER: backend.Manager,
        utils.KVClassType.SENDER: backend.Sender,
        utils.KVClassType.RECEIVER: backend.Receiver,
        utils.KVClassType.BOOTSTRAP_SERVER: backend.BootstrapServer,
    }[class_type]


def _receives_on_host() -> bool:
    """True if requests land in SGLang's host pool: some of them, or with HiSparse the KV cache of all."""
    decodes = _is_ours() and get_disagg().disaggregation_mode == "decode"
    return decodes and (dialect.receives_on_host(get_disagg()) or get_memory().enable_hisparse)


@_where_ours
def _init_memory_pools(original: Any, scheduler: Any) -> Any:
    """All caches are made: it is known which draft models have one. Raises ConfigError for what is not transferred."""
    dialect.check_features(scheduler.server_args)
    check_options(scheduler.server_args, on_host=dialect.receives_on_host(get_disagg()))
    worker = getattr(scheduler, "draft_worker", None)
    process.draft_runners = dialect.draft_runners(worker, scheduler.server_args)
    process.draft_scope = partial(dialect.draft_scope, worker, scheduler.server_args)
    return original(scheduler)


def _derive_pool_sizes(original: Any, configurator: Any, *, config: Any) -> Any:
    process.pool_config = config
    return original(configurator, config=config)


@_where_ours
def _init_pools(original: Any, configurator: Any, **given: Any) -> Any:
    """The KV cache is made, in one allocation that can be shared, and later those of draft models, in the same one.
    With its memory saver SGLang makes it as usual: the saver gives back to the GPU what it has seen being allocated."""
    if configurator.is_draft_worker:
        with process.memory.pooled_later() if process.memory else nullcontext():
            return original(configurator, **given)

    def make_drafts(model_pools: Any) -> None:
        with process.draft_scope():
            for runner in process.draft_runners:
                runner.init_kv_cache_configurator()
                drafts = runner.kv_cache_configurator
                sizes = drafts._derive_pool_sizes(config=process.pool_config)  # noqa: SLF001 -- as its `configure` does
                original(
                    drafts, sizes=sizes, req_to_token_pool=model_pools.req_to_token_pool,
                    token_to_kv_pool_allocator=model_pools.token_to_kv_pool_allocator,
                )  # fmt: skip

    on_card = configurator.device == "cuda" and not get_exec().features.enable_memory_saver
    if on_card or configurator.device == "cpu":
        process.memory, result = made_in_one_piece(
            lambda: original(configurator, **given), torch.device(configurator.device), has_beside=_receives_on_host(),
            make_later=make_drafts,
        )  # fmt: skip
    else:
        result = original(configurator, **given)
    if get_parallel().pp_size > 1:
        process.first_layer = dialect.first_layer(result.token_to_kv_pool)  # prefill does not ask for it
    if _receives_on_host():
        pool = result.token_to_kv_pool
        states = "get_state_buf_infos", "get_request_state_buf_infos"
        infos = [dialect.buffer_infos(pool), *(getattr(pool, name)() for name in states if hasattr(pool, name))]
        buffers = [Buffers(*info) for info in infos]
        process.memory = process.memory or CacheMemory(
            [size for pool_buffers in buffers for size in pool_buffers.byte_counts]
        )
        device, compressed = configurator.gpu_id if configurator.device == "cuda" else None, hasattr(pool, "c4_kv_pool")
        process.extent = extent_of(buffers, device)
        if compressed or process.draft_runners:  # more of the cache than these buffers is named later
            process.extent = process.memory.pooled_extent or process.extent
        process.host_tensors = pool.c4_kv_pool.layer_num if compressed else 1
    return result


def _allocate(original: Any, allocator: Any, dims: Any, dtype: Any, device: str = "cpu") -> Any:
    """The host pool is made, where peers can write; a second one, as of sliding windows, elsewhere."""
    memory, extent, count = process.memory, process.extent, process.host_tensors
    if memory is not None and extent is not None and not memory.has_beside() and _receives_on_host():
        byte_count, host_buffer_gib = math.prod(dims) * dtype.itemsize, process.settings().host_buffer_gib
        beside = memory.beside(extent, byte_count * count, host_buffer_gib=host_buffer_gib)
        process.host_memory = list(beside.view(count, byte_count))
    if not process.host_memory:
        return original(allocator, dims, dtype=dtype, device=device)
    allocator.dims, allocator.dtype = dims, dtype
    return process.host_memory.pop(0).view(dtype).view(dims)


def _cuda_host_register(original: Any, buffer: Any, *args: Any) -> None:
    """Memory of ours is registered with the GPU already, and is not SGLang's to unregister."""
    if process.memory is None or not process.memory.has_beside(buffer.data_ptr()):
        return original(buffer, *args)
    if "registered_ranges" in dialect.HAS:
        setattr(buffer, dialect.REGISTERED_RANGES, [])
    return None


@_where_ours
def _init_transfer_queue(original: Any, queue: Any, *args: Any, **named: Any) -> None:
    """Pages of a failed request are held until the proof is there, for however long: no time proves anything."""
    original(queue, *args, **named)
    queue.enable_deferred_kv_release, queue.deferred_kv_release_timeout = dialect.DEFERS_RELEASES, math.inf


@_where_ours
def _pop_bootstrapped(original: Any, queue: Any, *args: Any, **named: Any) -> Any:
    """With pipeline stages SGLang looks up the states of requests that wait for decode, without a call for any of them.
    What has become of them is learnt here, on each stage."""
    queue.kv_manager.turn()
    return original(queue, *args, **named)


@_where_ours
def _run_batch(original: Any, scheduler: Any, batch: Any, *args: Any, **named: Any) -> Any:
    """On prefill, once a step is launched: the pages of its chunks are offered behind an event, before SGLang has its
    result. A drafter may compute more after this."""
    result = original(scheduler, batch, *args, **named)
    if (
        get_disagg().disaggregation_mode != "prefill"
        or get_parallel().pp_size > 1
        or scheduler.draft_worker is not None
    ):
        return result
    page_size, offers = scheduler.token_to_kv_pool_allocator.page_size, list[tuple[Any, int, bool, torch.Tensor]]()
    for request in batch.reqs:
        sender: Any = getattr(request, "disagg_kv_sender", None)
        end = len(request.origin_input_ids)
        if not isinstance(sender, dialect.KVSender) or request.pending_bootstrap or sender.kv_mgr.is_dummy_cp_rank:
            continue
        if not (last := request.extend_end >= end):
            end = request.extend_end // page_size * page_size
        start = max(request.start_send_idx, sender.offered)
        if start % page_size == 0 and start < end:
            indices = scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx, start:end:page_size]
            offers.append((sender, start, last, indices))
    if not offers:
        return result
    event = torch.cuda.Event() if scheduler.device == "cuda" else None
    if event is not None:
        event.record(scheduler.forward_stream if scheduler.enable_overlap else torch.cuda.current_stream())
    indices = torch.cat([offer[-1] for offer in offers])
    pages = (scheduler.token_to_kv_pool_allocator.translate_kv_indices_for_transfer(indices) // page_size).cpu()
    for (sender, start, last, _), part in zip(offers, pages.split([len(offer[-1]) for offer in offers]), strict=True):
        sender.kv_mgr.sending.push_ahead(sender.bootstrap_room, part.numpy(), start=start, after=event, last=last)
    return result


def _get_transferred(original: Any, scheduler: Any) -> Any:
    """On a stage of decode: which requests have ended at this stage and those before it, and how."""
    if process.decode is None:
        return original(scheduler)
    queue, group = scheduler.disagg_decode_transfer_queue, scheduler.attn_tp_cpu_group
    requests = queue.queue
    states = [_polled(request, queue.metadata_buffers.bootstrap_room) for request in requests]
    ended = utils.all_reduce_flags([int(state in _ENDED) for state in states], group, ReduceOp.MIN)
    failed = utils.all_reduce_flags([int(state == KVPoll.Failed) for state in states], group, ReduceOp.MAX)
    here = ended_here(
        (request.req.rid, bool(ended[index]), bool(failed[index]), getattr(request.kv_receiver, "failure", ""))
        for index, request in enumerate(requests)
    )
    if scheduler.pp_group.is_first_rank:
        return here
    before = scheduler._pp_recv_pyobj_from_prev_stage()  # noqa: SLF001 -- what the previous stage has sent waits there
    return ended_so_far(dict(before), here)  # what is empty arrives as a list


def _polled(request: Any, rooms: Any) -> Any:
    """The state of a request. It fails if what prefill sent beside its KV is another's, or nobody's: SGLang would end
    it at this stage alone, or at none. `rooms` has the bootstrap_room in each row of that, (rows, 8)."""
    receiver, state = request.kv_receiver, request.kv_receiver.poll()
    if state == KVPoll.Success and isinstance(receiver, dialect.KVReceiver):
        room = int(rooms[request.metadata_buffer_index, 0])
        if room != request.req.bootstrap_room:
            receiver.fail(f"prefill sent the metadata of bootstrap_room {room}, not of {request.req.bootstrap_room}")
            return receiver.poll()
    return state


def _process_transferred(original: Any, scheduler: Any, ended: Ended | None) -> Any:
    """On a stage of decode: what has ended at all stages ends at this one, and what has, then at those behind it.
    SGLang itself passes on what has landed alone."""
    if process.decode is None or ended is None:
        return original(scheduler, ended)
    ended, queue = dict(ended), scheduler.disagg_decode_transfer_queue
    for request in queue.queue:
        if (reason := ended.get(request.req.rid)) and isinstance(request.kv_receiver, dialect.KVReceiver):
            request.kv_receiver.fail(reason)
    original(scheduler, ended)
    waiting = {request.req.rid for request in queue.queue}
    return {rid: reason for rid, reason in ended.items() if rid not in waiting}


def _init_server_info(original: Any, info: Any, /, *args: Any, **answer: Any) -> None:
    """On decode what a bootstrap server has answered of a prefill server. SGLang compares its fields before the manager
    sees them, and meets none of another type: `wrong` keeps the reason for the manager, which refuses the server."""
    if process.decode is None:
        original(info, *args, **answer)
        return
    info.wrong = ""
    try:
        server = server_fields(answer)
    except RequestError as error:
        server, info.wrong = NO_SERVER, str(error)
    names = {field.name for field in fields(info)}  # of this version's
    original(info, **{name: value for name, value in server.items() if name in names})


def _query_prefill_dp_ranks(original: Any, bootstrap_addr: str, bootstrap_rooms: list[int]) -> Any:
    """Which data parallel rank has each room: what is no such answer fails the rooms that were asked for."""
    answer = original(bootstrap_addr, bootstrap_rooms)
    if process.decode is None:
        return answer
    try:
        return dp_ranks(answer)
    except RequestError as error:
        process.decode.refuse(bootstrap_rooms, f"prefill at {bootstrap_addr} is refused: {error}")
        return {}


def _get_internal_state(original: Any, scheduler: Any, *args: Any, **named: Any) -> Any:
    """What /server_info reports of this scheduler: what peers compare of its rank, how long a request may be, and which
    wait for decode's memory."""
    answer = original(scheduler, *args, **named)
    if process.identity is not None:
        queue = scheduler.disagg_decode_prealloc_queue if process.decode is not None else None
        reserved = 0 if queue is None else queue.num_reserved_decode_tokens
        shown = process.identity | {"context_tokens": admission.context_tokens(scheduler, reserved=reserved)}
        answer.internal_state[NAME] = shown if queue is None else shown | {"waiting": admission.shown_wait(queue)}
    return answer


_DECODE = "sglang.srt.disaggregation.decode"
_STAGES = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin"
_COORDINATOR = "sglang.srt.managers.hisparse_coordinator.HiSparseCoordinator"
# Functions of SGLang's, and what is called around each.
STAGE_HOOKS = (
    (f"{_STAGES}._pp_pd_get_decode_transferred_ids", _get_transferred),
    (f"{_STAGES}.process_decode_transfer_queue", _process_transferred),
)
HOOKS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("sglang.srt.disaggregation.utils.get_kv_class", _get_kv_class),
    ("sglang.srt.managers.scheduler.Scheduler.init_memory_pools", _init_memory_pools),
    ("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._derive_pool_sizes", _derive_pool_sizes),
    ("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._init_pools", _init_pools),
    ("sglang.srt.mem_cache.pool_host.common.HostTensorAllocator.allocate", _allocate),
    ("sglang.srt.mem_cache.pool_host.common._cuda_host_register", _cuda_host_register),
    (f"{_DECODE}.DecodeTransferQueue.__init__", _init_transfer_queue),
    (f"{_DECODE}.DecodePreallocQueue._check_if_req_exceed_kv_capacity", _where_ours(admission.exceeds_capacity)),
    (f"{_DECODE}.DecodePreallocQueue.pop_preallocated", _where_ours(admission.pop_admitted)),
    (f"{_COORDINATOR}.admit_request_direct", _where_ours(admission.admit_direct)),
    ("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.pop_bootstrapped", _pop_bootstrapped),
    ("sglang.srt.disaggregation.common.conn.PrefillServerInfo.__init__", _init_server_info),
    ("sglang.srt.disaggregation.common.conn.CommonKVReceiver.query_prefill_dp_ranks", _query_prefill_dp_ranks),
    ("sglang.srt.managers.scheduler.Scheduler.get_internal_state", _get_internal_state),
    *dialect.HOOKS,
    *((("sglang.srt.managers.scheduler.Scheduler.run_batch", _run_batch),) if "complete" in dialect.HAS else ()),
    *(STAGE_HOOKS if "decode_stages" in dialect.HAS else ()),
)
