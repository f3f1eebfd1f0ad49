"""Both clients of a pair as a coroutine has them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pdtransfer.client.aio import AsyncDecode, AsyncPrefill
from tests.support.client_pair import Pair


@dataclass
class AsyncPair:
    pair: Pair
    prefill: AsyncPrefill
    decode: AsyncDecode


@asynccontextmanager
async def started(pair: Pair) -> AsyncIterator[AsyncPair]:
    """Of a pair that was not started."""
    async with AsyncPrefill(pair.prefill) as prefill, AsyncDecode(pair.decode) as decode:
        yield AsyncPair(pair, prefill, decode)
