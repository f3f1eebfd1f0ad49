"""The pools of pipeline stages, by SGLang's own classes on a CPU: what SGLang lists of them, and their components, as a
line of JSON for each stage. Runs in SGLang's environment, without a server.

    python -m tests.engines.sglang_stage_pools '[{"full": [0, 3], "linear": [1, 2]}, {"full": [4], "linear": []}]'
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.utils import build_kv_layer_ids, get_kv_transfer_buf_infos, setup_state_kv_args
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool

from pdtransfer.adapters.kit.kinds import Heads
from pdtransfer.adapters.sglang.pools import HeadCounts, extent_of, kv_buffers, pools, state_buffers
from pdtransfer.adapters.sglang.states import drop_empty_states
from pdtransfer.wire import Ranks

HEADS, LAYERS, PAGE_SIZE = 2, 6, 16


def args_of(full: list[int], linear: list[int]) -> tuple[Any, Any]:
    """SGLang's KVArgs of a stage with these layers, and the pool that they are of."""
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=8, n_groups=1, num_heads=4, head_dim=2, state_size=4, conv_kernel=3
    )
    states = MambaPool(
        size=8, spec_state_size=0, cache_params=Mamba2CacheParams(shape=shape, layers=linear), mamba_layer_ids=linear,
        device="cpu",
    )  # fmt: skip
    pool = HybridLinearKVPool(
        size=64, dtype=torch.float32, page_size=PAGE_SIZE, head_num=HEADS, head_dim=4, full_attention_layer_ids=full,
        device="cpu", mamba_pool=states, start_layer=min(full + linear),
    )  # fmt: skip
    args = KVArgs()
    args.page_size, args.aux_item_lens, args.num_draft_entries = PAGE_SIZE, [4], 0
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = get_kv_transfer_buf_infos(pool)
    args.kv_layer_ids = build_kv_layer_ids(
        token_to_kv_pool=pool, draft_token_to_kv_pool=None, num_draft_entries=0, num_hidden_layers=LAYERS
    )
    setup_state_kv_args(args, pool, None, total_kv_layers=LAYERS)
    return args, pool


def layers_of(args: Any) -> dict[str, list[int]]:
    """The layers of each component."""
    heads, kv, states = Heads(HEADS, Ranks()), kv_buffers(args), state_buffers(args)
    base, model = extent_of([kv, *states], None).first, HeadCounts(False, heads, heads, "float32")
    described = pools(args, model, lambda _: (base, "dram"), kv=kv, states=states)
    return {part.name: sorted({plane.layer for plane in part.component.layout.planes}) for part in described.parts}


def main() -> None:
    for stage in json.loads(sys.argv[1]):
        args, _pool = args_of(**stage)
        listed = [kind.value for kind in args.state_types]
        drop_empty_states(args)
        asked = [kind.value for kind in args.state_types]
        print(json.dumps({"listed": listed, "asked": asked, "layers": layers_of(args)}))


if __name__ == "__main__":
    main()
