"""The collectives of a group over real sockets: what a rank hears of another that has gone."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[reference]'")

from pdtransfer.errors import WorldError
from pdtransfer.serve.worker.group.gloo import Gloo
from pdtransfer.wire import Ranks
from tests.support.paths import REPO

HOST = "127.0.0.1"
NEXT = """
import sys
from pdtransfer.serve.worker.group.gloo import Gloo
from pdtransfer.wire import Ranks
Gloo(Ranks(pp_rank=1, pp_size=2)).meet(sys.argv[1], int(sys.argv[2]), sys.argv[1])
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_stage_that_hands_on_to_one_that_was_killed_hears_that_it_is_gone() -> None:
    gloo, listening = Gloo(Ranks(pp_size=2)), Gloo.store_socket(HOST)
    port = listening.getsockname()[1]
    command = [sys.executable, "-c", NEXT, HOST, str(port)]
    with subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE) as other:
        try:
            gloo.meet(HOST, port, HOST, listening)
        finally:
            other.kill()

    def hand_on() -> None:
        for _ in range(100):  # what the socket takes before it knows
            gloo.hand_on(np.zeros((64, 256), np.float32))

    with pytest.raises(WorldError, match="a rank of this worker is gone"):
        hand_on()


@pytest.mark.parametrize(
    "dtype", [np.float32, np.int64, np.uint64, np.bool_, np.dtype([("id", "<u4"), ("value", "<f4")])]
)
def test_parts_of_any_dtype_are_gathered(dtype: Any) -> None:
    gloo, listening = Gloo(Ranks()), Gloo.store_socket(HOST)
    gloo.meet(HOST, listening.getsockname()[1], HOST, listening)
    part = np.frombuffer(np.random.default_rng(0).bytes(np.dtype(dtype).itemsize * 6), np.uint8)
    part = (part & 1 if dtype is np.bool_ else part).view(dtype).reshape(2, 3)
    (found,) = gloo.gather(part.T)
    assert found.dtype == part.dtype
    assert found.tobytes() == np.ascontiguousarray(part.T).tobytes()
    assert found.shape == (3, 2)
