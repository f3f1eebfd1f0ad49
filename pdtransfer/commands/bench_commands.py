"""The commands `pdtransfer bench PART`. Each imports what it measures when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from ..config.config import Attention, BenchModel

bench = App(name="bench", help="Measures one part on this host.")
Json = Annotated[bool, Parameter(help="Print one JSON object.")]


def counted(text: str) -> Parameter:
    """A flag that counts something, said in `text`."""
    return Parameter(help=text, validator=Number(gte=1, lte=1 << 30))


@bench.command(name="transfer")
def bench_transfer(
    *,
    tokens: Annotated[int | None, counted("Tokens of one room; by default 4,096, over Mooncake 8,192.")] = None,
    rooms: Annotated[int | None, counted("Rooms to move; by default 32, over Mooncake 8 in each arena.")] = None,
    model: Annotated[BenchModel, Parameter(help="Whose KV: DeepSeek V3's, or the reference model's.")] = "deepseek",
    transport: Annotated[Literal["shm", "mooncake"], Parameter(help="How it gets there.")] = "shm",
    json: Json = False,
) -> int:
    """Whole rooms from one process's pool into another's arena, without an engine: GB/s, beside memcpy, or beside one
    synchronous write and a raw socket."""
    from ..bench import run_transfer

    return run_transfer(tokens=tokens, rooms=rooms, model=model, transport=transport, json=json)


@bench.command(name="handoff")
def bench_handoff(
    *,
    tokens: Annotated[int, counted("Tokens of one room.")] = 16,
    rooms: Annotated[int, counted("Rooms to move.")] = 2_000,
    concurrency: Annotated[int, counted("Rooms under way at once.")] = 64,
    json: Json = False,
) -> int:
    """Small rooms between two processes: latency beside a raw ZMQ round trip, and hand-offs a second."""
    from ..bench import run_handoff

    return run_handoff(tokens=tokens, rooms=rooms, concurrency=concurrency, json=json)


@bench.command(name="copy")
def bench_copy(*, tokens: Annotated[int, counted("Tokens of one room.")] = 4_096, json: Json = False) -> int:
    """The CPU copy against one memcpy of the same bytes, pages in a row and rows scattered, on one thread and two."""
    from ..bench import run_copy

    return run_copy(tokens=tokens, json=json)


@bench.command(name="kernels")
def bench_kernels(*, json: Json = False) -> int:
    """The kernels on card 0, as shares of what its copy engine does with the same bytes."""
    from ..bench import run_kernels

    return run_kernels(json=json)


@bench.command(name="hisparse")
def bench_hisparse(*, json: Json = False) -> int:
    """Decode steps whose KV lies in host memory: hits, bytes, time by part, and how many requests that carries."""
    from ..bench import run_hisparse

    return run_hisparse(json=json)


@bench.command(name="stall")
def bench_stall(
    *,
    tokens: Annotated[int, counted("Tokens of one room.")] = 4_096,
    rooms: Annotated[int, counted("Rooms to move.")] = 96,
    json: Json = False,
) -> int:
    """What an embedded client takes of its scheduler's thread while large rooms move."""
    from ..bench import run_stall

    return run_stall(tokens=tokens, rooms=rooms, json=json)


@bench.command(name="pages")
def bench_pages(
    *, gib: Annotated[float, Parameter(help="GiB of each of two arenas.")] = 1.0, json: Json = False
) -> int:
    """An arena in pages of 4 KiB against one in what `--huge-pages auto` finds: backing, registering, copies."""
    from ..bench import run_pages

    return run_pages(gib=gib, json=json)


@bench.command(name="pd")
def bench_pd(
    *,
    tokens: Annotated[tuple[int, ...], counted("Of a prompt; may be repeated. By default 128 to 32,768.")] = (),
    attention: Annotated[tuple[Attention, ...], Parameter(help="Whose KV; may be repeated.")] = ("mla", "gqa"),
    rounds: Annotated[int, counted("Prompts of each size and way that are counted.")] = 3,
    chunk_tokens: Annotated[int, counted("Tokens that prefill computes at a time.")] = 8_192,
    engine_option: Annotated[tuple[str, ...], Parameter(help="name=value for both engines; may be repeated.")] = (),
    hisparse: Annotated[bool, Parameter(help="Decode from the arena, with the hot tokens on the card.")] = False,
    prefill_device: Annotated[str, Parameter(help="Where prefill computes; by default the first card, if any.")] = "",
    decode_device: Annotated[str, Parameter(help="Where decode does; by default the second card, if any.")] = "",
    report: Annotated[Path | None, Parameter(help="Writes report.html and its pictures into this directory.")] = None,
    json: Json = False,
) -> int:
    """Prompts from a prefill on one card to a decode on another, a model of real dimensions: what the time to the first
    token goes into, how much of the transfer is hidden behind the computing, and whether the aims are met. Without a
    card both compute a tiny model on the CPU, which shows that all of it works, and nothing about speed."""
    from ..bench import run_pd

    devices = prefill_device, decode_device
    return run_pd(
        tokens=tokens, attentions=attention, rounds=rounds, chunk_tokens=chunk_tokens, engine_option=engine_option,
        hisparse=hisparse, devices=devices, report=report, json=json,
    )  # fmt: skip


@bench.command(name="plan")
def bench_plan(
    *,
    tokens: Annotated[int, counted("Tokens of one room.")] = 131_072,
    planes: Annotated[int, counted("Planes that each token has.")] = 61,
    json: Json = False,
) -> int:
    """The planner: slots and two layouts to slot runs, pages in a row and rows scattered."""
    from ..bench import run_plan

    return run_plan(tokens=tokens, planes=planes, json=json)


@bench.command(name="verify")
def bench_verify(
    *,
    tokens: Annotated[int, counted("Tokens of one large room.")] = 4_096,
    rooms: Annotated[int, counted("Small rooms to move, each way.")] = 1_000,
    json: Json = False,
) -> int:
    """What --verify costs: the checksum beside a memcpy, and hand-offs and rooms with and without it."""
    from ..bench import run_verify

    return run_verify(tokens=tokens, rooms=rooms, json=json)


@bench.command(name="prefix")
def bench_prefix(
    *,
    tokens: Annotated[int, counted("Tokens of one room.")] = 80,
    rooms: Annotated[int, counted("Rooms to move, each way.")] = 500,
    json: Json = False,
) -> int:
    """What the prefix cache costs rooms that share nothing, and what it spares those that do."""
    from ..bench import run_prefix

    return run_prefix(tokens=tokens, rooms=rooms, json=json)


@bench.command(name="bus")
def bench_bus(*, rounds: Annotated[int, counted("Messages to send.")] = 20_000, json: Json = False) -> int:
    """Messages between two processes: round trip, and echoes a second."""
    from ..bench import run_bus

    return run_bus(rounds=rounds, json=json)


@bench.command(name="idle")
def bench_idle(*, seconds: Annotated[int, counted("How long to watch.")] = 10, json: Json = False) -> int:
    """What an idle daemon costs in CPU and memory."""
    from ..bench import run_idle

    return run_idle(seconds=seconds, json=json)


@bench.command(name="load")
def bench_load(
    *,
    rooms: Annotated[int, counted("Rooms against each number of peers.")] = 6_000,
    memory_rooms: Annotated[int, counted("Rooms over which memory is watched.")] = 200_000,
    seconds: Annotated[int, counted("How long to watch idle peers.")] = 20,
    concurrency: Annotated[int, counted("Rooms under way at once.")] = 64,
    json: Json = False,
) -> int:
    """Hand-offs against 1, 10 and 100 peers, what 100 idle ones cost, and memory over very many rooms."""
    from ..bench import run_load

    return run_load(rooms=rooms, memory_rooms=memory_rooms, seconds=seconds, concurrency=concurrency, json=json)


@bench.command(name="siege")
def bench_siege(
    *,
    rooms: Annotated[int, counted("Rooms in quiet, and as many under each attack.")] = 500,
    rounds: Annotated[int, counted("How often that is done.")] = 5,
    connections: Annotated[int, counted("Junk connections to hold open.")] = 10_000,
    json: Json = False,
) -> int:
    """Healthy hand-offs while strangers and hostile peers attack: p99 over p99 in quiet, for each attack."""
    from ..bench import run_siege

    return run_siege(rooms=rooms, rounds=rounds, connections=connections, json=json)


@bench.command(name="faults")
def bench_faults(
    *,
    rooms: Annotated[int, counted("Rooms in quiet.")] = 1_000,
    aborts: Annotated[int, counted("Rooms to abort.")] = 1_000,
    rounds: Annotated[int, counted("How often a peer is frozen.")] = 5,
    json: Json = False,
) -> int:
    """How soon aborted slots are free, and healthy hand-offs beside a peer that is frozen."""
    from ..bench import run_faults

    return run_faults(rooms=rooms, aborts=aborts, rounds=rounds, json=json)
