"""The commands `pdtransfer bench PART`. Each imports what it measures when it runs."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from cyclopts import App, Parameter

from pdtransfer.serve.settings.node import Json, counted
from pdtransfer.transports.registry import TRANSPORTS, check_name

from ..bench.models import BenchModel
from ..models import AttentionKind

bench = App(
    name="bench",
    help="Measures one part on this host.",
    default_parameter=Parameter(negative=()),
    result_action="return_value",
)


@bench.command(name="transfer")
def bench_transfer(
    *,
    tokens: Annotated[int | None, counted("Tokens of one room; by default 4,096, between hosts 8,192.")] = None,
    rooms: Annotated[int | None, counted("Rooms to move; by default 32, between hosts 8 in each arena.")] = None,
    model: Annotated[BenchModel, Parameter(help="Whose KV: DeepSeek V3's, or that of a small model.")] = "deepseek",
    transport: Annotated[str, Parameter(help=f"How it gets there: {' or '.join(TRANSPORTS)}.")] = "shm",
    json: Json = False,
) -> int:
    """Whole rooms from one process's pool into another's arena, without an engine: GB/s, over shm beside memcpy."""
    from ..bench import transfer
    from ..bench.report import show

    check_name(transport)
    if transport != "shm":
        figures = transfer.measure_network(transport=transport, tokens=tokens or 8_192, rooms=rooms or 8, model=model)
        return show(figures, transfer.NETWORK_LINES, transfer.measure_network, json=json)
    figures = transfer.measure(tokens=tokens or 4_096, rooms=rooms or 32, model=model)
    return show(figures, transfer.LINES, transfer.measure, json=json)


@bench.command(name="handoff")
def bench_handoff(
    *,
    tokens: Annotated[int, counted("Tokens of one room.")] = 16,
    rooms: Annotated[int, counted("Rooms to move.")] = 2_000,
    concurrency: Annotated[int, counted("Rooms under way at once.")] = 64,
    beside: Annotated[
        Literal["zmq"] | None, Parameter(help="Measure latency beside bare ZMQ round trips, in the same run.")
    ] = None,
    json: Json = False,
) -> int:
    """Small rooms between two processes: latency, hand-offs a second, and the CPU that each takes."""
    from ..bench import handoff
    from ..bench.report import show

    figures = handoff.measure(tokens=tokens, rooms=rooms, concurrency=concurrency, beside_zmq=beside is not None)
    return show(figures, handoff.LINES if beside is None else handoff.BESIDE_ZMQ, handoff.measure, json=json)


@bench.command(name="copy")
def bench_copy(*, tokens: Annotated[int, counted("Tokens of one room.")] = 4_096, json: Json = False) -> int:
    """The CPU copy against one memcpy of the same bytes, pages in a row and rows scattered, on one thread and two."""
    from ..bench import copy
    from ..bench.report import show

    return show(copy.measure(tokens=tokens), copy.LINES, copy.measure, json=json)


@bench.command(name="kernels")
def bench_kernels(
    *,
    beside: Annotated[
        Literal["sglang"] | None,
        Parameter(help="Whose kernels to time in the same run instead; they must be installed."),
    ] = None,
    more: Annotated[
        bool, Parameter(help="Also pushes by each backend, and what a decode step asks of a card.")
    ] = False,
    json: Json = False,
) -> int:
    """The kernels on GPU 0, as shares of its copy engine's rate for the same bytes, or beside SGLang's kernels."""
    from ..bench import kernels
    from ..bench.report import show

    if beside is not None:
        from ..bench import sglang_kernels

        figures = sglang_kernels.measure(progress=progress)
        return show(figures, sglang_kernels.lines(figures), sglang_kernels.measure, json=json)
    if more:
        from ..bench import pushes, steps

        figures = kernels.measure() | pushes.measure() | steps.measure()
        lines = (*kernels.LINES, *pushes.LINES, *steps.LINES)
        return show(figures, lines, kernels.measure, pushes.measure, steps.measure, json=json)
    return show(kernels.measure(), kernels.LINES, kernels.measure, json=json)


@bench.command(name="hisparse")
def bench_hisparse(*, json: Json = False) -> int:
    """Decode steps whose KV lies in host memory: hits, bytes, time by part, and how many requests that carries."""
    from ..bench import hisparse
    from ..bench.report import show

    return show(hisparse.measure(), hisparse.LINES, hisparse.measure, json=json)


@bench.command(name="pd")
def bench_pd(
    *,
    tokens: Annotated[tuple[int, ...], counted("Of a prompt; may be repeated. By default 128 to 32,768.")] = (),
    attention: Annotated[tuple[AttentionKind, ...], Parameter(help="Whose KV; may be repeated.")] = ("mla", "gqa"),
    rounds: Annotated[int, counted("Prompts of each size and way that are counted.")] = 3,
    chunk_tokens: Annotated[int, counted("Tokens that prefill computes at a time.")] = 8_192,
    engine_option: Annotated[tuple[str, ...], Parameter(help="name=value for both engines; may be repeated.")] = (),
    hisparse: Annotated[bool, Parameter(help="Decode from the arena, with the hot tokens on the card.")] = False,
    prefill_device: Annotated[str, Parameter(help="Where prefill computes; by default the first card, if any.")] = "",
    decode_device: Annotated[str, Parameter(help="Where decode does; by default the second card, if any.")] = "",
    goals: Annotated[
        bool, Parameter(help="Hold it against the project's goals; with two cards, both at once as well.")
    ] = False,
    json: Json = False,
) -> int:
    """Prompts from a prefill on one card to a decode on another, with a model of real dimensions. Prints the parts of
    the time to the first token, and how much of the transfer is hidden behind the computing. Without a card both
    compute a tiny model on the CPU, which shows that all of it works, and nothing about speed."""
    from ..bench import pd

    result = pd.measure(
        tokens=tokens, attentions=attention, rounds=rounds, chunk_tokens=chunk_tokens, engine_option=engine_option,
        hisparse=hisparse, on=(prefill_device, decode_device), progress=progress,
    )  # fmt: skip
    if goals:
        from ..bench import both_cards, pd_goals

        both = None
        if len(set(result.devices)) == 2:
            progress("both cards at once")
            both = both_cards.measure((0, 1))
        return pd_goals.show(result, both, json=json)
    return pd.show(result, json=json)


def progress(text: str) -> None:
    """Prints how far a long measurement is."""
    print(text, file=sys.stderr, flush=True)
