"""PDTransferConnector: vLLM's calls, given to the scheduler's or the worker's side of this engine."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from ...client.api import weights_digest
from ...errors import ConfigError
from ...wire import Ranks
from ..kit.cache_memory import CacheMemory, Extent
from ..kit.kinds import Locate
from ..kit.peers import Reachable
from ..kit.rank import Rank
from ..kit.versions import VLLM_SINCE
from . import dialect
from .bootstrap import Bootstrap, name_of
from .drafter import drafter_layers, layers_with_kv
from .kinds import dcp_sizes_of, host_pool_of, keep_blocks_whole, sparse_indices, tables_of
from .kv_scales import check_cache_dtype
from .orders import Orders, RankRuns
from .pools import Pools, pools, range_of, with_heads
from .scheduler import SchedulerSide
from .settings import ConnectorSettings
from .stats import TransferMetrics, TransferStats
from .worker import Results, WorkerSide

log = dialect.log


@dataclass
class OrdersMetadata(base.KVConnectorMetadata):
    """What the scheduler sends to the workers with each step."""

    orders: Orders


class Announced(RankRuns, base.KVConnectorHandshakeMetadata):
    """RankRuns, as vLLM carries it from a worker to the scheduler."""


class PDTransferConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """Hands requests over from prefill engines to decode engines.

    Prefill's KV leaves layer by layer as it is computed, and lands in the blocks that decode's scheduler chose.
    """

    if "hit_source" in dialect.HAS:
        _cache_hit_source = base.CacheHitSource.P2P  # how vLLM's metrics label the tokens that were handed over

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        dialect.join_logs()
        check_cache_dtype(vllm_config.cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = _settings_of(transfer.kv_connector_extra_config)
        self._sends, self._receives = transfer.is_kv_producer, transfer.is_kv_consumer
        parallel = vllm_config.parallel_config
        needs = "" if "prefill_context" in dialect.HAS else VLLM_SINCE["prefill_context"].text
        dcp_sizes = dcp_sizes_of(parallel, self._settings.dcp_size, receives=self._receives, needs=needs)
        self._groups = dialect.groups_of(kv_cache_config, dcp_sizes)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._bootstrap: Bootstrap | None = None
        self._announced: Announced | None = None
        self._failed_blocks: set[int] = set()
        self._pooled: AbstractContextManager | None = None
        self._on_card = False
        if self._settings.bootstrap and parallel.data_parallel_size > 1:
            raise ConfigError("bootstrap: each data parallel rank is an engine of its own: only one can listen there")
        if role is base.KVConnectorRole.SCHEDULER:
            _, allowed = self._settings.keys_of(Ranks())
            self._scheduler = SchedulerSide(
                [group for group, _ in self._groups], engine_id=transfer.engine_id,
                tp_size=parallel.tensor_parallel_size, sends=self._sends, receives=self._receives,
                reachable=Reachable(allowed, self._settings.insecure),
            )  # fmt: skip
            return
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        keep_blocks_whole(parallel, specs, may_set="sets_interleave" in dialect.HAS)
        self._host_blocks, self._host_bytes = host_pool_of(kv_cache_config, sends=self._sends)
        self._memory = CacheMemory(dialect.sizes_of(kv_cache_config))
        self._on_cpu = vllm_config.device_config.device_type == "cpu"
        if "allocation_hook" not in dialect.HAS and (self._on_cpu or self._receives):
            # This version has no hook around the allocation, which follows at once and ends in register_kv_caches. It
            # would make a tensor a layer, and a GPU's memory can be named to peers as one allocation only.
            self._pooled = self._memory.pooled() if self._on_cpu else self._memory.pooled_on(torch.device("cuda"))
            self._pooled.__enter__()

    # Worker: memory

    def get_mem_pool_context(self) -> AbstractContextManager | None:
        """On the CPU vLLM's KV cache is allocated where peers can write, and HiSparse's host pool beside that of a GPU.
        On a GPU it is one allocation anyway."""
        if self._host_bytes:
            device = torch.device("cuda", torch.cuda.current_device())
            return self._memory.pooled_beside(device, self._host_bytes, host_buffer_gib=self._settings.host_buffer_gib)
        return self._memory.pooled() if self._on_cpu else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The KV cache is there: the clients start, where this rank has any."""
        if self._pooled is not None:
            self._pooled.__exit__(None, None, None)
            self._pooled = None
        if dialect.prefill_context_rank(self._vllm_config) == 0:
            transferred = {name for _, names in self._groups for name in names}
            self._start(with_heads({name: cache for name, cache in kv_caches.items() if name in transferred}))
            return
        self._worker = WorkerSide(
            pools=Pools((), {}, (), {}), prefill=None, decode=None, time_left_s=self._settings.time_left_s
        )  # fmt: skip
        log.info("pdtransfer prefill: rank 0 of prefill context parallelism has the same KV, and sends it")

    def _start(self, kv_caches: dict[str, torch.Tensor]) -> None:
        ranks = dialect.ranks_here(self._vllm_config)
        extent = _extent_of(kv_caches)
        for group, names in self._groups:
            if group.host and not all(self._memory.has_beside(kv_caches[name].data_ptr()) for name in names):
                raise ConfigError("HiSparseConnector: vLLM allocated its host pool where no peer can write")
        self._on_card = extent.device is not None
        kv = dialect.kv_views(kv_caches, self._groups)
        states = dialect.states_of(self._kv_cache_config, self._groups)
        indices = sparse_indices(self._kv_cache_config)
        facts = dialect.facts_of(self._vllm_config, kv)
        of_blocks = dialect.facts_of_blocks(self._vllm_config, kv, self._groups, indices)
        described_as = partial(
            pools, kv_caches, self._groups, blocks=self._kv_cache_config.num_blocks, host_blocks=self._host_blocks,
            heads=dialect.heads_of(self._vllm_config, ranks), states=states, indices=indices,
            totals=dialect.head_totals(self._vllm_config, self._kv_cache_config),
            late=drafter_layers(self._vllm_config, kv_caches),
        )  # fmt: skip

        def components(locate: Locate) -> Pools:
            by_row = described_as(kinds=kinds, locate=locate)
            if rows != "auto":
                return by_row
            return described_as(locate=locate).or_tokens(by_row, weights_digest(of_blocks).hex()[:16])

        settings, base = self._settings, self._memory.base(extent)
        target = self._memory.target(extent, host_buffer_gib=settings.host_buffer_gib) if self._receives else None
        # What is sent is described from where writers map it, and what is received from where it lands.
        locate: Locate = target.locate if target is not None and not self._sends else lambda _: (base, "dram")
        tokens_as = partial(described_as, locate=locate)
        rows, kinds = dialect.rows_of(settings.rows, self._vllm_config, kv, self._groups, tokens_as)
        if rows == "tokens":
            facts, of_blocks = dialect.facts_of_model(self._vllm_config, kv), {}
        elif rows == "blocks":
            facts |= of_blocks
        facts |= dialect.states_fact(self._kv_cache_config, self._groups, ranks.tp_size)
        facts |= dialect.scales_fact(self._vllm_config, kv, ranks)
        shown_rows = "blocks+tokens" if rows == "auto" else rows
        shown = dialect.shown_facts(self._vllm_config, kv, facts | of_blocks, shown_rows)
        described = components(locate)
        rank = Rank(
            settings=settings, name=f"{str(self._kv_transfer_config.engine_id)[:90]}-{ranks.pp_rank}-{ranks.tp_rank}",
            number=dialect.number_of(self._vllm_config, ranks), ranks=ranks, facts=facts, shown=shown,
            model=dialect.served_name(self._vllm_config), memory=self._memory, extent=extent,
        )  # fmt: skip
        prefill, decode, endpoint = None, None, ""
        if self._sends:
            prefill, endpoint = rank.prefill(described.components, described.replicas)
        if target is not None:
            landing = components(target.locate)
            decode = rank.decode(landing.components, target, stand_ins=landing.stand_ins, open_ended=landing.open_ended)
        self._worker = WorkerSide(
            pools=described, prefill=prefill, decode=decode, time_left_s=self._settings.time_left_s,
            recomputes=getattr(self._kv_transfer_config, "kv_load_failure_policy", "") == "recompute",
            facts=shown,
        )  # fmt: skip
        identity, line = rank.announced(endpoint, target, "vLLM's blocks")
        self._announced = Announced(endpoint, identity, described.block_bytes)
        log.info("%s", line)

    # Worker: steps

    def handle_preemptions(self, kv_connector_metadata: base.KVConnectorMetadata) -> None:
        """Blocks of preempted requests are about to be overwritten: nothing reads them any more after this."""
        assert isinstance(kv_connector_metadata, OrdersMetadata)
        if self._worker is not None:
            self._worker.quiesce(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: base.KVConnectorMetadata) -> None:
        """Before the model runs, or in a step without it."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, OrdersMetadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """All loads are begun when the step's orders come."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request is scheduled once all of its KV has landed."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer of this step is computed, or will be once the GPU is there."""
        if self._worker is not None:
            self._worker.save(layer_name, self._event)

    def wait_for_save(self) -> None:
        """The whole step is computed. Nothing is waited for: blocks stay until their rooms have drained."""
        if self._worker is not None:
            self._worker.end(self._event)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Requests whose blocks vLLM has back."""
        results = self._results(finished_req_ids)
        return base.KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The same, as older versions ask for it."""
        results = self._results(finished_req_ids)
        return results.sent or None, results.received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed requests, for versions without failed requests."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _results(self, finished: set[str]) -> Results:
        if self._worker is None:
            return Results()
        results = self._worker.results(finished)
        if "fails_by_request" not in dialect.HAS:
            self._failed_blocks |= results.failed_blocks
        return results

    def _event(self) -> torch.cuda.Event | None:
        """Fires once all that this thread has queued on the GPU is done; None on the CPU, where it is done."""
        if not self._on_card:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def get_kv_connector_stats(self) -> TransferStats | None:
        """What was counted since the last step."""
        data = self._worker.take_figures() if self._worker is not None else None
        return None if data is None else TransferStats(data=data)

    def get_handshake_metadata(self) -> base.KVConnectorHandshakeMetadata | None:
        """What this rank announces to the scheduler."""
        return self._announced

    def shutdown(self) -> None:
        """Ends all threads of it, and gives the memory back where vLLM does not hold it any more."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
            self._memory.close()
        if self._bootstrap is not None:
            self._bootstrap.close()
            self._bootstrap = None

    # Scheduler

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """What all ranks announce, by (stage, tensor parallel rank)."""
        self._side.on_ranks(metadata)
        if self._settings.bootstrap and self._sends and self._bootstrap is None:
            engine_id = self._vllm_config.kv_transfer_config.engine_id
            tp_size = self._vllm_config.parallel_config.tensor_parallel_size
            name = name_of(engine_id, self._side.endpoints, tp_size)
            self._bootstrap = Bootstrap(self._settings.bootstrap, name)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM has made its block pool."""
        self._side.block_pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        """A request has come."""
        self._side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that a peer sends, beyond those that this engine has; they land while other requests run."""
        count = self._side.matched_tokens(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request has its blocks."""
        tables = tables_of(blocks, (group for group, _ in self._groups))
        self._side.on_blocks(request, tables, num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Groups that a load fills."""
        return tuple(group.index for group, _ in self._groups)

    def build_connector_meta(self, scheduler_output: Any) -> base.KVConnectorMetadata:
        """The orders of a step."""
        return OrdersMetadata(self._side.orders(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers report: of loads too, since a request's answer has whether its KV was received."""
        self._side.on_sent(getattr(connector_output, "finished_sending", None) or ())
        failed = getattr(connector_output, "failed_recving", None) or ()
        self._side.on_failed_loads(failed, getattr(connector_output, "invalid_block_ids", None) or ())

    def has_pending_push_work(self) -> bool:
        """True if the engine has to run a step for a peer's sake: prefill keeps blocks that nobody here needs."""
        return self._side.has_word_for_peers

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: whether its blocks stay, and what the client gets."""
        return self._side.on_finished(request, request.status.name)

    request_finished_all_groups = request_finished

    # Both

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Heads that lie apart, so that engines of other tensor parallel sizes can take theirs."""
        if vllm_config.model_config is None or all(layers.latent for layers in layers_with_kv(vllm_config)):
            return None
        return "LBHNC" if "layout" in dialect.HAS else "HND"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any] | None) -> bool:
        """No: rows are sent behind a step. With full CUDA graphs vLLM asks while it reads its configuration, so that a
        wrong setting is refused before weights are loaded. Raises ConfigError."""
        _settings_of(extra_config)
        return False

    @classmethod
    def supports_sleep_mode(cls, _kv_transfer_config: Any) -> bool:
        """No: peers have the addresses of the memory that vLLM would give back. From 0.33 on vLLM asks, and refuses."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats | None:
        """Stats as they travelled."""
        return TransferStats() if data is None else TransferStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> TransferMetrics:
        """The Prometheus metrics of this connector."""
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _settings_of(extra_config: dict[str, Any] | None) -> ConnectorSettings:
    """Raises ConfigError."""
    return ConnectorSettings.of(extra_config or {}, "kv_connector_extra_config")


def _extent_of(caches: dict[str, torch.Tensor]) -> Extent:
    """Where the cache lies: if there is one on a GPU, without what is in host memory."""
    on_card = [cache for cache in caches.values() if cache.is_cuda]
    return Extent(*range_of(on_card or caches.values()), on_card[0].device.index if on_card else None)


# As a part of vLLM's MultiConnector: figures come from another process with the name of their connector alone.
with suppress(ValueError):  # it is known already
    KVConnectorFactory.register_connector(PDTransferConnector.__name__, __name__, PDTransferConnector.__name__)
