"""Other chunks, batches, pages, layouts and pools for the same requests: none may change a bit of what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pdtransfer_lab.models.factory import Generation, generate_many

from pdtransfer.wire import Sampling
from tests.support.engine_pair import config

otherwise = pytest.mark.parametrize(
    "cut",
    [
        {"host_layout": layout, "page_size": page, "chunk_tokens": chunk, "batch_max": batch, "slots": slots}
        | {"layers_per_cell": layers}
        for layout, page, chunk, batch, slots, layers in (
            ("page_first", 1, 64, 64, 4096, 1),
            ("page_first_direct", 16, 37, 3, 1024, 2),
            ("page_head", 64, 130, 5, 2048, 0),
            ("layer_first", 16, 1000, 1, 576, 0),
        )
    ],
    ids=lambda cut: "-".join(map(str, cut.values())),
)


def are_the_same(
    cut: dict[str, Any],
    attention: str,
    options: dict[str, str],
    requests: Sequence[tuple[NDArray[np.int64], Sampling]],
    expected: Sequence[Generation],
) -> bool:
    """Whether they come out as expected where the work is cut so, and they come in another order."""
    more = cut.copy()
    layers = str(more.pop("layers_per_cell"))
    made = config(attention=attention, options=options | {"layers_per_cell": layers}, **more)
    order = np.random.default_rng(more["chunk_tokens"]).permutation(len(requests))
    return generate_many(made, [requests[at] for at in order]) == [expected[at] for at in order]
