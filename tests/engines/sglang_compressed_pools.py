"""DeepSeek V4's pools, by SGLang's own classes on a CPU: requests go from one such pool to another, and are read back
by SGLang's own addresses. Runs in SGLang's environment, without a server: its attention needs a GPU.

    python -m tests.engines.sglang_compressed_pools '{"page_size": 256, "fp4_indexer": false, "draft": true}'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt import runtime_context
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.disaggregation.utils import get_kv_transfer_buf_infos, get_pd_kv_layout, setup_state_kv_args
from sglang.srt.mem_cache.common import kv_to_page_indices
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.server_args import ServerArgs

from pdtransfer import DecodeClient, KVPoll, NodeSettings, PrefillClient, WriterOptions
from pdtransfer.adapters.kit.cache_memory import made_in_one_piece
from pdtransfer.adapters.kit.heads import Heads
from pdtransfer.adapters.sglang.decode import ReceivingSide
from pdtransfer.adapters.sglang.labels import Uses
from pdtransfer.adapters.sglang.pools import DRAFT_LAYER, HeadCounts, extent_of, kv_buffers, pools, state_buffers
from pdtransfer.adapters.sglang.prefill import SendingSide
from pdtransfer.wire import Ranks
from tests.support.waiting import wait_for

RATIOS = [0, 4, 128, 4, 128, 4]
WINDOW, PAGES, WINDOW_PAGES, REQUESTS = 128, 12, 6, 5
LENGTHS = (1, 3, 4, 5, 127, 128, 129, 300, 255, 256, 257, 512, 1023)
AUX = b"aux!"
HEADS = HeadCounts(True, Heads(1, Ranks()), 1, Heads(1, Ranks()), 1)


class Engine:
    """One engine's pools, in one allocation as the plugin makes them; its rows hold `seed`'s random bytes."""

    def __init__(self, seed: int, page_size: int, requests: int, *, draft: bool) -> None:
        self.page_size, self.random = page_size, np.random.default_rng(seed)
        self.memory, (self.pool, self.draft) = made_in_one_piece(
            lambda: (pool_of(RATIOS, page_size, requests), pool_of([0], page_size, requests) if draft else None),
            torch.device("cpu"),
        )
        full_to_window = torch.zeros((PAGES + 1) * page_size, dtype=torch.int64)
        for pool in (self.pool, self.draft):
            if pool is not None:
                pool.register_mapping(full_to_window)
        args = self.args = KVArgs()
        args.page_size, args.aux_item_lens, args.num_draft_entries = page_size, [len(AUX)], 0
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = get_kv_transfer_buf_infos(self.pool)
        args.kv_layout = get_pd_kv_layout(self.pool)
        setup_state_kv_args(args, self.pool, self.draft, total_kv_layers=len(RATIOS))
        self.buffers = [kv_buffers(args), *state_buffers(args)]
        self.extent = extent_of(self.buffers, None)
        for each in self.views():
            each[:] = self.random.integers(0, 256, each.shape, np.uint8)
        self.req_to_token = torch.zeros((requests, 8 * page_size), dtype=torch.int32)
        self.requests = requests

    def views(self) -> Iterator[NDArray[np.uint8]]:
        """(items, bytes of one) of each buffer, as SGLang lists them to its backends."""
        tensors = [*_tensors(self.pool), *([] if self.draft is None else _tensors(self.draft))]
        found = {tensor.data_ptr(): tensor for tensor in tensors}
        for buffers in self.buffers:
            for address, byte_count, item in zip(*_fields(buffers), strict=True):
                raw = found[address].view(torch.uint8).reshape(-1).numpy()
                assert len(raw) == byte_count
                yield raw[: byte_count // item * item].reshape(-1, item)

    def place(self, tokens: int) -> int:
        """The number of a request whose tokens have pages of their own, in any order, and the window's pages."""
        request = int(self.random.integers(self.requests))
        count = -(-tokens // self.page_size)
        full = self.random.permutation(np.arange(1, PAGES + 1))[:count]
        at = (full[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
        self.req_to_token[request, : len(at)] = torch.from_numpy(at)
        window = self.random.permutation(np.arange(1, WINDOW_PAGES + 1))
        mapping = self.pool.full_to_swa_index_mapping
        mapping.zero_()
        for place, page in zip(range(count)[::-1], window, strict=False):
            first = int(full[place]) * self.page_size
            mapping[first : first + self.page_size] = torch.arange(page * self.page_size, (page + 1) * self.page_size)
        return request

    def at(self, request: int, positions: Any) -> torch.Tensor:
        """SGLang's index of each token."""
        return self.req_to_token[request, positions].long()

    def described(self, place: Any) -> Any:
        """The components of these pools."""
        return pools(self.args, HEADS, place, kv=self.buffers[0], states=self.buffers[1:])

    def rows(self, request: int, first: int, tokens: int) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """The rows that SGLang's attention can read when it continues after `tokens`, of tokens from `first` on."""
        pool = self.pool
        for layer, ratio in enumerate(RATIOS):
            positions = np.arange(max(first, tokens - WINDOW), tokens)
            window = pool.translate_loc_from_full_to_swa(self.at(request, positions))
            yield f"window of layer {layer}", packed(pool.swa_kv_pool, layer, window)
            if not ratio:
                continue
            compressed = self.at(request, np.arange(first // ratio * ratio + ratio - 1, tokens, ratio)) // ratio
            _, number, of_ratio = pool.layer_mapping[layer]
            yield f"c{ratio} of layer {layer}", packed(of_ratio, number, compressed)
            states = pool.get_attention_compress_states(layer)
            if ratio == 128:
                waiting = torch.arange(tokens // 128 * 128, tokens)
                places = states.translate_from_req_position_to_state_loc(torch.tensor(request), waiting)
                yield f"c128 state of layer {layer}", state(states, places)
                continue
            yield f"index of layer {layer}", index(pool, layer, number, compressed)
            waiting = np.arange(max(first, tokens - tokens % 4 - 4), tokens)
            window = pool.translate_loc_from_full_to_swa(self.at(request, waiting))
            for name, of_kind in (("c4 state", states), ("index state", pool.get_indexer_compress_states(layer))):
                yield f"{name} of layer {layer}", state(of_kind, of_kind.translate_from_swa_loc_to_state_loc(window))
        if self.draft is not None:
            positions = np.arange(max(first, tokens - WINDOW), tokens)
            window = pool.translate_loc_from_full_to_swa(self.at(request, positions))
            yield "window of the draft model", packed(self.draft.swa_kv_pool, 0, window)


def check_names(pool: Any, components: Sequence[Any], base: int) -> None:
    """Each plane of the model's is the buffer in which SGLang keeps this kind and layer."""
    planes = {(plane.kind, plane.layer): base + plane.base for each in components for plane in each.layout.planes}
    wanted: dict[tuple[str, int], torch.Tensor] = {}
    for layer, ratio in enumerate(RATIOS):
        wanted["window", layer] = pool.get_swa_raw_buffer(layer)
        if ratio:
            wanted[f"c{ratio}", layer] = pool.get_extra_key_buffer(layer)
            wanted[f"c{ratio}_state", layer] = pool.get_attention_compress_states(layer).kv_score_buffer.kv_score
        if ratio == 4:
            wanted["c4_index", layer] = pool.get_index_k_with_scale_buffer(layer)
            wanted["c4_index_state", layer] = pool.get_indexer_compress_states(layer).kv_score_buffer.kv_score
    for name, tensor in wanted.items():
        if planes.pop(name) != tensor.data_ptr():
            raise SystemExit(f"{name}: its plane is another buffer")
    if any(layer < DRAFT_LAYER for _, layer in planes):
        raise SystemExit(f"{sorted(planes)} are no buffers of SGLang's")


def pool_of(ratios: list[int], page_size: int, requests: int) -> Any:
    full = PAGES * page_size
    return DeepSeekV4TokenToKVPool(
        max_num_reqs=requests, num_req_slots=requests, swa_size=WINDOW_PAGES * page_size, c4_size=full // 4,
        c128_size=full // 128, c4_state_pool_size=WINDOW_PAGES * 8, c128_state_pool_size=requests * 128,
        page_size=page_size, swa_page_size=page_size, sliding_window=WINDOW, dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32, c128_state_dtype=torch.float32, qk_nope_head_dim=448, qk_rope_head_dim=64,
        indexer_head_dim=128, layer_num=len(ratios), device="cpu", enable_memory_saver=False,
        compression_ratios=ratios, full_size=full,
    )  # fmt: skip


def packed(pool: Any, layer: int, slots: torch.Tensor) -> NDArray[np.uint8]:
    """Rows of a paged pool as SGLang's kernels address them: values, and behind all values of the page the scales."""
    layout, size = pool.kv_layout, pool.page_size
    row, scales, scale = layout.row_addressing(size)
    raw = pool.kv_buffer[layer].view(torch.uint8).numpy()
    pages, at = (slots // size).numpy()[:, None], (slots % size).numpy()[:, None]
    columns = np.concatenate(
        [at * row + np.arange(layout.data_bytes), scales + at * scale + np.arange(layout.scale_bytes)], axis=1
    )
    return raw[pages, columns]


def index(pool: Any, layer: int, number: int, slots: torch.Tensor) -> NDArray[np.uint8]:
    """Rows of the index: by SGLang's own function where its numbers have four bits, else as its kernel lays them out,
    128 bytes a row and behind all rows of the page four bytes of scale each."""
    indexer = pool.index_pools[4]
    if indexer.use_fp4_indexer:
        values, scales = pool.get_low_ratio_index_k_fp4(layer, slots)
        return np.concatenate([values.numpy().view(np.uint8), scales.numpy()[:, None].view(np.uint8)], axis=1)
    raw, size = indexer.index_k_with_scale_buffer[number].numpy(), indexer.page_size
    pages, at = (slots // size).numpy()[:, None], (slots % size).numpy()[:, None]
    return raw[pages, np.concatenate([at * 128 + np.arange(128), size * 128 + at * 4 + np.arange(4)], axis=1)]


def state(states: Any, places: torch.Tensor) -> NDArray[np.uint8]:
    return states.get_state_by_state_loc(places).kv_score.contiguous().view(torch.uint8).numpy()


def _tensors(pool: Any) -> list[torch.Tensor]:
    states = [each for each in pool.compress_state_pools + pool.indexer_compress_state_pools if each is not None]
    paged = [*pool.kv_pools.values(), pool.swa_kv_pool]
    return [
        *(buffer for each in paged for buffer in each.kv_buffer),
        *(buffer for each in pool.index_pools.values() for buffer in each.index_k_with_scale_buffer),
        *(each.kv_score_buffer.kv_score for each in states),
    ]


def _fields(buffers: Any) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    return buffers.addresses, buffers.byte_counts, buffers.item_bytes


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
    sliding_window_size = WINDOW

    def __init__(self, engine: Engine) -> None:
        self.token_to_kv_pool_allocator = SimpleNamespace(
            page_size=engine.page_size, get_kvcache=lambda: engine.pool,
            translate_kv_indices_for_transfer=lambda indices: indices,
            translate_swa_indices_for_transfer=lambda indices: engine.pool.translate_loc_from_full_to_swa(
                indices.long()
            ),
        )  # fmt: skip
        self.req_to_token_pool = SimpleNamespace(req_to_token=engine.req_to_token)
        self.disagg_metadata_buffers = SimpleNamespace(set_buf=lambda _: None)
        self.disagg_prefill_bootstrap_queue = SimpleNamespace(kv_manager=SimpleNamespace(kv_args=engine.args))
        self.disagg_prefill_pending_chunk_rids = set[str]()


def asked(engine: Engine, request: int, prefix: int, tokens: int) -> tuple[Any, list[Any]]:
    """The pages and the states' indices that SGLang's decode names, as its `pop_preallocated` computes them."""
    page_size = engine.page_size
    first = max(prefix, tokens - WINDOW) // page_size * page_size
    window = engine.pool.translate_loc_from_full_to_swa(engine.at(request, np.arange(first, tokens)))
    indices = {
        StateType.SWA: kv_to_page_indices(window, page_size),
        StateType.DSV4_REQUEST_STATE: engine.pool.request_state_transfer_indices(request, tokens),
    }
    pages = kv_to_page_indices(engine.at(request, np.arange(prefix, tokens)), page_size)
    return pages, [indices[kind] for kind in engine.args.state_types]


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


def main() -> None:
    given = json.loads(sys.argv[1])
    page_size = given["page_size"]
    runtime_context.get_context().set_server_args(
        ServerArgs(model_path="none", device="cpu", enable_deepseek_v4_fp4_indexer=given["fp4_indexer"])
    )
    source = Engine(1, page_size, REQUESTS, draft=given["draft"])
    target = Engine(2, page_size, REQUESTS + 2, draft=given["draft"])
    base = source.memory.base(source.extent)
    sent, landing = source.described(lambda _: (base, "dram")), target.memory.target(target.extent)
    described = target.described(landing.locate)
    named: dict[str, Any] = {"model": "m", "weights": b"w"}
    writer = WriterOptions(pool_address=base)
    if landing.copied_up:
        raise SystemExit("SGLang's pools are not in the arena")
    check_names(target.pool, described.components, landing.base)
    compared = 0
    with (
        PrefillClient(NodeSettings(node="p", **named), sent.components, writer=writer, replicas=sent.replicas) as p,
        DecodeClient(
            NodeSettings(node="d", **named), described.components, landing.arena, engine_slots=True,
            prefix_cache=False, verify=True,
        ) as d,
    ):  # fmt: skip
        prefill = SendingSide(p, sent, time_left_s=60.0)
        decode = ReceivingSide(d, described, Uses(1), put_aux=lambda *_: None, aux_bytes=len(AUX), time_left_s=60.0)
        scheduler = Scheduler(source)
        longer = [(page_size, page_size + more) for more in (1, 5, 128, 300)]
        for room, (prefix, tokens) in enumerate([*((0, tokens) for tokens in LENGTHS), *longer], start=1):
            requests = source.place(tokens), target.place(tokens)
            pages, states = asked(target, requests[1], prefix, tokens)
            before = [view.copy() for view in target.views()]
            decode.expect(room, pages, prefix=prefix, states=states, aux_index=0, sources=[p.endpoint])
            prefill.begin(room)
            reach(prefill, KVPoll.WAITING_FOR_INPUT)
            assert prefill.prefix(room) == prefix
            request = SimpleNamespace(
                rid=str(room), start_send_idx=prefix, origin_input_ids=range(tokens), extend_end=tokens,
                disagg_decode_prefix_len=prefix, kv=SimpleNamespace(req_pool_idx=requests[0]),
                disagg_kv_sender=Sender(prefill, room),
            )  # fmt: skip
            for end in range(prefix + 200, tokens, 200):  # chunks that end within pages
                scheduler.send_kv_chunk(request, end_idx=end)
            scheduler.send_kv_chunk(request, last_chunk=True)
            reach(decode, KVPoll.SUCCESS)
            reach(prefill, KVPoll.SUCCESS)
            compared += check(source, target, requests, prefix, tokens)
            items = [pages, *states]
            names = [at for at, buffers in enumerate(target.buffers) for _ in buffers.addresses]
            for at, old, new in zip(names, before, target.views(), strict=True):
                others = np.setdiff1d(np.arange(len(new)), items[at])
                if not np.array_equal(old[others], new[others]):
                    raise SystemExit(f"{tokens} tokens behind {prefix}: rows of nobody have changed in {at}")
    print(f"compared {compared} bytes of {len(LENGTHS) + len(longer)} requests")


def reach(side: Any, state: KVPoll) -> None:
    changes: list[Any] = []

    def reached() -> bool:
        changes.extend(side.turn())
        if failed := [change.reason for change in changes if change.state is KVPoll.FAILED]:
            raise SystemExit(f"failed: {failed}")
        return any(change.state is state for change in changes)

    wait_for(reached, seconds=120)


if __name__ == "__main__":
    main()
