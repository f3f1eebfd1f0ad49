"""DeepSeek V4's pools, by SGLang's own classes on a CPU: requests go from one such pool to another. Runs in SGLang's
environment, without a server: its attention needs a GPU.

    python -m tests.engines.sglang_compressed_pools '{"page_size": 256, "fp4_indexer": false, "draft": true}'

With "hisparse" in the place of "draft" decode's rows of 4 are in SGLang's host pool, under the plugin's hooks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt import runtime_context
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.mem_cache.common import kv_to_page_indices
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool
from sglang.srt.server_args import ServerArgs

from pdtransfer.adapters.kit.kinds import Heads
from pdtransfer.adapters.sglang.pools import DRAFT_LAYER, HeadCounts
from pdtransfer.wire import Ranks
from tests.engines.sglang_pools import Engine, hand_over

RATIOS = [0, 4, 128, 4, 128, 4]
WINDOW, PAGES, WINDOW_PAGES, REQUESTS = 128, 12, 6, 5
LENGTHS = (1, 3, 4, 5, 127, 128, 129, 300, 255, 256, 257, 512, 1023)
HEADS = HeadCounts(True, Heads(1, Ranks()), Heads(1, Ranks()))


class CompressedEngine(Engine):
    """DeepSeek V4's."""

    layer_count, window, model = len(RATIOS), WINDOW, HEADS

    def __init__(
        self, seed: int, page_size: int, requests: int, *, draft: bool = False, hisparse: bool = False
    ) -> None:
        def made() -> tuple[Any, Any]:
            pool = pool_of(RATIOS, page_size, requests, hisparse=hisparse)
            return pool, pool_of([0], page_size, requests) if draft else None

        super().__init__(seed, page_size, requests, made, hisparse=hisparse)
        full_to_window = torch.zeros((PAGES + 1) * page_size, dtype=torch.int64)
        for pool in (self.pool, self.draft):
            if pool is not None:
                pool.register_mapping(full_to_window)

    def host_pool(self) -> Any:
        """As SGLang's coordinator of HiSparse makes it, which needs CUDA itself."""
        device = self.pool.c4_kv_pool
        return DeepSeekV4PagedHostPool(
            pool_name="c4", device_buffers=device.kv_buffer, item_bytes=device.bytes_per_page_padded,
            num_host_pages=PAGES + 1, slot_page_size=device.page_size, layout="layer_first",
        )  # fmt: skip

    def tensors(self) -> list[torch.Tensor]:
        host = [] if self.host is None else self.host.kv_buffer
        return [*host, *_tensors(self.pool), *([] if self.draft is None else _tensors(self.draft))]

    def place(self, tokens: int) -> int:
        """The window's pages are in any order too."""
        request = int(self.random.integers(self.requests))
        full = self.place_pages(request, tokens, PAGES)
        window = self.random.permutation(np.arange(1, WINDOW_PAGES + 1))
        mapping = self.pool.full_to_swa_index_mapping
        mapping.zero_()
        for page_of_full, page in zip(full[::-1], window, strict=False):
            first = int(page_of_full) * self.page_size
            mapping[first : first + self.page_size] = torch.arange(page * self.page_size, (page + 1) * self.page_size)
        if self.host is not None:  # as decode's `_pre_alloc` does
            self.host.clear()
            self.host.free_slots = self.host.free_slots.view(-1, self.host.page_size)[
                torch.from_numpy(self.random.permutation(PAGES + 1))
            ].view(-1)
            self.host_slots.fill_(-1)
            self.host_lengths.zero_()
            slots = self.host.alloc_paged_token_slots(self.host_slots, self.host_lengths, request, 0, tokens // 4)
            self.host_pages = kv_to_page_indices(slots, self.host.page_size)
        return request

    def state_indices(self, request: int, prefix: int, tokens: int) -> dict[Any, Any]:
        first = max(prefix, tokens - WINDOW) // self.page_size * self.page_size
        window = self.window_slots(self.at(request, np.arange(first, tokens)))
        return {
            StateType.SWA: kv_to_page_indices(window, self.page_size),
            StateType.DSV4_REQUEST_STATE: self.pool.request_state_transfer_indices(request, tokens),
        }

    def rows(self, request: int, first: int, tokens: int) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        pool = self.pool
        for layer, ratio in enumerate(RATIOS):
            positions = np.arange(max(first, tokens - WINDOW), tokens)
            window = pool.translate_loc_from_full_to_swa(self.at(request, positions))
            yield f"window of layer {layer}", packed(pool.swa_kv_pool, pool.swa_kv_pool.kv_buffer[layer], window)
            if not ratio:
                continue
            compressed = self.at(request, np.arange(first // ratio * ratio + ratio - 1, tokens, ratio)) // ratio
            _, number, of_ratio = pool.layer_mapping[layer]
            kept = of_ratio.kv_buffer[number], compressed
            if self.host is not None and ratio == 4:
                kept = self.host.kv_buffer[number], self.host_slots[request, first // 4 : tokens // 4]
            yield f"c{ratio} of layer {layer}", packed(of_ratio, *kept)
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
            yield (
                "window of the draft model",
                packed(self.draft.swa_kv_pool, self.draft.swa_kv_pool.kv_buffer[0], window),
            )


def check_names(engine: CompressedEngine, components: Sequence[Any], bases: Mapping[str, int]) -> None:
    """Each plane of the model's is the buffer in which SGLang keeps this kind and layer."""
    pool = engine.pool
    planes = {
        (plane.kind, plane.layer): bases[each.memory] + plane.base
        for each in components
        for plane in each.layout.planes
    }
    wanted: dict[tuple[str, int], torch.Tensor] = {}
    for layer, ratio in enumerate(RATIOS):
        wanted["window", layer] = pool.get_swa_raw_buffer(layer)
        if ratio:
            on_host = ratio == 4 and engine.host is not None
            of_host = engine.host.kv_buffer[pool.layer_mapping[layer][1]] if on_host else None
            wanted[f"c{ratio}", layer] = pool.get_extra_key_buffer(layer) if of_host is None else of_host
            wanted[f"c{ratio}_state", layer] = pool.get_attention_compress_states(layer).kv_score_buffer.kv_score
        if ratio == 4:
            wanted["c4_index", layer] = pool.get_index_k_with_scale_buffer(layer)
            wanted["c4_index_state", layer] = pool.get_indexer_compress_states(layer).kv_score_buffer.kv_score
    for name, tensor in wanted.items():
        if planes.pop(name) != tensor.data_ptr():
            raise SystemExit(f"{name}: its plane is another buffer")
    if any(layer < DRAFT_LAYER for _, layer in planes):
        raise SystemExit(f"{sorted(planes)} are no buffers of SGLang's")


def pool_of(ratios: list[int], page_size: int, requests: int, *, hisparse: bool = False) -> Any:
    full = PAGES * page_size
    return DeepSeekV4TokenToKVPool(
        max_num_reqs=requests, num_req_slots=requests, swa_size=WINDOW_PAGES * page_size,
        c4_size=full // 4 // (2 if hisparse else 1), enable_hisparse=hisparse,
        c128_size=full // 128, c4_state_pool_size=WINDOW_PAGES * 8, c128_state_pool_size=requests * 128,
        page_size=page_size, swa_page_size=page_size, sliding_window=WINDOW, dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32, c128_state_dtype=torch.float32, qk_nope_head_dim=448, qk_rope_head_dim=64,
        indexer_head_dim=128, layer_num=len(ratios), device="cpu", enable_memory_saver=False,
        compression_ratios=ratios, full_size=full,
    )  # fmt: skip


def packed(pool: Any, buffer: torch.Tensor, slots: torch.Tensor) -> NDArray[np.uint8]:
    """Rows of a paged pool's buffer as SGLang's kernels address them: values, behind all of a page the scales."""
    layout, size = pool.kv_layout, pool.page_size
    row, scales, scale = layout.row_addressing(size)
    raw = buffer.view(torch.uint8).numpy()
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


def main() -> None:
    given = json.loads(sys.argv[1])
    page_size = given["page_size"]
    runtime_context.get_context().set_server_args(
        ServerArgs(model_path="none", device="cpu", enable_deepseek_v4_fp4_indexer=given["fp4_indexer"])
    )
    draft, hisparse = given.get("draft", False), given.get("hisparse", False)
    source = CompressedEngine(1, page_size, REQUESTS, draft=draft)
    target = CompressedEngine(2, page_size, REQUESTS + 2, draft=draft, hisparse=hisparse)
    # With HiSparse decode has no prefix. The last page of 258 has no whole row of 4.
    longer = [(0, 258), (0, 515)] if hisparse else [(page_size, page_size + more) for more in (1, 5, 128, 300)]
    print(hand_over(source, target, [*((0, tokens) for tokens in LENGTHS), *longer], check_names))


if __name__ == "__main__":
    main()
