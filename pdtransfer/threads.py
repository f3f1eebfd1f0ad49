"""Loops in threads of their own, and calls that block away from a loop's own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

import uvloop


def run_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs `main` on a new loop until it returns, also while the interpreter exits. From Python 3.12 on no thread can
    start then, but a loop's close starts one to end the loop's executor. That executor has ended by then."""
    ended = False

    async def whole() -> None:
        nonlocal ended
        await main()
        ended = True

    try:
        uvloop.run(whole())
    except RuntimeError:
        if not ended:
            raise


async def in_thread(call: Callable[[], None]) -> None:
    """Runs `call` in another thread and waits for it; in this one while the interpreter exits, when none can start."""
    try:
        done = asyncio.get_running_loop().run_in_executor(None, call)
    except RuntimeError:
        call()
    else:
        await done


def in_pool(pool: Executor, call: Callable[[], object]) -> None:
    """Runs `call` in a thread of the pool; in this one while the interpreter exits, when none takes calls."""
    try:
        pool.submit(call)
    except RuntimeError:
        call()


def apart(call: Callable[[], None]) -> asyncio.Future[None]:
    """Runs `call` in a thread of its own, for which the end of the process does not wait."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: Exception | None = None
        try:
            call()
        except Exception as raised:  # noqa: BLE001 -- passed on to whoever awaits it
            error = raised
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, daemon=True, name="pdtransfer-apart").start()
    return done
