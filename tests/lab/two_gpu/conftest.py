"""Where these tests run: on the CPU, on one GPU, on two; each gives the reason where it cannot."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

from pdtransfer.bounds import device_index
from pdtransfer.kernels import driver
from tests.lab.two_gpu.matrix import Case

Devices = tuple[str, str]  # prefill's and decode's
CPU, ONE, TWO = ("cpu", "cpu"), ("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")


def marks(devices: Devices) -> list[pytest.MarkDecorator]:
    """What picks the tests on them, and skips them where they are not."""
    if devices == CPU:
        return []
    needed = 1 + max(device_index(device) or 0 for device in devices)
    why = f"needs {needed} GPUs, {driver.count()} are here"
    return [
        pytest.mark.gpu if needed == 1 else pytest.mark.two_gpu,
        pytest.mark.skipif(driver.count() < needed, reason=why),
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`devices` are all three pairs, of which the first two take of a module's CASES those that are `here`; or as
    --devices says, with all of them, and the mark of two GPUs."""
    if "devices" not in metafunc.fixturenames:
        return
    chosen: str = metafunc.config.getoption("devices")
    pairs = [tuple(chosen.split(","))] if chosen else [CPU, ONE, TWO]
    cases: list[Case] = getattr(metafunc.module, "CASES", [])
    given = []
    for pair in pairs:
        whole = bool(chosen) or pair == TWO
        marked = marks(pair) + [pytest.mark.two_gpu] * bool(chosen)
        if "case" in metafunc.fixturenames:
            given += [
                pytest.param(pair, case, marks=marked, id=f"{','.join(pair)}-{case}")
                for case in cases
                if whole or case.here
            ]
        else:
            given.append(pytest.param(pair, marks=marked, id=",".join(pair)))
    metafunc.parametrize(("devices", "case") if "case" in metafunc.fixturenames else "devices", given)
