"""The pools' hooks on a GPU, and a GPU's memory in another process: `make test-gpu`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.kernels import driver
from pdtransfer.kernels import gpu as gpus
from pdtransfer.kernels.pool_hooks import backup_from_device_all_layer, load_to_device_per_layer
from pdtransfer.kernels.pools import Pool
from pdtransfer.memory import cuda_ipc
from pdtransfer.serve.engine_api import GpuMemory
from tests.support.layout_tensors import Pool as Tensors
from tests.support.layout_tensors import mha, mla
from tests.support.paths import REPO

if driver.count() == 0:
    pytest.skip("no GPU here, or no driver and bindings for it", allow_module_level=True)
pytestmark = pytest.mark.gpu

SLOTS = 4_096


@pytest.mark.parametrize("known", [True, False], ids=["slots of the CPU", "slots of the GPU"])
@pytest.mark.parametrize("model", [mla(layers=range(3, 64)), mha(layers=range(4), heads=range(8))], ids=["mla", "mha"])
def test_rows_go_up_layer_by_layer_and_down_all_at_once(model: Any, known: bool) -> None:
    from pdtransfer.memory.arena_memory import ArenaMemory

    gpu, sides = gpus.gpu_at(0), []
    for name, content in (("page_first", True), ("layer_first", False), ("page_first", False)):
        tensors = Tensors(name=name, model=model, page_size=16, slots=SLOTS)
        if content:
            tensors.fill(np.arange(SLOTS) + 1_000)
        sides.append(tensors)
    arenas = [ArenaMemory.create(len(sides[at].memory)) for at in (0, 2)]
    for arena, tensors in zip(arenas, (sides[0], sides[2]), strict=True):
        arena.gpu = gpu
        arena.prefault()
        arena.mapping.array[: len(tensors.memory)] = tensors.memory
    device = torch.from_numpy(sides[1].memory).cuda()
    host, back = (
        Pool(layout=tensors.layout, address=arena.mapping.registered.device_address, device=0, host=True)  # type: ignore[union-attr]
        for arena, tensors in zip(arenas, (sides[0], sides[2]), strict=True)
    )
    on_card = Pool(layout=sides[1].layout, address=device.data_ptr(), device=0)
    rng, stream = np.random.default_rng(1), gpu.stream()
    up, down, home = (rng.permutation(SLOTS)[:3_000] for _ in range(3))
    given = [torch.from_numpy(each).cuda() if not known else each for each in (up, down)]
    torch.cuda.synchronize()
    events = load_to_device_per_layer(on_card, host, *given, 3_000, stream=stream)
    assert list(events) == sorted({layer for _, layer, _ in model.rows()})
    other = gpu.stream()
    list(events.values())[-1].hold(other)  # the backup follows the last layer, on another stream
    backup_from_device_all_layer(back, on_card, home, up, 3_000, stream=other).wait()
    assert all(event.query() for event in events.values())
    sides[2].memory[:] = arenas[1].mapping.array[: len(sides[2].memory)]
    for kind, layer, head in model.rows():
        assert np.array_equal(sides[2].read(kind, layer, head, home), sides[0].read(kind, layer, head, down))
    for arena in arenas:
        arena.close()


OTHER = """
import sys
import numpy as np
from pdtransfer.kernels import gpu as gpus
from pdtransfer.memory.cuda_ipc import Handle, Opened
handle = Handle.unpack(bytes.fromhex(sys.argv[1]))
opened, again = Opened(handle), Opened(handle)
here = gpus.gpu_at(opened.device)
there, seen = here.pinned(opened.byte_count)
here.copy(seen, opened.address, opened.byte_count, 0)
here.synchronise(0)
words = gpus.words(there, opened.byte_count // 4)
print(int(words.sum()))
words[:] = 7
here.copy(again.address, seen, opened.byte_count, 0)
here.synchronise(0)
opened.close()
again.close()
"""


@pytest.mark.parametrize("by", ["torch", "driver"])
def test_another_process_reads_and_writes_a_cards_memory(by: str) -> None:
    gpu, keep = gpus.gpu_at(0), torch.zeros(1_000, dtype=torch.int32, device="cuda")  # what comes behind has an offset
    tensor = torch.arange(1_000, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    address = tensor.data_ptr()
    if by == "driver":
        address = gpu.allocate(4_000)
        gpu.copy(address, tensor.data_ptr(), 4_000, 0)
        gpu.synchronise(0)
    handle = cuda_ipc.export(GpuMemory(device=0, address=address, byte_count=4_000))
    assert by == "driver" or handle.offset, "a place in what torch has allocated at once"
    ran = subprocess.run(
        [sys.executable, "-c", OTHER, handle.packed.hex()], capture_output=True, text=True, check=False, cwd=REPO,
        timeout=120,
    )  # fmt: skip
    assert ran.stdout.strip() == str(999 * 1_000 // 2), ran.stderr
    back, seen = gpu.pinned(4_000)
    gpu.copy(seen, address, 4_000, 0)
    gpu.synchronise(0)
    assert (gpus.words(back, 1_000) == 7).all()
    assert not keep.any()
