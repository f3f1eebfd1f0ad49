"""Waits for what happens in its own time, in another thread or process, and bounds a test that runs on a loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

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


def run_on_loop(case: Callable[[], Awaitable[None]]) -> None:
    """Runs it on a loop of its own, for a bounded time."""

    async def bounded() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            await case()

    uvloop.run(bounded())


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test, which may have fixtures and parameters, on a loop of its own."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        run_on_loop(lambda: test(*args, **kwargs))

    return run
