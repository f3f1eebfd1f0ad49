"""Turns of a copier's threads: whose piece is next."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pdtransfer.kernels.cancel import CancelWord
from pdtransfer.transports.copier import PIECE_BYTES, Copier, CopyWork, Piece
from pdtransfer.transports.works import OpenWorks
from tests.support.waiting import on_loop, until


async def test_a_turn_is_of_so_many_bytes_in_however_many_pieces_and_works() -> None:
    done, ended, started, gate = list[int](), list[int](), threading.Event(), threading.Event()

    def work_of(grant: int, count: int, byte_count: int) -> CopyWork:
        """A work of some pieces, each of this many bytes, that says when each is done; none is before `gate`."""

        def do() -> int:
            started.set()
            gate.wait()
            done.append(grant)
            return 0

        pieces: Iterator[tuple[int, Piece]] = iter([(byte_count, do)] * count)
        return CopyWork(
            turn=(1, grant), pieces=pieces, cancel=CancelWord(), report=lambda work: ended.append(work.turn[1])
        )

    copier = Copier(1)
    copier.add(work_of(1, 4, PIECE_BYTES - 40_000))  # as many whole rows as go into it
    started.wait()  # the thread is in its first piece, and the grant waits again
    for _ in range(5):  # a turn of four, and one that is behind the other grant's next turn
        copier.add(work_of(2, 1, PIECE_BYTES // 4))
    gate.set()
    await until(lambda: len(ended) == 6)
    await copier.close()
    assert done == [1, 1, 2, 2, 2, 2, 1, 2, 1]
    assert sorted(ended) == [1, 2, 2, 2, 2, 2]


async def test_a_work_is_reported_once_and_what_comes_behind_its_end_is_not_called() -> None:
    works, called = OpenWorks(), list[str]()
    work = CopyWork(turn=(1, 1), pieces=iter(()), cancel=CancelWord(), report=lambda _: called.append("end"))
    works.add(work)
    threads = [lambda: works.call(work, lambda: called.append("call")), lambda: works.end(work)]
    for each in (*threads, threads[0]):
        await asyncio.to_thread(each)
    await until(lambda: not works._calls)
    assert called == ["call", "end"]


@pytest.mark.parametrize("more", [0, 12])
def test_copies_are_nicer_than_the_loop_and_never_less_nice_than_the_process(more: int) -> None:
    """What is nicer than 5 may not become less so without a privilege, which containers do not have."""
    given = os.getpriority(os.PRIO_PROCESS, 0) + more
    found: list[int] = []

    def do() -> int:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return 0

    @on_loop
    async def copy() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), given)  # of this thread, and of those that it starts
        copier = Copier(1)
        pieces: Iterator[tuple[int, Piece]] = iter([(1, do)])
        copier.add(CopyWork(turn=(1, 1), pieces=pieces, cancel=CancelWord(), report=lambda _: None))
        await until(lambda: bool(found))
        await copier.close()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(copy).result()
    assert found == [min(max(5, given), 19)]
