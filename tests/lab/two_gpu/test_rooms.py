"""Rooms from one device's memory into another's, exact to the byte, also where somebody gives up or dies on the way."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from pdtransfer.bounds import device_index
from pdtransfer.handoff.effects import RoomFailed, RoomReady
from pdtransfer.memory.cuda_ipc import Handle
from pdtransfer.transports.engines.card_use import why_no_card
from pdtransfer.transports.mooncake import MooncakeLibrary
from pdtransfer.transports.options import Network
from tests.lab.two_gpu.clients import Landed, Two, holds, two
from tests.lab.two_gpu.hbm_prefill import INDEX, pool_of
from tests.support.internals import node_of, sessions_of

STILL_S = 0.3  # dozens of launches
ROOMS = ((1, 1), (2, 1_000), (3, 2_111), (4, 64))  # and the tokens of each
LARGE = 8_000


WAYS = pytest.mark.parametrize("way", ["ipc", "mooncake", "copied-up"])


@contextmanager
def both(devices: tuple[str, str], way: str) -> Iterator[Two]:
    """Two clients, the writer of which reaches HBM itself, by decode's engines, or not."""
    if way == "mooncake" and (reason := MooncakeLibrary().why_not()):
        pytest.skip(reason)
    if None in map(device_index, devices[way == "mooncake" :] if way != "copied-up" else ()):
        pytest.skip("without a GPU no process reaches HBM, or what stands for it, of another one")
    with two(devices, transport="mooncake" if way == "mooncake" else "auto", prefix_cache=False) as it:
        assert it.arena.hbm is not None
        if way == "copied-up":
            it.arena.hbm.handle = b""
        if way == "mooncake" and (why := why_no_card(MooncakeLibrary(), Network(), Handle.unpack(it.arena.hbm.handle))):
            pytest.skip(f"engines do not reach the GPU's memory: {why}")
        yield it


def untouched(it: Two) -> bool:
    """Whether nothing has landed in the staging buffer."""
    return holds(torch.from_numpy(it.arena.mapping.array[it.arena.staging_base :]))


@WAYS
def test_both_components_of_a_room_are_exact_to_the_byte_and_nothing_else_is_touched(
    devices: tuple[str, str], way: str
) -> None:
    with both(devices, way) as it:
        into, direct = Landed(), way != "copied-up"
        for room, tokens in ROOMS:
            it.send(room, tokens, growth=5)
        for room, tokens in ROOMS:
            into.add(it.ready(room), room, tokens)
        into.check(it)
        rows = sum(tokens for _, tokens in ROOMS)
        copied_bytes = it.core.post_landing.copied_bytes.total()
        assert copied_bytes == (0 if direct else rows * pool_of(INDEX).layout.row_bytes)
        assert (it.core.post_landing.copies.total() > len(ROOMS)) is not direct, "large rooms cross in pieces"
        (session,) = it.core.prefill_peers.sessions.values()
        assert session.hbm_direct is direct
        assert untouched(it) is direct, "where rows are written to HBM, the buffer stays as it is"
        for room, _ in ROOMS:
            it.decode.release(room)
        it.until(lambda: it.core.idle)


@WAYS
def test_rooms_that_are_aborted_on_the_way_give_slots_back_that_nobody_writes_any_more(
    devices: tuple[str, str], way: str, measured: Callable[[str], None]
) -> None:
    with both(devices, way) as it:
        into = Landed()
        it.send(99, 100)  # a tenant, whose rows stay as they are
        into.add(it.ready(99), 99, 100)
        free = it.free
        for room in range(1, 21):
            it.send(room, LARGE, how="begin" if room == 1 else "send")  # that one cannot come to its end before
            it.wait_for_line(f"Leased {room}")
            time.sleep(0.0007 * (room % 5))
            it.decode.abort(room)
            if isinstance(it.end_of(room), RoomReady):
                it.decode.release(room)
            it.until(lambda: it.free == free)
            kept = wiped(it, into)
            assert kept(), "written after its proof"
        time.sleep(STILL_S)
        assert kept()
        failed = sum(isinstance(event, RoomFailed) for event in it.events)
        measured(f"{failed} of 20 rooms were aborted on the way")
        assert failed


def wiped(it: Two, into: Landed) -> Callable[[], bool]:
    """Canaries over all that is nobody's, and a look whether they and the tenants are still there."""
    for memory, expected in ((it.arena.mapping.array, into.kv), (it.hbm, into.index)):
        whole: Any = expected.pool.memory
        if memory is it.hbm:
            it.hbm.copy_(it.hbm.new_tensor(whole))
        else:
            memory[: len(whole)] = whole
    return lambda: (
        bool((it.arena.mapping.array[: len(into.kv.pool.memory)] == into.kv.pool.memory).all())
        and np.array_equal(it.hbm.cpu().numpy(), into.index.pool.memory)
    )


@WAYS
def test_a_killed_prefills_slots_stay_in_quarantine_until_nobody_writes_them(
    devices: tuple[str, str], way: str, measured: Callable[[str], None]
) -> None:
    with both(devices, way) as it:
        into = Landed()
        it.send(1, 100)
        into.add(it.ready(1), 1, 100)
        free = it.free
        it.send(2, LARGE, how="begin")
        it.wait_for_line("Leased 2")
        killed = time.monotonic()
        it.process.send_signal(signal.SIGKILL)
        offered = node_of(it.decode).transport._made["mooncake" if way == "mooncake" else "shm"]

        def fenced() -> bool:
            if it.free != free:
                return False
            assert all(offered.quiet(each) for each in list(sessions_of(offered))), "its slots are free too early"
            return True

        it.until(fenced)
        measured(f"slots free {time.monotonic() - killed:.3f} s after SIGKILL")
        assert isinstance(it.end_of(2), RoomFailed)
        kept = wiped(it, into)
        time.sleep(STILL_S)
        assert kept(), "written after the fence"
