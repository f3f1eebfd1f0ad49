"""Waits for what happens in its own time, in another thread or process, and bounds a test that runs on a loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Generic, TypeVar

import uvloop

Value = TypeVar("Value")
PATIENCE_S = 60.0  # for anything that takes milliseconds on a quiet machine


async def until(condition: Callable[[], Any], what: object = "", seconds: float = PATIENCE_S) -> Any:
    """Polls a condition, a coroutine function too, until it holds; returns what it returned then."""
    deadline = time.monotonic() + seconds
    while True:
        asked = condition()
        if found := await asked if inspect.isawaitable(asked) else asked:
            return found
        assert time.monotonic() < deadline, f"not in {seconds} s: {what or condition}"
        await asyncio.sleep(0.02 if inspect.isawaitable(asked) else 0.002)


def wait_for(condition: Callable[[], Any], what: object = "", seconds: float = PATIENCE_S) -> Any:
    """`until` for a thread without a loop."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not in {seconds} s: {what or condition}"
        time.sleep(0.005)
    return found


class Running(Generic[Value]):
    """What tests of a module share, on its loop: an `async def test_` gets the value, and runs there."""

    def __init__(self, runner: asyncio.Runner, value: Value) -> None:
        self.runner, self.value = runner, value


def standing(context: AbstractAsyncContextManager[Value]) -> Iterator[Running[Value]]:
    """Enters it on a loop of its own, and leaves it behind: `yield from` in a fixture."""
    with asyncio.Runner() as runner:
        value = runner.run(context.__aenter__())
        try:
            yield Running(runner, value)
        finally:
            runner.run(context.__aexit__(None, None, None))


def run_on_loop(case: Callable[[], Awaitable[None]], run: Callable[..., object] = uvloop.run) -> None:
    """Runs it on a loop of its own, for a bounded time."""

    async def bounded() -> None:
        async with asyncio.timeout(4 * PATIENCE_S):
            await case()

    run(bounded())


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test on a loop of its own, or on that of an argument that is Running. Arguments that are asynchronous
    contexts are entered there, and left behind it."""

    @functools.wraps(test)
    def run(*args: Any, **given: Any) -> None:
        runners = [each.runner.run for each in given.values() if isinstance(each, Running)]

        async def case() -> None:
            async with AsyncExitStack() as stack:
                for name, value in given.items():
                    if isinstance(value, Running):
                        given[name] = value.value
                    elif isinstance(value, AbstractAsyncContextManager):
                        given[name] = await stack.enter_async_context(value)
                await test(*args, **given)

        run_on_loop(case, *runners)

    return run
