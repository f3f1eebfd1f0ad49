"""What the benchmarks of serving have in common: random prompts, clients in a closed loop, and figures of their
answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from math import ceil, nan
from statistics import median
from typing import TypeVar

from pdtransfer.errors import ConfigError

_FIRST_TOKEN = 3  # tokens below it begin and end a text
_Answer = TypeVar("_Answer")


def option(text: str) -> tuple[str, str]:
    """`name=value`. Raises ConfigError."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r}: must be name=value")
    return name, value


def prompts_of(count: int, tokens: int, vocabulary: int, seed: int | str) -> list[list[int]]:
    """`count` prompts of random tokens, the same for the same seed."""
    draw = random.Random(f"{seed} {tokens}")  # noqa: S311
    return [[draw.randrange(_FIRST_TOKEN, vocabulary) for _ in range(tokens)] for _ in range(count)]


async def drive(
    prompts: Sequence[Sequence[int]], clients: int, ask: Callable[[Sequence[int]], Awaitable[_Answer]]
) -> list[_Answer]:
    """What came of each prompt, in their order. Each client asks the next one after its last answer."""
    answers: dict[int, _Answer] = {}
    left = iter(enumerate(prompts))

    async def client() -> None:
        for index, prompt in left:
            answers[index] = await ask(prompt)

    await asyncio.gather(*(client() for _ in range(clients)))
    return [answers[index] for index in range(len(prompts))]


def middle(values: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return median(values) if values else nan


def p99(values: Sequence[float]) -> float:
    """The smallest value that 99 % do not exceed; NaN of nothing."""
    return sorted(values)[max(0, ceil(0.99 * len(values)) - 1)] if values else nan


def figure(value: float) -> str:
    """Three digits, or whole from 100 on; NaN as a dash."""
    return "-" if value != value else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # NaN is not itself
