"""Turns of a copier's threads: whose piece is next."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from pdtransfer.handoff.effects import Verify
from pdtransfer.kernels.cancel import CancelWord
from pdtransfer.transports.copier import PIECE_BYTES, Copier, CopyWork, Piece


def test_a_turn_is_of_so_many_bytes_in_however_many_pieces_and_works() -> None:
    said, ended, started, gate = list[int](), list[int](), threading.Event(), threading.Event()

    def work_of(grant: int, count: int, byte_count: int) -> CopyWork[Verify]:
        """A work of some pieces, each of so many bytes, that says when each is done; none is before `gate`."""

        def do() -> int:
            started.set()
            gate.wait()
            said.append(grant)
            return 0

        pieces: Iterator[tuple[int, Piece]] = iter([(byte_count, do)] * count)
        return CopyWork(order=Verify(1, grant, 0, ()), done=lambda: None, pieces=pieces, cancel=CancelWord())

    copier = Copier[Verify](1, lambda work: ended.append(work.order.grant))
    copier.add(work_of(1, 4, PIECE_BYTES - 40_000))  # as many whole rows as go into it
    started.wait()  # the thread is in its first piece, and the grant waits again
    for _ in range(5):  # a turn of four, and one that is behind the other grant's next turn
        copier.add(work_of(2, 1, PIECE_BYTES // 4))
    gate.set()
    copier.close()
    assert said == [1, 1, 2, 2, 2, 2, 1, 2, 1]
    assert sorted(ended) == [1, 2, 2, 2, 2, 2]
