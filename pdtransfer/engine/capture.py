"""What is queued on a card, captured in a graph while other threads allocate and copy."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def captured(pool: Any = None) -> Generator[torch.cuda.CUDAGraph]:
    """What is queued within, on a stream that is not torch's default; the graph may be replayed afterwards.

    `pool` is shared with graphs that never run at once. A stream whose capture nobody ends takes no other work.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield graph
    except BaseException:
        with suppress(RuntimeError):  # what was raised first says why
            graph.capture_end()
        raise
    graph.capture_end()
