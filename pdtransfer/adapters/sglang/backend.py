"""SGLang's transfer backend: the calls of its schedulers, given to the prefill or the decode side of a rank."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import secrets
import socket
import time
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_device, get_memory, get_parallel

from ...errors import Cause, ConfigError, LocalProtocolError
from ...layout.layout import DTYPE_BYTES
from ...wire import Ranks
from ..kit.cache_memory import CacheMemory, Extent
from ..kit.facts import dtype_name, model_facts, named_facts
from ..kit.kinds import Heads, Locate
from ..kit.peers import Reachable, Remembered, RequestError
from ..kit.rank import Rank
from . import dialect, process
from .decode import ReceivingSide
from .options import ELSEWHERE, speculation
from .peers import check_room, rank_fields, sources_of
from .pools import (
    KV,
    MINIMAX_INDEX,
    OPAQUE,
    HeadCounts,
    KVPools,
    extent_of,
    has_rows_of_pages,
    host_buffers,
    kv_buffers,
    pools,
    state_buffers,
)
from .prefill import SendingSide, Sent
from .rooms import Uses
from .states import LINEAR, conv_sections, drop_empty_states, states_fact

log = logging.getLogger(f"sglang.srt.{__name__}")

ADDRESSES_MAX = 1_024  # of servers whose faults are remembered
_DTYPES = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3", "fp8_e5m2": "float8_e5m2"}


class Manager(dialect.KVManager):
    """One rank: its client, and the requests that it sends or receives."""

    sending: SendingSide  # on prefill
    receiving: ReceivingSide  # on decode

    supports_deferred_decode_kv_release = dialect.DEFERS_RELEASES
    reports_transfer_latency = True
    supports_host_destination = False

    def __init__(self, args: Any, mode: DisaggregationMode, server_args: Any, is_mla_backend: bool = False) -> None:
        # What this package logs goes where SGLang's own lines go.
        logging.getLogger("pdtransfer").setLevel(logging.getLogger("sglang").getEffectiveLevel())
        self._settings = process.settings()
        self._side: SendingSide | ReceivingSide | None = None  # once it runs
        self.refusals = Remembered[str, str](ADDRESSES_MAX)  # why prefill servers were refused, by their address
        self._model_config = ModelConfig.from_server_args(server_args)
        self._draft_config: Any = None
        self._speculation = speculation(server_args, partial(self._learn_drafter, server_args))
        dialect.complete(args)
        drop_empty_states(args)
        # Whether layers keep a row for several tokens, as DeepSeek V4's do.
        self._is_compressed = bool(getattr(args, "mla_compression_ratios", None))
        super().__init__(args, mode, server_args, is_mla_backend)
        if self.system_dp_size > 1 and self.attn_dp_size == 1:
            # Data parallel engines without DP attention. SGLang's sender compares this rank with that of the room, and
            # would fail the requests of all ranks but the first.
            self.attn_dp_rank = self.system_dp_rank
        if mode is DisaggregationMode.DECODE:
            self._learn_ranks()
            self._start_decode()
            process.decode = self
            self._start_heartbeat_checker_thread()
        # Stages free the pages of a failed request in the same step: once nobody can write any of them.
        self.enable_deferred_decode_kv_release = dialect.DEFERS_RELEASES and self.pp_size == 1
        atexit.register(self.close)

    # Start

    def register_to_bootstrap(self) -> None:
        """Prefill: decode engines learn where this rank listens. The ranks of context parallelism all have the same:
        SGLang has the first one send, and none of the others."""
        self._learn_ranks()
        self.enable_all_cp_ranks_for_transfer, self.is_dummy_cp_rank = False, self.attn_cp_rank > 0
        self._start_prefill()
        super().register_to_bootstrap()

    def _learn_ranks(self) -> None:
        dialect.check_context_parallelism(self)
        if self.pp_size > 1 and any(str(kind.value) != LINEAR for kind in self.kv_args.state_types):
            raise ConfigError("pp_size: states without layer numbers are not supported with several stages")
        self._ranks = Ranks(self.attn_tp_rank, self.attn_tp_size, self.pp_rank, self.pp_size)
        sections = conv_sections(self._model_config.hf_text_config)
        self._states_fact = states_fact(self.kv_args, self.attn_tp_size, sections, self._of_all_stages)

    def _learn_drafter(self, server_args: Any, path: str, revision: str | None) -> dict[str, Any]:
        self._draft_config = ModelConfig.from_server_args(
            server_args, model_path=path, model_revision=revision, is_draft_model=True
        )
        return self._draft_config.hf_config.to_dict()

    def _of_all_stages(self, texts: list[str]) -> list[list[str]]:
        """What each pipeline stage has called this with; all of them do."""
        return get_parallel().pp_group.all_gather_object(texts) if self.pp_size > 1 else [texts]

    def _model(self) -> HeadCounts:
        config, ranks = self._model_config, self._ranks
        latent = self.is_mla_backend or self.is_hybrid_mla_backend
        total = 1 if latent else config.get_total_num_kv_heads()
        window = 1 if latent else config.get_swa_num_kv_heads(1)
        latent_drafter, drafter = False, None
        if (draft := self._draft_config) is not None:
            latent_drafter = draft.attention_arch.name == "MLA"
            drafter = Heads(1, ranks) if latent_drafter else Heads(draft.get_num_kv_heads(1), ranks, draft.head_dim)
        dtype = self._cache_dtype if self._cache_dtype in DTYPE_BYTES else OPAQUE
        return HeadCounts(
            latent, Heads(total, ranks), Heads(window, ranks), dtype, conv_sections(config.hf_text_config), drafter,
            latent_drafter,
        )  # fmt: skip

    def _pools(self, locate: Locate) -> KVPools:
        args = self.kv_args
        described = pools(args, self._model(), locate, kv=kv_buffers(args), states=state_buffers(args))
        if get_memory().enable_hisparse and MINIMAX_INDEX in {part.name for part in described.states}:
            raise ConfigError("enable_hisparse: MiniMax's sparse KV is not supported with it")
        if get_memory().enable_hisparse and len(described.kv) > 1:
            dialect.require("device_pages", "enable_hisparse", "pages of the device beside the host's")
        return described

    def _memory(self) -> tuple[CacheMemory, Extent]:
        memory = process.memory or CacheMemory(self.kv_args.kv_data_lens)
        device = self.kv_args.gpu_id if get_device().device == "cuda" else None
        return memory, process.extent or extent_of([kv_buffers(self.kv_args), *state_buffers(self.kv_args)], device)

    def _rank(self, memory: CacheMemory, extent: Extent) -> Rank:
        facts, rows = self._facts(), "pages" if has_rows_of_pages(self.kv_args) else "tokens"
        shown = named_facts(facts, rows=rows, engine=f"SGLang {version('sglang')}")
        return Rank(
            settings=self._settings, name=f"{socket.gethostname()[:64]}-{os.getpid()}", number=self._number(),
            ranks=self._ranks, facts=facts, shown=shown, memory=memory, extent=extent,
            model=str(self.server_args.served_model_name or self.server_args.model_path),
        )  # fmt: skip

    def _start_prefill(self) -> None:
        memory, extent = self._memory()
        described = self._pools(lambda _: (memory.base(extent), "dram"))
        rank = self._rank(memory, extent)
        client, endpoint = rank.prefill(described.components, described.replicas)
        self.sending = self._side = SendingSide(client, described, time_left_s=self._settings.time_left_s)
        # What decode learns from the bootstrap server is where our client listens.
        self.rank_port = int(endpoint.rpartition(":")[2])
        self.local_ip = endpoint.rpartition("tcp://")[0] + self._settings.host
        process.identity, line = rank.announced(endpoint, None, "")
        log.info("%s", line)

    def _start_decode(self) -> None:
        (memory, extent), args = self._memory(), self.kv_args
        target = memory.target(extent, host_buffer_gib=self._settings.host_buffer_gib)
        args.prefill_start_layer = process.first_layer  # SGLang names it on prefill alone
        described = self._pools(target.locate)
        components = described.components
        if getattr(args, "host_kv_data_ptrs", None) is not None:
            host = host_buffers(args, target)
            components += pools(args, self._model(), target.locate, kv=host, states=()).components
            self.supports_host_destination = True
        rank = self._rank(memory, extent)
        client = rank.decode(
            components, target, enable_hisparse=self.supports_host_destination,
            open_ended=[KV] if self._is_compressed and get_memory().enable_hisparse else [],
        )  # fmt: skip
        first = secrets.randbits(20)
        if self.pp_size > 1:
            first = get_parallel().pp_group.broadcast_object(first, src=0)
        if self.attn_tp_size > 1:
            first = get_parallel().attn_tp_group.broadcast_object(first, src=0)
        self.receiving = self._side = ReceivingSide(
            client, described, Uses(first), put_aux=self._put_aux, aux_bytes=sum(args.aux_item_lens),
            time_left_s=self._settings.time_left_s,
        )  # fmt: skip
        _, allowed = self._settings.keys_of(self._ranks)
        self.reachable = Reachable(allowed, self._settings.insecure, field="bootstrap_host")
        process.identity, line = rank.announced("", target, "SGLang's pages")
        log.info("%s", line)

    def _number(self) -> int:
        """The number of this rank among those of this host that share the settings."""
        stage = (self.system_dp_rank or self.attn_dp_rank) * self.pp_size + self.pp_rank
        return (stage * self.attn_cp_size + self.attn_cp_rank) * self.attn_tp_size + self.attn_tp_rank

    def _facts(self) -> dict[str, Any]:
        """What must be equal for two engines to produce compatible KV, whatever their ranks and pages."""
        config = self._model_config
        facts = model_facts(
            config.hf_text_config.to_dict(), dtype=config.dtype, cache=self._cache_dtype,
            quantization=config.quantization,
        )  # fmt: skip
        facts |= self._speculation | self._states_fact
        return facts | ({"kv_layout": getattr(self.kv_args, "kv_layout", None)} if self._is_compressed else {})

    @property
    def _cache_dtype(self) -> str:
        """SGLang's name for the dtype of its KV cache, as torch has it."""
        name = str(self.kv_cache_dtype_str or "auto")
        return dtype_name(self._model_config.dtype) if name == "auto" else _DTYPES.get(name, name)

    def close(self) -> None:
        """Ends the client: requests under way fail."""
        if self._side is not None:
            self._side.close()

    # Both sides

    def turn(self) -> None:
        """What has become known since the last call is in SGLang's tables."""
        for change in self._side.turn() if self._side is not None else ():
            if change.reason and change.bootstrap_room in self.request_status:
                self.record_failure(change.bootstrap_room, change.reason)
            self.update_status(change.bootstrap_room, int(change.state))

    def takes(self, bootstrap_room: int) -> bool:
        """True if the room is one that can be. If not, its request has failed, with the reason."""
        try:
            check_room(bootstrap_room)
        except RequestError as error:
            self.refuse([bootstrap_room], str(error))
            return False
        return True

    def refuse(self, bootstrap_rooms: list[int], reason: str) -> None:
        """The requests fail."""
        log.error("%s", reason)
        for room in bootstrap_rooms:
            if self._side is not None:
                self._side.failures.failed(Cause.REFUSED, reason)
            self.record_failure(room, reason)
            self.update_status(room, KVPoll.Failed)

    # Prefill

    def add_transfer_request(
        self, bootstrap_room: int, kv_indices: Any, index_slice: slice, is_last_chunk: bool, *,
        aux_index: int | None = None, state_indices: Any = None, wait_event: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        """Pages are computed: they leave."""
        aux = self._get_aux(aux_index) if is_last_chunk and aux_index is not None else None
        self.sending.push(
            bootstrap_room, kv_indices, first_page=index_slice.start, aux=aux, states=state_indices, after=wait_event
        )
        if is_last_chunk:
            self.update_status(bootstrap_room, KVPoll.Transferring)

    def _get_aux(self, index: int) -> bytes:
        items = zip(self.kv_args.aux_data_ptrs, self.kv_args.aux_item_lens, strict=True)
        return b"".join(ctypes.string_at(address + index * item, item) for address, item in items)

    # Decode

    def _put_aux(self, index: int, aux: bytes) -> None:
        offset = 0
        for address, item in zip(self.kv_args.aux_data_ptrs, self.kv_args.aux_item_lens, strict=True):
            ctypes.memmove(address + index * item, aux[offset : offset + item], item)
            offset += item

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """True if a prefill server's ranks are known. One that does not fit is refused, and its requests fail: SGLang
        would end this engine."""
        try:
            is_known = super().try_ensure_parallel_info(bootstrap_addr)
        except (AssertionError, RuntimeError, RequestError) as error:
            self.refusals.keep(bootstrap_addr, f"prefill at {bootstrap_addr} is refused: {error}")
            log.error("%s", self.refusals[bootstrap_addr])
            return False
        if is_known:
            self.refusals.pop(bootstrap_addr, None)
        return is_known

    def _resolve_rank_mapping(self, info: Any) -> None:
        """Every decode rank asks all ranks of a prefill engine, of those of context parallelism the first: what each of
        them sends follows from its heads and layers."""
        if info.wrong:
            raise RequestError(info.wrong)
        stages, info.pp_size = info.pp_size, self.pp_size  # SGLang would refuse other stages than decode's
        try:
            super()._resolve_rank_mapping(info)
        finally:
            info.pp_size = stages
        info.target_tp_ranks, info.target_pp_ranks = list(range(info.attn_tp_size)), list(range(stages))
        info.target_cp_ranks = [0]

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """True if nobody can write the pages of a failed request any more."""
        self.turn()
        return self.receiving.is_drained(bootstrap_room)


class Sender(dialect.KVSender):
    """Prefill: a request."""

    kv_mgr: Manager
    _sent: Sent | None = None

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int, *args: Any, **named: Any) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **named)
        if mgr.takes(bootstrap_room) and mgr.request_status.get(bootstrap_room) == KVPoll.Bootstrapping:
            self._sent = mgr.sending.begin(bootstrap_room)

    def poll(self) -> int:
        """The state of the request; SUCCESS and FAILED once nothing reads its pages."""
        self.kv_mgr.turn()
        return super().poll()

    def pop_decode_prefix_len(self) -> int:
        """The first tokens, in whole pages, that decode has."""
        return self.kv_mgr.sending.prefix(self.bootstrap_room)

    @property
    def offered(self) -> int:
        """The first tokens whose KV was offered."""
        return self._sent.offered if self._sent is not None else 0

    def get_transfer_metric(self) -> Any:
        """What SGLang exports of the hand-off."""
        if self._sent is not None:
            self._transfer_metric.transfer_total_bytes = self._sent.kv_bytes
            self._transfer_metric.alloc_latency_s = self._sent.leased_s
        return self._transfer_metric

    def clear(self) -> None:
        """The request has ended; its pages are free now."""
        self.kv_mgr.sending.give_up(self.bootstrap_room)
        super().clear()

    def abort(self) -> None:
        """The request is given up; its pages are reused after this."""
        self.kv_mgr.sending.give_up(self.bootstrap_room)
        super().abort()


class Receiver(dialect.KVReceiver):
    """Decode: a request."""

    kv_mgr: Manager
    _asked = False  # or informed prefill that it will not
    _wrong = ""  # what its bootstrap server has answered

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        if not mgr.takes(bootstrap_room):
            self.conclude_state, self._asked = KVPoll.Failed, True  # prefill has no such request

    @property
    def supports_host_destination(self) -> bool:
        """True if the request may land in SGLang's host pool."""
        return self.kv_mgr.supports_host_destination

    def poll(self) -> int:
        """The state of the request. After FAILED its pages are held until `is_abort_release_safe`; with several stages
        it is FAILED from then on."""
        self.kv_mgr.turn()
        state = super().poll()
        if state == KVPoll.Failed:
            self.invalidate_cached_bootstrap_infos()  # the engine may be back with other endpoints
            if self.kv_mgr.pp_size > 1:
                self.ensure_abort_notified()
                if not self.is_abort_release_safe():
                    return KVPoll.Transferring
        return state

    @property
    def failure(self) -> str:
        """Why it has failed, where this rank knows it; else empty."""
        return self.kv_mgr.failure_records.get(self.bootstrap_room, "")

    def fail(self, reason: str) -> None:
        """It has failed at another stage or rank, though it may have landed here. Idempotent."""
        if self.conclude_state != KVPoll.Failed:
            self.kv_mgr.record_failure(self.bootstrap_room, reason)
            self.conclude_state = KVPoll.Failed

    def _get_bootstrap_info_from_server(self, *rank: Any) -> dict[str, Any] | None:
        """Where a rank listens; None, with the reason, for an answer without it."""
        answer = super()._get_bootstrap_info_from_server(*rank)
        if answer is None:
            return None
        try:
            return rank_fields(answer) | {"pp_rank": int(rank[-1])}
        except RequestError as error:
            self._wrong = f"prefill at {self.bootstrap_addr} is refused: {error}"
            return None

    def _setup_bootstrap_infos(self) -> None:
        super()._setup_bootstrap_infos()
        if self._wrong:
            self.kv_mgr.refuse([self.bootstrap_room], self._wrong)

    def _register_kv_args(self) -> bool:
        """The session itself exchanges the layouts of both sides' pools, and checks them."""
        return self.bootstrap_infos is not None

    def send_metadata(
        self, kv_indices: Any, aux_index: int | None = None, state_indices: Any = None,
        decode_prefix_len: int | None = None, destination: str = "device", device_kv_indices: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        """The request has its pages: they may be written from now on."""
        if self.bootstrap_infos is None:
            return
        assert aux_index is not None
        try:
            sources = sources_of(self.bootstrap_infos, self.kv_mgr.reachable)
            self._asked = True
            self.kv_mgr.receiving.expect(
                self.bootstrap_room, kv_indices, prefix=decode_prefix_len or 0, states=state_indices or [],
                aux_index=aux_index, sources=sources, host=destination == "host",
                device_pages=device_kv_indices,
            )  # fmt: skip
        except (LocalProtocolError, RequestError) as error:
            self.kv_mgr.refuse([self.bootstrap_room], f"its hand-off is refused: {error}")
            self._withdraw(str(error))
        self.init_time = time.time()

    def abort(self) -> None:
        """The request is given up, by its client or since its prefill server was refused. One that has failed keeps its
        reason."""
        if self.conclude_state == KVPoll.Failed:
            self.ensure_abort_notified()
            return
        super().abort()
        if reason := self.kv_mgr.refusals.get(self.bootstrap_addr):
            self.kv_mgr.record_failure(self.bootstrap_room, reason)

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        """SGLang has given the request up, or its time is over."""
        self.kv_mgr.receiving.give_up(self.bootstrap_room)
        self._withdraw(self.failure or "SGLang gave it up")

    def clear(self) -> None:
        """The request has ended. It may have failed at another rank before this one has asked for it, and the other one
        may not know where prefill listens."""
        self._withdraw(self.failure or ELSEWHERE)
        super().clear()

    def _withdraw(self, why: str) -> None:
        """Prefill does not wait for a request that decode has not asked for, and will not."""
        if self._asked:
            return
        self._asked, sources = True, list[str]()
        with suppress(RequestError):
            sources = sources_of(getattr(self, "bootstrap_infos", None) or [], self.kv_mgr.reachable)
        self.kv_mgr.receiving.withdraw(self.bootstrap_room, sources, why)

    def is_abort_release_safe(self) -> bool:
        """True if nobody can write its pages any more."""
        return self.kv_mgr.is_abort_release_safe(self.bootstrap_room, 0)


class BootstrapServer(CommonKVBootstrapServer):
    """SGLang's own, where prefill ranks register. The page sizes of both sides need not be equal."""

    page_size = property(lambda _: None, lambda *_: None)
