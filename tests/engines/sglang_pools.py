"""Requests from one of SGLang's own pools to another, on a CPU without a server: sent by SGLang's own `send_kv_chunk`,
and read back by SGLang's own addresses. Runs in SGLang's environment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.disaggregation.utils import (
    build_kv_layer_ids,
    get_kv_transfer_buf_infos,
    get_pd_kv_layout,
    setup_state_kv_args,
)
from sglang.srt.mem_cache.common import kv_to_page_indices
from sglang.srt.plugins.hook_registry import HookRegistry

from pdtransfer import DecodeClient, KVPoll, NodeSettings, PrefillClient, WriterOptions
from pdtransfer.adapters.kit.cache_memory import made_in_one_piece
from pdtransfer.adapters.sglang import hooks, process
from pdtransfer.adapters.sglang.decode import ReceivingSide
from pdtransfer.adapters.sglang.pools import HeadCounts, extent_of, kv_buffers, pools, state_buffers
from pdtransfer.adapters.sglang.prefill import SendingSide
from pdtransfer.adapters.sglang.rooms import Uses
from tests.support.waiting import wait_for

AUX = b"aux!"
TOKENS_MAX = 2_048  # of a request


class Engine(ABC):
    """One engine's pools, in one allocation as the plugin makes them; its rows hold `seed`'s random bytes."""

    layer_count: int
    window = 0
    model: HeadCounts

    def __init__(
        self, seed: int, page_size: int, requests: int, made: Callable[[], tuple[Any, Any]], *, hisparse: bool = False
    ) -> None:
        self.page_size, self.random = page_size, np.random.default_rng(seed)
        self.host, self.host_pages = None, np.empty(0, np.int64)
        if hisparse:
            self._make_with_host_pool(made)
        else:
            self.memory, (self.pool, self.draft) = made_in_one_piece(made, torch.device("cpu"))
        args = self.args = KVArgs()
        args.page_size, args.aux_item_lens, args.num_draft_entries = page_size, [len(AUX)], 0
        infos = get_kv_transfer_buf_infos(self.pool)
        if self.host is not None:  # as decode's `_init_kv_manager` does
            infos = [
                of_host + rest[len(of_host) :]
                for of_host, rest in zip(self.host.get_contiguous_buf_infos(), infos, strict=True)
            ]
            self.host_slots = torch.full((requests, TOKENS_MAX), -1, dtype=torch.int64)
            self.host_lengths = torch.zeros(requests, dtype=torch.int64)
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = infos
        args.kv_layout = get_pd_kv_layout(self.pool)
        args.kv_layer_ids = build_kv_layer_ids(
            token_to_kv_pool=self.pool, draft_token_to_kv_pool=None, num_draft_entries=0,
            num_hidden_layers=self.layer_count,
        )  # fmt: skip
        setup_state_kv_args(args, self.pool, self.draft, total_kv_layers=self.layer_count)
        self.buffers = [kv_buffers(args), *state_buffers(args)]
        self.extent = extent_of(self.buffers, None) if self.host is None else process.extent
        for view in self.views():
            view[:] = self.random.integers(0, 256, view.shape, np.uint8)
        self.req_to_token = torch.zeros((requests, TOKENS_MAX), dtype=torch.int32)
        self.requests = requests

    def _make_with_host_pool(self, made: Callable[[], tuple[Any, Any]]) -> None:
        """Under the plugin's hooks, which have peers write to the host pool."""
        hooks.register()
        HookRegistry.apply_hooks()
        hooks._receives_on_host = lambda: True

        def of_pool(_: Any) -> Any:
            self.pool, self.draft = made()
            return SimpleNamespace(token_to_kv_pool=self.pool)

        hooks._init_pools.__wrapped__(of_pool, SimpleNamespace(is_draft_worker=False, device="cpu"))
        self.memory, self.host = process.memory, self.host_pool()

    def host_pool(self) -> Any:
        """HiSparse's."""
        raise NotImplementedError

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the pools that SGLang lists to its backends."""

    @abstractmethod
    def place(self, tokens: int) -> int:
        """The number of a request whose tokens have pages of their own, in any order."""

    @abstractmethod
    def state_indices(self, request: int, prefix: int, tokens: int) -> dict[Any, Any]:
        """The indices that SGLang's decode names, by the type of the state, as `pop_preallocated` computes them."""

    @abstractmethod
    def rows(self, request: int, first: int, tokens: int) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """The rows that SGLang's attention can read when it continues after `tokens`, of tokens from `first` on."""

    def views(self) -> Iterator[NDArray[np.uint8]]:
        """(items, bytes of one) of each buffer, as SGLang lists them to its backends."""
        found = {tensor.data_ptr(): tensor for tensor in self.tensors()}
        for buffers in self.buffers:
            listed = zip(buffers.addresses, buffers.byte_counts, buffers.item_bytes, strict=True)
            for address, byte_count, item in listed:
                raw = found[address].view(torch.uint8).reshape(-1).numpy()
                assert len(raw) == byte_count
                yield raw[: byte_count // item * item].reshape(-1, item)

    def place_pages(self, request: int, tokens: int, page_count: int) -> NDArray[np.int64]:
        """The pages of a request, chosen from 1 to `page_count`."""
        full = self.random.permutation(np.arange(1, page_count + 1))[: -(-tokens // self.page_size)]
        slots = (full[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
        self.req_to_token[request, : len(slots)] = torch.from_numpy(slots)
        return full

    def at(self, request: int, positions: Any) -> torch.Tensor:
        """SGLang's index of each token."""
        return self.req_to_token[request, positions].long()

    def described(self, locate: Any) -> Any:
        """The components of these pools."""
        return pools(self.args, self.model, locate, kv=self.buffers[0], states=self.buffers[1:])

    def window_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots of tokens in the pool of the windows."""
        return self.pool.translate_loc_from_full_to_swa(slots)


class Sender:
    """What SGLang's scheduler sends with: each call is a push."""

    def __init__(self, side: SendingSide, room: int) -> None:
        self.side, self.room, self.pages = side, room, 0

    def get_max_transfer_tokens(self) -> None:
        return None

    def should_send_kv_chunk(self, count: int, last: bool) -> bool:
        return count > 0 or last

    def send(self, pages: Any, states: Any, num_kv_tokens: int) -> None:
        aux = None if states is None else AUX
        self.side.push(self.room, pages, first_page=self.pages, aux=aux, states=states)
        self.pages += len(pages)


class Scheduler(SchedulerDisaggregationPrefillMixin):
    """Prefill's scheduler with what SGLang's own `send_kv_chunk` reads of it."""

    kv_checksum_computer = None
    enable_staging = False

    def __init__(self, engine: Engine) -> None:
        self.sliding_window_size = engine.window
        self.token_to_kv_pool_allocator = SimpleNamespace(
            page_size=engine.page_size, get_kvcache=lambda: engine.pool,
            translate_kv_indices_for_transfer=lambda indices: indices,
            translate_swa_indices_for_transfer=lambda indices: engine.window_slots(indices.long()),
        )  # fmt: skip
        self.req_to_token_pool = SimpleNamespace(req_to_token=engine.req_to_token)
        self.disagg_metadata_buffers = SimpleNamespace(set_buf=lambda _: None)
        self.disagg_prefill_bootstrap_queue = SimpleNamespace(kv_manager=SimpleNamespace(kv_args=engine.args))
        self.disagg_prefill_pending_chunk_rids = set[str]()


def hand_over(
    source: Engine,
    target: Engine,
    requests: Iterable[tuple[int, int]],
    check_names: Callable[[Any, Sequence[Any], Mapping[str, int]], None],
) -> str:
    """Hands over requests of (prefix at decode, tokens), one after the other, and compares what lands. `check_names`
    gets decode's pools, its components and the addresses that planes count from in each memory. Returns what was
    compared."""
    base = source.memory.base(source.extent)
    sent, landing = source.described(lambda _: (base, "dram")), target.memory.target(target.extent)
    described = target.described(landing.locate)
    named: dict[str, Any] = {"model": "m", "weights": b"w"}
    writer = WriterOptions(pool_address=base)
    if landing.copied_up and target.host is None:
        raise SystemExit("SGLang's pools are not in the arena")
    check_names(target, described.components, {"hbm": landing.base, "dram": landing.arena.mapping.address})
    compared = count = 0
    with (
        PrefillClient(NodeSettings(node="p", **named), sent.components, writer=writer, replicas=sent.replicas) as p,
        DecodeClient(
            NodeSettings(node="d", **named), described.components, landing.arena, engine_slots=True,
            prefix_cache=False, verify=True, open_ended=["kv"],
        ) as d,
    ):  # fmt: skip
        prefill = SendingSide(p, sent, time_left_s=60.0)
        decode = ReceivingSide(d, described, Uses(1), put_aux=lambda *_: None, aux_bytes=len(AUX), time_left_s=60.0)
        scheduler = Scheduler(source)
        for room, (prefix, tokens) in enumerate(requests, start=1):
            numbers = source.place(tokens), target.place(tokens)
            pages = kv_to_page_indices(target.at(numbers[1], np.arange(prefix, tokens)), target.page_size)
            of_kind = target.state_indices(numbers[1], prefix, tokens)
            states = [of_kind[kind] for kind in target.args.state_types]
            before = [view.copy() for view in target.views()]
            # Of the first buffers with HiSparse, and of the others.
            hosts = [] if target.host is None else [target.host_pages] * target.host.layer_num
            items = [*hosts, *[pages] * (len(target.buffers[0].addresses) - len(hosts))]
            decode.expect(
                room, items[0], device_pages=items[-1], prefix=prefix, states=states, aux_index=0, sources=[p.endpoint]
            )
            prefill.begin(room)
            reach(prefill, KVPoll.WAITING_FOR_INPUT)
            assert prefill.prefix(room) == prefix
            request = SimpleNamespace(
                rid=str(room), start_send_idx=prefix, origin_input_ids=range(tokens), extend_end=tokens,
                disagg_decode_prefix_len=prefix, kv=SimpleNamespace(req_pool_idx=numbers[0]),
                disagg_kv_sender=Sender(prefill, room),
            )  # fmt: skip
            for end in range(prefix + 200, tokens, 200):  # chunks that end within pages
                scheduler.send_kv_chunk(request, end_idx=end)
            scheduler.send_kv_chunk(request, last_chunk=True)
            reach(decode, KVPoll.SUCCESS)
            reach(prefill, KVPoll.SUCCESS)
            compared += check(source, target, numbers, prefix, tokens)
            count += 1
            of_states = zip(states, target.buffers[1:], strict=True)
            items += [indices for indices, buffers in of_states for _ in buffers.addresses]
            for number, (own, old, new) in enumerate(zip(items, before, target.views(), strict=True)):
                others = np.setdiff1d(np.arange(len(new)), own)
                if not np.array_equal(old[others], new[others]):
                    raise SystemExit(f"{tokens} tokens behind {prefix}: rows of nobody have changed in buffer {number}")
    return f"compared {compared} bytes of {count} requests"


def check(source: Engine, target: Engine, requests: tuple[int, int], prefix: int, tokens: int) -> int:
    """Compares what decode reads with what prefill has computed. Returns how many bytes that were."""
    compared = 0
    pairs = zip(source.rows(requests[0], prefix, tokens), target.rows(requests[1], prefix, tokens), strict=True)
    for (name, computed), (_, landed) in pairs:
        if not np.array_equal(computed, landed):
            wrong = np.flatnonzero((computed != landed).any(axis=1))
            raise SystemExit(f"{tokens} tokens behind {prefix}: {name}: rows {wrong[:9]} of {len(computed)} differ")
        compared += landed.nbytes
    return compared


def reach(side: Any, state: KVPoll) -> None:
    changes: list[Any] = []

    def reached() -> bool:
        changes.extend(side.turn())
        if failed := [change.reason for change in changes if change.state is KVPoll.FAILED]:
            raise SystemExit(f"failed: {failed}")
        return any(change.state is state for change in changes)

    wait_for(reached, seconds=120)
