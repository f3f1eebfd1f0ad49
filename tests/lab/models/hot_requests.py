"""Rooms of the reference model that are served with HiSparse."""

from __future__ import annotations

from pdtransfer.limits import Limits
from pdtransfer.serve.engine_api import HiSparse
from tests.support.engine_pair import SMALL, prompts, request

TOP, HOT = 16, 48
SPARSE = SMALL | {"top_k": str(TOP), "index_share": "1"}
# Shorter than the device buffer with all that is generated, shorter at first, equal, and several times longer.
LENGTHS = (1, 17, 30, 44, 47, 48, 49, 100, 300, 513)
TOKENS = 8


def hisparse(*, slots=1 << 16, wait=2, quantum=3, policy="longest"):
    limits = Limits(hisparse_wait_steps=wait, hisparse_quantum_steps=quantum)
    return HiSparse(device_slots=slots, hot_tokens=HOT, dense_slots=1024, policy=policy, limits=limits)


def sparse_requests(lengths=LENGTHS, tokens=TOKENS, seed=0):
    return [
        request(index, prompt, max_tokens=tokens, sparse=True) for index, prompt in enumerate(prompts(seed, lengths))
    ]
