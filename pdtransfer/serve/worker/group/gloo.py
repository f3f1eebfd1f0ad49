"""The engine's collectives over torch.distributed's gloo: tensors only, nothing is pickled.

A rank that dies fails the collectives of all others at once. A frozen rank stops them until the bus reports its
silence.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

from ....errors import WorldError
from ....wire import Ranks

_torch: Any = torch
_dist: Any = torch.distributed

MEET_S = 60.0  # seconds until all ranks have found each other
STEP_S = 3600.0  # seconds; longer than any step, since the bus ends a wait for a frozen rank
AHEAD_MAX = 2  # chunks that a stage may be ahead of the next


class Gloo:
    """Implements engine_api.Group; `meet` must be called first."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._store: Any = None
        self._stage: Any = None
        self._all: Any = None
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    @staticmethod
    def store_socket(host: str) -> socket.socket:
        """The socket of the rendezvous; by itself the store would listen on every address."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.bind((host, 0))
        listening.listen()
        return listening

    def meet(self, host: str, port: int, own: str, listening: socket.socket | None = None) -> None:
        """Finds the other ranks at host:port; the leader passes its listening socket. `own` is this host's address for
        the other ranks. Raises RuntimeError."""
        tp_size, place = self.ranks.tp_size, self.ranks.pp_rank * self.ranks.tp_size + self.ranks.tp_rank
        leads = {} if listening is None else {"is_master": True, "master_listen_fd": listening.detach()}
        self._store = _dist.TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=MEET_S), **leads)
        self._stage = _ring(self._store, f"stage{self.ranks.pp_rank}", own, self.ranks.tp_rank, tp_size)
        if self.ranks.pp_size > 1:
            self._all = _ring(self._store, "all", own, place, tp_size * self.ranks.pp_size)

    def gather(self, part: NDArray[Any]) -> list[NDArray[Any]]:
        part = np.ascontiguousarray(part)
        own = _torch.from_numpy(part.reshape(-1).view(np.uint8))  # gloo does not know every dtype of numpy's
        parts = [torch.empty_like(own) for _ in range(self.ranks.tp_size)]
        with _ranks_that_may_be_gone():
            self._stage.allgather([parts], [own]).wait()
        return [each.numpy().view(part.dtype).reshape(part.shape) for each in parts]

    def hand_on(self, hidden: NDArray[np.float32]) -> None:
        copied = _torch.from_numpy(hidden.copy())
        place = (self.ranks.pp_rank + 1) * self.ranks.tp_size + self.ranks.tp_rank
        with _ranks_that_may_be_gone():
            if len(self._sent) == AHEAD_MAX:
                self._sent.popleft()[0].wait()
            self._sent.append((self._all.send([copied], place, 0), copied))

    def take_over(self, hidden: NDArray[np.float32]) -> None:
        place = (self.ranks.pp_rank - 1) * self.ranks.tp_size + self.ranks.tp_rank
        with _ranks_that_may_be_gone():
            self._all.recv([_torch.from_numpy(hidden)], place, 0).wait()


@contextmanager
def _ranks_that_may_be_gone() -> Generator[None]:
    """Raises WorldError for a lost rank, which may be detected before a send or while waiting for it."""
    try:
        yield
    except RuntimeError as error:
        raise WorldError(f"a rank of this worker is gone: {str(error).splitlines()[0]}") from None


def _ring(store: Any, name: str, host: str, rank: int, size: int) -> Any:
    gloo = _dist.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 -- torch has no public way to name the address that gloo listens on
    options._devices = [gloo.create_device(hostname=host)]  # noqa: SLF001
    options._timeout = timedelta(seconds=STEP_S)  # noqa: SLF001
    options._threads = 2  # noqa: SLF001
    return gloo(_dist.PrefixStore(name, store), rank, size, options)
