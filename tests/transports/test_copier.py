"""Turns of a copier's threads: whose piece is next."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial

from pdtransfer.transports.copier import PIECE_BYTES, Copier, Piece


@dataclass(eq=False)
class Pieces:
    """A work of some pieces, each of so many bytes, that says when each is done; none is before `gate`."""

    grant: int
    left: int
    piece_bytes: int
    said: list[int]
    started: threading.Event
    gate: threading.Event
    text: str = ""
    checksum: int = 0
    running: int = 0
    exhausted: bool = False

    @property
    def turn(self) -> tuple[int, int]:
        return 1, self.grant

    def next(self) -> Piece | None:
        self.left -= 1
        return partial(self._do) if self.left >= 0 else None

    def _do(self) -> int:
        self.started.set()
        self.gate.wait()
        self.said.append(self.grant)
        return 0


def test_a_turn_is_of_so_many_bytes_in_however_many_pieces_and_works() -> None:
    said, ended, started, gate = list[int](), list[int](), threading.Event(), threading.Event()
    copier = Copier[Pieces](1, lambda work: ended.append(work.grant))
    copier.add(Pieces(1, 4, PIECE_BYTES - 40_000, said, started, gate))  # as many whole rows as go into it
    started.wait()  # the thread is in its first piece, and the grant waits again
    for _ in range(5):  # a turn of four, and one that is behind the other grant's next turn
        copier.add(Pieces(2, 1, PIECE_BYTES // 4, said, started, gate))
    gate.set()
    copier.close()
    assert said == [1, 1, 2, 2, 2, 2, 1, 2, 1]
    assert sorted(ended) == [1, 2, 2, 2, 2, 2]
