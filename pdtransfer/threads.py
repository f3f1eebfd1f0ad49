"""Calls that block, away from a loop's own thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor


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
