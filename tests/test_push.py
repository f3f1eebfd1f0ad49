"""push without a card, against the tensors' own indexing."""

from __future__ import annotations

import numpy as np

from pdtransfer.kernels.pools import Pool, Progress, State
from pdtransfer.kernels.push import push

from .layout_tensors import Pool as Tensors
from .layout_tensors import mla


def test_a_push_lands_and_says_so() -> None:
    source, target = (Tensors(name="layer_first", model=mla(), page_size=4, slots=32) for _ in range(2))
    source.fill(np.arange(32))
    pools = [Pool(layout=each.layout, address=each.memory.ctypes.data) for each in (target, source)]
    progress = Progress()
    push(pools[0], pools[1], range(8, 16), range(8), 8, progress=progress)
    assert progress.state is State.COMPLETE
    for layer in range(3):
        landed, sent = target.read("latent", layer, 0, np.arange(8, 16)), source.read("latent", layer, 0, np.arange(8))
        assert np.array_equal(landed, sent)
