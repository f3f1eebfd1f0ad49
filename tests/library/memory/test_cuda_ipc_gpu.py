"""A GPU's memory in another process: `make test-gpu`."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.kernels import driver
from pdtransfer.kernels import gpu as gpus
from pdtransfer.memory import cuda_ipc
from pdtransfer.serve.engine_api import GpuMemory
from tests.support.paths import REPO

if driver.count() == 0:
    pytest.skip("no GPU here, or no driver and bindings for it", allow_module_level=True)
pytestmark = pytest.mark.gpu


OTHER = """
import sys
import numpy as np
from pdtransfer.kernels import gpu as gpus
from pdtransfer.memory.cuda_ipc import Handle, Opened
handle = Handle.unpack(bytes.fromhex(sys.argv[1]))
opened, again = Opened(handle, 0), Opened(handle, 0)
here = gpus.gpu_at(0)
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
