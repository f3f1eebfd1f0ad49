"""A stand-in for the CUDA graphs of a checkpoint's decode steps, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from pdtransfer.serve.engines.transformers import steps


class Replays:
    """Takes the place of CUDA graphs: a replay does the work again into the same tensors. Like a GPU's graph it sees
    only what lies in the tensors of the capture."""

    def __init__(self) -> None:
        self.captured, self.replayed = 0, 0
        self._work: Callable[[], Any] | None = None

    def install(self, patch: pytest.MonkeyPatch) -> None:
        own = steps.computed

        def noted(*given: Any) -> Any:
            made = own(*given)
            self._work = lambda: (made, own(*given))
            return made

        @contextmanager
        def captured(pool: object) -> Generator[Any]:
            self.captured += 1
            graph = Graph(self)
            yield graph
            graph.work = self._work

        patch.setattr(steps, "computed", noted)
        patch.setattr(steps, "captured", captured)
        patch.setattr(steps.Captures, "side_stream", lambda _: nullcontext())


class Graph:
    def __init__(self, of: Replays) -> None:
        self._of, self.work = of, None

    def pool(self) -> object:
        return self

    def replay(self) -> None:
        self._of.replayed += 1
        assert self.work is not None
        made, again = self.work()
        for name in ("logits", "finite", "likeliest"):
            getattr(made, name).copy_(getattr(again, name))
