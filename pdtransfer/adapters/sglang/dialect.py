"""What SGLang's versions before 0.5.23 lack, under the names of 0.5.23. `backend` and `hooks` do not depend on the
version."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import sglang
import torch
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base import conn as base
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.mem_cache.pool_host import common as pool_host
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs

from ...errors import ConfigError
from ..kit.versions import SGLANG_SINCE, capabilities
from .options import drafter_with_kv

_VERSION: str = sglang.__version__  # pyright: ignore[reportAttributeAccessIssue]
HAS = capabilities("SGLang", SGLANG_SINCE, _VERSION)
DEFERS_RELEASES = "defers_releases" in HAS
_HOST_RECEIVE = "disaggregation_decode_host_receive_threshold"
# The attribute of a host buffer with its ranges that are registered with the GPU.
REGISTERED_RANGES: str = getattr(pool_host, "_CUDA_HOST_REGISTERED_RANGES_ATTR", "")


def check_features(server_args: Any) -> None:
    """Raises ConfigError for what this version cannot hand over, though later ones can."""
    decodes = server_args.disaggregation_mode == "decode"
    if drafter_with_kv(server_args):
        require("draft_buffers", "speculative_algorithm", "the buffers of a draft model")
    if server_args.pp_size > 1 and decodes:
        require("decode_stages", "pp_size", "to each stage of a decode engine how a request has ended")
    if server_args.enable_hierarchical_cache and decodes:
        require("cached_beginnings", "enable_hierarchical_cache", "a request whose cached beginning cannot be loaded")


def require(name: str, option: str, missing: str) -> None:
    """Raises ConfigError for what this version does not report, though later ones do."""
    if name not in HAS:
        first = SGLANG_SINCE[name].text
        raise ConfigError(f"{option}: SGLang {_VERSION} does not report {missing}; {first} is the first that does")


def receives_on_host(disagg: Any) -> bool:
    """True if requests may land in the host pool. The default threshold means never: 0 in 0.5.21, 1 in later ones."""
    options = signature(ServerArgs).parameters
    return "destinations" in HAS and getattr(disagg, _HOST_RECEIVE) != options[_HOST_RECEIVE].default


def draft_scope(worker: Any, server_args: Any) -> AbstractContextManager[object]:
    """The context in which SGLang allocates a drafter's cache. DFLASH's heads may be shared out among other ranks than
    the model's, with DP attention."""
    shares_out = "draft_layouts" in HAS and drafter_with_kv(server_args) == "DFLASH"
    if not shares_out or (layout := worker.draft_parallel_layout) is None:
        return nullcontext()
    from sglang.srt.speculative.spec_utils import draft_tp_context

    return draft_tp_context(layout)


def draft_runners(worker: Any, server_args: Any) -> Sequence[Any]:
    """The runners of the draft models whose caches SGLang allocates after the model's: none for drafts without KV."""
    if not (drafter := drafter_with_kv(server_args)):
        return ()
    return _required(worker, "_draft_model_runners", f"speculative_algorithm: {drafter}")()


def first_layer(pool: Any) -> int:
    """The number of the first layer of a pipeline stage, whose KV pool this is."""
    return _required(pool, "start_layer", "pp_size")


def _required(owner: Any, name: str, option: str) -> Any:
    """What this module knows by a name of SGLang's own. Raises ConfigError where it has another name."""
    if not hasattr(owner, name):
        raise ConfigError(f"{option}: {type(owner).__name__} of SGLang {_VERSION} has no {name}: leave out this option")
    return getattr(owner, name)


def buffer_infos(pool: Any) -> Any:
    """Addresses, lengths and item lengths of a pool's buffers that are transferred."""
    if "transfer_buffers" in HAS:
        return utils.get_kv_transfer_buf_infos(pool)
    return pool.get_contiguous_buf_infos()


def complete(args: Any) -> None:
    """Gives SGLang's KVArgs what only later versions' have, as it is in engines of this one."""
    if "draft_buffers" not in HAS:
        args.num_draft_entries = 0
    if "window_layouts" not in HAS:
        args.swa_kv_cache_layout = "nhd"


def check_context_parallelism(manager: Any) -> None:
    """Raises ConfigError where the ranks of context parallelism differ in what they hold. Without these options SGLang
    gathers the KV of all tokens on each of prefill's ranks before it writes its pool."""
    parallel = get_parallel()
    spread = {
        "dcp_size": ("tokens", manager.dcp_size > 1),
        "enable_kv_cache_sharding": ("pages", getattr(manager, "kv_shard_size", 1) > 1),
        "enable_dsa_cache_layer_split": ("layers", getattr(parallel, "enable_dsa_cache_layer_split", False)),
        "enable_prefill_cp": ("heads of its states", getattr(parallel, "enable_cp_tp_group_sharing", False)),
    }
    for option, (part, is_spread) in spread.items():
        if is_spread:
            raise ConfigError(f"{option}: a cache whose {part} are spread over ranks is not supported")
    if manager.attn_cp_size > 1 and manager.disaggregation_mode.value == "decode":
        raise ConfigError("attn_cp_size: SGLang's decode engines receive on one rank of context parallelism")


class _OlderManager(common.CommonKVManager):
    """The states of requests. Before 0.5.20 a later state replaces Failed, and makes a request again that was cleared.
    Prefill would wait without end for one that failed while its last pages were computed."""

    def update_status(self, bootstrap_room: int, status: Any) -> None:
        state = self.request_status.get(bootstrap_room)
        first = status in (base.KVPoll.Bootstrapping, base.KVPoll.WaitingForInput)
        if first if state is None else state != base.KVPoll.Failed:
            super().update_status(bootstrap_room, status)


class _FailingRequest:
    """What a request raises that has failed."""

    def failure_exception(self: Any) -> None:
        self.conclude_state = base.KVPoll.Failed
        self.clear()
        with self.kv_mgr.failure_lock:
            reason = self.kv_mgr.failure_records.pop(self.bootstrap_room, None)
        text = reason or "Failed due to an unknown reason from another rank"
        raise common.KVTransferError(self.bootstrap_room, text, is_from_another_rank=reason is None)


class _OlderSender(_FailingRequest, common.CommonKVSender):
    """Prefill's request, as 0.5.23 has it."""

    def send(self: Any, kv_indices: Any, state_indices: Any = None, *_: Any, **__: Any) -> None:
        if self.conclude_state in (base.KVPoll.Success, base.KVPoll.Failed):
            return
        kv_indices, index_slice, is_last_chunk, should_skip = self._prepare_send_indices(kv_indices, state_indices)
        if should_skip:
            return
        self.kv_mgr.add_transfer_request(
            self.bootstrap_room, kv_indices, index_slice, is_last_chunk,
            aux_index=self.aux_index if is_last_chunk else None,
            state_indices=state_indices if is_last_chunk else None,
        )  # fmt: skip

    def poll(self: Any) -> Any:
        return self._poll_with_status(self.kv_mgr.check_status)

    def poll_pp_consensus(self: Any) -> Any:
        """On the first of several pipeline stages, of 0.5.22: the state at all of them."""
        return self._poll_with_status(self.kv_mgr.check_status_pp_consensus)

    def _poll_with_status(self: Any, check_status: Callable[[int], Any]) -> Any:
        if self.conclude_state is not None:
            return self.conclude_state
        is_known = self.bootstrap_room in self.kv_mgr.request_status
        state = check_status(self.bootstrap_room) if is_known else base.KVPoll.Failed
        if state == base.KVPoll.Bootstrapping:
            self.init_time = self.init_time or time.time()
            if (ended := self._check_bootstrap_timeout()) is not None:  # Failed, which is 0
                state = ended
        if state in (base.KVPoll.Success, base.KVPoll.Failed):
            self.conclude_state = state
        return state


class _ReceivingRequest(base.BaseKVReceiver):
    """Decode's request: what CommonKVReceiver has not got, which comes before this class."""

    def poll(self: Any) -> Any:
        if self.conclude_state is not None:
            return self.conclude_state
        state = self.kv_mgr.check_status(self.bootstrap_room)
        if state == base.KVPoll.WaitingForInput and (ended := self._check_waiting_timeout()) is not None:
            state = ended
        if state in (base.KVPoll.Success, base.KVPoll.Failed):
            self.conclude_state = state
        return state

    def ensure_abort_notified(self: Any, **_: Any) -> None:
        """Informs the prefill ranks once that the request has failed."""
        if not self.abort_notified and getattr(self, "bootstrap_infos", None) is not None:
            self._send_abort_notification()
            self.abort_notified = True

    def invalidate_cached_bootstrap_infos(self: Any) -> None:
        """Forgets where the ranks of the prefill server listen."""
        pool = self.kv_mgr.connection_pool
        for key in [key for key in pool if key.startswith(f"{self.bootstrap_addr}_")]:
            del pool[key]


class _OlderReceiver(_FailingRequest, common.CommonKVReceiver, _ReceivingRequest):
    """Decode's request, as 0.5.23 has it."""


KVManager: Any = common.CommonKVManager if "complete" in HAS else _OlderManager
KVSender: Any = common.CommonKVSender if "complete" in HAS else _OlderSender
KVReceiver: Any = common.CommonKVReceiver if "complete" in HAS else _OlderReceiver


def _poll_transfers(original: Any, queue: Any) -> list[int]:
    """The states of decode's requests. A version may free the pages of a failed one at once, or rank by rank. It learns
    of the failure when nobody can write its pages at any rank."""
    states = original(queue)
    failed = [
        index
        for index, (state, request) in enumerate(zip(states, queue.queue, strict=True))
        if state == base.KVPoll.Failed and isinstance(request.kv_receiver, KVReceiver)
    ]
    if not failed:  # on all ranks, which see the same states
        return states
    receivers = [queue.queue[index].kv_receiver for index in failed]
    for receiver in receivers:
        receiver.ensure_abort_notified()
    drained = torch.tensor([receiver.is_abort_release_safe() for receiver in receivers], dtype=torch.uint8)
    torch.distributed.all_reduce(drained, op=torch.distributed.ReduceOp.MIN, group=queue.gloo_group)
    for index, safe in zip(failed, drained.tolist(), strict=True):
        if not safe:
            states[index] = base.KVPoll.Transferring
    return states


def _pop_transferred(original: Any, queue: Any, *given: Any, **named: Any) -> Any:
    """What has landed. 0.5.21 and 0.5.22 defer the release of a failed request of the host pool in any case. It is
    released before the cache can be flushed: nobody writes its pages any more, or it would not have failed."""
    ours = any(isinstance(request.kv_receiver, KVReceiver) for request in queue.queue)
    popped = original(queue, *given, **named)
    if ours and "resolves_releases" in HAS:
        queue.resolve_deferred_releases()
    return popped


_QUEUE = "sglang.srt.disaggregation.decode.DecodeTransferQueue"
# Beside the hooks for all versions.
HOOKS: tuple[tuple[str, Any], ...] = () if "complete" in HAS else (
    (f"{_QUEUE}._poll_with_metadata_gate", _poll_transfers), (f"{_QUEUE}._poll_with_staging", _poll_transfers),
    (f"{_QUEUE}.pop_transferred", _pop_transferred),
)  # fmt: skip
