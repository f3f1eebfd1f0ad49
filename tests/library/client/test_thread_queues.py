"""The two queues between an engine's thread and a loop: order, wake-ups, bounds, and errors that cost nobody else."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Iterator

import pytest
import uvloop

from pdtransfer.client import thread_queues as port_module
from pdtransfer.client.thread_queues import ThreadQueues
from pdtransfer.errors import WorldError


@pytest.fixture
def port() -> Iterator[ThreadQueues[int]]:
    made = ThreadQueues[int]()
    yield made
    made.close()


def readable(port: ThreadQueues[int], milliseconds: int = 0) -> bool:
    polling = select.poll()
    polling.register(port, select.POLLIN)
    return bool(polling.poll(milliseconds))


async def test_calls_run_on_the_loop_in_the_order_of_submission(port: ThreadQueues[int]) -> None:
    ran: list[tuple[int, int]] = []
    over = asyncio.Event()

    def submits() -> None:
        for number in range(1_000):
            port.to_loop(lambda number=number: ran.append((number, threading.get_ident())))
        port.to_loop(over.set)

    port.attach(asyncio.get_running_loop())
    thread = threading.Thread(target=submits)
    thread.start()
    await over.wait()
    thread.join()
    assert [number for number, _ in ran] == list(range(1_000))
    assert {ident for _, ident in ran} == {threading.get_ident()}


async def test_calls_submitted_before_there_is_a_loop_run_once_there_is(port: ThreadQueues[int]) -> None:
    ran: list[str] = []
    port.to_loop(lambda: ran.append("first"))
    port.to_loop(lambda: ran.append("second"))
    over = asyncio.Event()
    port.attach(asyncio.get_running_loop())
    port.to_loop(over.set)
    await over.wait()
    assert ran == ["first", "second"]


async def test_a_call_may_submit_another(port: ThreadQueues[int]) -> None:
    over = asyncio.Event()
    port.attach(asyncio.get_running_loop())
    port.to_loop(lambda: port.to_loop(lambda: port.to_loop(over.set)))
    await over.wait()


async def test_a_call_that_raises_costs_none_behind_it_and_the_loop_gets_the_error(port: ThreadQueues[int]) -> None:
    loop, over, errors = asyncio.get_running_loop(), asyncio.Event(), []
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def breaks() -> None:
        raise RuntimeError("of this call alone")

    for call in (breaks, breaks, over.set, breaks):
        port.to_loop(call)
    port.attach(loop)
    await over.wait()
    while len(errors) < 3:  # noqa: ASYNC110 (what it waits for wakes nothing)
        await asyncio.sleep(0)
    assert [str(error) for error in errors] == ["of this call alone"] * 3


def test_a_loop_that_takes_nothing_is_an_error_at_the_limit(
    port: ThreadQueues[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_module, "CALLS_MAX", 3)
    for _ in range(3):
        port.to_loop(lambda: None)
    with pytest.raises(WorldError, match="3 wait for the loop"):
        port.to_loop(lambda: None)


def test_poll_takes_everything_in_order_and_never_waits(port: ThreadQueues[int]) -> None:
    assert port.poll() == []
    for number in range(5):
        port.to_engine(number)
    assert port.poll() == [0, 1, 2, 3, 4]
    assert port.poll() == []


def test_fileno_is_readable_while_poll_has_something(port: ThreadQueues[int]) -> None:
    assert not readable(port)
    port.to_engine(1)
    port.to_engine(2)
    assert readable(port)
    port.poll()
    assert not readable(port)


def test_nothing_sent_meanwhile_is_missed(port: ThreadQueues[int]) -> None:
    """One thread tells while another waits and polls, as often as it takes for them to meet anywhere."""
    received: list[int] = []
    count = 20_000

    def sends() -> None:
        for number in range(count):
            port.to_engine(number)

    thread = threading.Thread(target=sends)
    thread.start()
    while len(received) < count:
        assert port.wait(60)
        received += port.poll()
    thread.join()
    assert received == list(range(count))


def test_what_wakes_the_reader_is_there_when_it_looks(port: ThreadQueues[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader wakes, and polls, in the very moment in which it is woken."""
    received: list[int] = []
    write = os.eventfd_write

    def wake(fd: int, value: int) -> None:
        write(fd, value)
        received.extend(port.poll())

    monkeypatch.setattr(port_module.os, "eventfd_write", wake)
    port.to_engine(1)
    port.to_engine(2)
    assert received == [1, 2]


def test_wait_ends_with_its_time_or_with_news(port: ThreadQueues[int]) -> None:
    assert port.wait(0.01) is False
    threading.Timer(0.05, port.to_engine, (1,)).start()
    assert port.wait(None) is True
    assert port.poll() == [1]


def test_the_descriptor_is_not_inherited_and_comes_back(port: ThreadQueues[int]) -> None:
    assert not os.get_inheritable(port.fileno())
    before = len(os.listdir("/proc/self/fd"))
    other = ThreadQueues[int]()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    other.close()
    other.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_two_threads_may_close_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    port, close, closed = ThreadQueues[int](), os.close, list[int]()
    monkeypatch.setattr(port_module.os, "close", lambda fd: (closed.append(fd), port.close(), close(fd)))
    port.close()
    assert len(closed) == 1


def test_what_was_left_can_be_polled_after_close(port: ThreadQueues[int]) -> None:
    port.to_engine(1)
    port.close()
    assert port.fileno() == -1
    assert port.poll() == [1]
    assert port.poll() == []


def test_a_call_after_the_loops_end_goes_nowhere(port: ThreadQueues[int]) -> None:
    async def attach() -> None:
        port.attach(asyncio.get_running_loop())

    uvloop.run(attach())
    port.to_loop(lambda: pytest.fail("there is no loop any more"))
