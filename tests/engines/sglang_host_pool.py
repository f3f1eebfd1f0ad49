"""SGLang's own pools, of the device and of the host, under the plugin's hooks: a request lands in the host pool, and is
loaded by SGLang's code. Runs in SGLang's environment, on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import mha
from sglang.srt.plugins.hook_registry import HookRegistry

from pdtransfer import DecodeClient, KVPoll, NodeSettings, PrefillClient, WriterOptions
from pdtransfer.adapters.kit.cache_memory import CacheMemory
from pdtransfer.adapters.kit.kinds import Heads
from pdtransfer.adapters.sglang import hooks, process
from pdtransfer.adapters.sglang.decode import ReceivingSide
from pdtransfer.adapters.sglang.pools import Buffers, HeadCounts, extent_of, kv_buffers, pools
from pdtransfer.adapters.sglang.prefill import SendingSide
from pdtransfer.adapters.sglang.rooms import Uses
from pdtransfer.wire import Ranks
from tests.engines.plugins import sglang_on_cpu
from tests.support.waiting import wait_for

LAYERS, HEADS, WIDTH, PAGE_SIZE, SLOTS = 3, 2, 16, 16, 128


def device_pool() -> MHATokenToKVPool:
    return MHATokenToKVPool(
        SLOTS, PAGE_SIZE, torch.float32, HEADS, WIDTH, LAYERS, "cpu", False, enable_alt_stream=False
    )


def args_of(pool: MHATokenToKVPool) -> Any:
    addresses, byte_counts, item_bytes = pool.get_contiguous_buf_infos()
    return SimpleNamespace(
        page_size=PAGE_SIZE, kv_data_ptrs=addresses, kv_data_lens=byte_counts, kv_item_lens=item_bytes,
        aux_item_lens=[4], state_types=[], num_draft_entries=0,
    )  # fmt: skip


def main() -> None:
    hooks.register()
    HookRegistry.apply_hooks()
    sglang_on_cpu.plugin()
    hooks._receives_on_host = lambda: True
    source, target = device_pool(), device_pool()
    for buffer in source.k_buffer + source.v_buffer:
        buffer.normal_()
    args = args_of(target)
    extent = extent_of([kv_buffers(args)], None)
    memory = process.memory = CacheMemory(args.kv_data_lens)
    process.extent = extent
    host = mha.MHATokenToKVPoolHost(
        target._mha_buffer_info(), 2.0, 0, PAGE_SIZE, "layer_first", device_capacity_tokens=SLOTS, start_layer=0,
        end_layer=LAYERS,
    )  # fmt: skip
    views = host.k_data_refs + host.v_data_refs
    assert all(memory.has_beside(view.data_ptr()) for view in views), "the host pool is not in the arena"

    heads = Heads(HEADS, Ranks())
    model = HeadCounts(False, heads, heads)
    landing = memory.target(extent)
    described = pools(args, model, landing.locate, kv=kv_buffers(args), states=())
    of_host = Buffers(
        [view.data_ptr() for view in views], [view.nbytes for view in views],
        [view[0].nbytes * PAGE_SIZE for view in views],
    )  # fmt: skip
    components = described.components + pools(args, model, landing.locate, kv=of_host, states=()).components
    given = args_of(source)
    first = extent_of([kv_buffers(given)], None).first
    sent = pools(given, model, lambda _: (first, "dram"), kv=kv_buffers(given), states=())
    named: dict[str, Any] = {"model": "m", "weights": b"w"}
    aux: dict[int, bytes] = {}
    with (
        PrefillClient(NodeSettings(node="p", **named), sent.components, writer=WriterOptions(pool_address=first)) as p,
        DecodeClient(
            NodeSettings(node="d", **named), components, landing.arena, engine_slots=True, prefix_cache=False,
            enable_hisparse=True, verify=True,
        ) as d,
    ):  # fmt: skip
        prefill = SendingSide(p, sent, time_left_s=60.0)
        decode = ReceivingSide(d, described, Uses(1), put_aux=aux.__setitem__, aux_bytes=4, time_left_s=60.0)
        host_slots = host.alloc(3 * PAGE_SIZE)
        pages = (host_slots[::PAGE_SIZE] // PAGE_SIZE).numpy()
        decode.expect(7, pages, prefix=0, states=[], aux_index=5, sources=[p.endpoint], host=True)
        prefill.begin(7)
        wait_for(lambda: any(change.state is KVPoll.WAITING_FOR_INPUT for change in prefill.turn()), seconds=120)
        prefill.push(7, torch.tensor([4, 1, 6]).numpy(), first_page=0, aux=b"aux!")
        wait_for(lambda: any(change.state is KVPoll.SUCCESS for change in decode.turn()), seconds=120)
    computed = torch.cat([torch.arange(page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in (4, 1, 6)])
    loaded = torch.arange(2 * PAGE_SIZE, 5 * PAGE_SIZE)
    for layer in range(LAYERS):
        host.load_to_device_per_layer(target, host_slots, loaded, layer, "direct")
        for here, there in ((source.k_buffer, target.k_buffer), (source.v_buffer, target.v_buffer)):
            assert torch.equal(here[layer][computed], there[layer][loaded]), f"layer {layer} differs"
    assert aux == {5: b"aux!"}
    print("loaded what prefill has computed")


if __name__ == "__main__":
    main()
