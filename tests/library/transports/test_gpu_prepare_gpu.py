"""What a writer does before its first session, on a GPU."""

from __future__ import annotations

import pytest

from pdtransfer.kernels import driver
from pdtransfer.kernels.gpu import gpu_at
from pdtransfer.transports.gpu_launcher import WriterGpu

if driver.count() == 0:
    pytest.skip("no GPU here, or no driver and bindings for it", allow_module_level=True)
pytestmark = pytest.mark.gpu


def test_a_prepared_gpu_has_its_kernel_loaded_and_hands_its_first_launcher_out_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, gpu = gpu_at(0), WriterGpu(0)
    gpu.prepare()
    loaded = dict(here._kernels)
    assert any(name.startswith("kv_copy") for name in loaded)
    monkeypatch.setattr(here, "launch", None)  # nothing is launched again
    gpu.prepare()
    first, second = gpu.launcher(), gpu.launcher()
    assert first is not second
    assert here._kernels == loaded
