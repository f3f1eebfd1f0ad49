"""Request traces: Mooncake's JSON lines and BurstGPT's CSV, cut, scaled, and copied for a larger fleet."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import isfinite
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from pdtransfer.errors import WorldError
from pdtransfer.limits import TOKENS_MAX

TraceFormat: TypeAlias = Literal["mooncake", "burstgpt"]
BLOCK_TOKENS = 512  # of one hash id of Mooncake's traces
REQUESTS_MAX = 1 << 24  # of one trace: some GB of memory
ID_MAX = (1 << 63) - 1
BLOCKS_MAX = TOKENS_MAX // BLOCK_TOKENS
SECONDS_MAX = 10 * 366 * 86_400  # a timestamp beyond is none
SHARED_BY_ALL = 0.1  # of all requests: a block that this many have is a system prompt, which copies of users share, too
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when it came, in seconds from the start, its lengths, and an id for each of its prompt's blocks.
    Equal ids mean that the prompts are equal up to the end of that block."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival. `skipped` lines were requests that had failed when they were recorded."""

    requests: tuple[TraceRequest, ...]
    block_tokens: int = BLOCK_TOKENS
    skipped: int = 0

    @property
    def seconds(self) -> float:
        """From the start to the last arrival."""
        return self.requests[-1].at_s if self.requests else 0.0

    @property
    def prompt_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)


class _MooncakeLine(Struct):
    timestamp: Annotated[float, Meta(ge=0, le=SECONDS_MAX * 1e3)]
    input_length: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    output_length: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    hash_ids: Annotated[list[Annotated[int, Meta(ge=0, le=ID_MAX)]], Meta(max_length=BLOCKS_MAX)]


_MOONCAKE = msgspec.json.Decoder(_MooncakeLine)
_BURSTGPT = {"Timestamp": "at", "Request tokens": "input", "Response tokens": "output"}
_LINE_MAX = 4 << 20  # characters: BLOCKS_MAX ids of 20 digits, and more


def parse_trace(lines: Iterable[str], form: TraceFormat | None = None) -> Trace:
    """Parses a trace; its format is that of the first line unless it is given. Raises WorldError that names the line
    and the field."""
    source = iter(lines)
    first = next(source, "")
    if form is None:
        form = "mooncake" if first.lstrip().startswith("{") else "burstgpt"
    every = chain([first] if first else [], source)
    trace = _burstgpt(every) if form == "burstgpt" else _mooncake(every)
    if not trace.requests:
        raise WorldError("trace: it has no request")
    return trace


def _mooncake(lines: Iterable[str]) -> Trace:
    requests: list[TraceRequest] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(line) > _LINE_MAX:
            raise WorldError(f"trace, line {number}: {len(line)} characters, at most {_LINE_MAX}")
        try:
            read = _MOONCAKE.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise WorldError(f"trace, line {number}: {error}") from None
        blocks = -(-read.input_length // BLOCK_TOKENS)
        if len(read.hash_ids) != blocks:
            text = f"{len(read.hash_ids)} ids, an input_length of {read.input_length} has {blocks} blocks"
            raise WorldError(f"trace, line {number}: hash_ids: {text} of {BLOCK_TOKENS}")
        at_s = read.timestamp / 1e3
        _add(requests, number, TraceRequest(at_s, read.input_length, read.output_length, tuple(read.hash_ids)))
    return Trace(_sorted(requests))


def _burstgpt(lines: Iterable[str]) -> Trace:
    """BurstGPT has no hashes: each prompt is its own. A response of no tokens was a failure."""
    requests: list[TraceRequest] = []
    skipped, block = 0, 0
    reader = csv.reader(lines)
    try:
        head = next(reader, list[str]())
        if missing := sorted(_BURSTGPT.keys() - set(head)):
            raise WorldError(
                f"trace, line 1: {', '.join(missing)}: no such column, it has {', '.join(head[:8]) or 'none'}"
            )
        places = {ours: head.index(theirs) for theirs, ours in _BURSTGPT.items()}
        for row in reader:
            number = reader.line_num
            if not row:
                continue
            at_s = _number(row, places["at"], number, "Timestamp", SECONDS_MAX)
            prompt = int(_number(row, places["input"], number, "Request tokens", TOKENS_MAX))
            output = int(_number(row, places["output"], number, "Response tokens", TOKENS_MAX))
            if not prompt or not output:
                skipped += 1
                continue
            count = -(-prompt // BLOCK_TOKENS)
            _add(requests, number, TraceRequest(at_s, prompt, output, tuple(range(block, block + count))))
            block += count
    except csv.Error as error:
        raise WorldError(f"trace, line {reader.line_num}: {error}") from None
    return Trace(_sorted(requests), skipped=skipped)


def _number(row: Sequence[str], index: int, line: int, name: str, most: float) -> float:
    text = row[index] if index < len(row) else ""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not isfinite(value) or not 0 <= value <= most:
        raise WorldError(f"trace, line {line}: {name} = {text[:40]!r}: must be a number from 0 to {most:g}")
    return value


def _add(requests: list[TraceRequest], line: int, request: TraceRequest) -> None:
    if len(requests) >= REQUESTS_MAX:
        raise WorldError(f"trace, line {line}: more than {REQUESTS_MAX} requests")
    requests.append(request)


def _sorted(requests: Iterable[TraceRequest]) -> tuple[TraceRequest, ...]:
    return tuple(sorted(requests, key=lambda request: request.at_s))


def cut_trace(trace: Trace, *, from_s: float = 0.0, until_s: float | None = None, limit: int | None = None) -> Trace:
    """The requests of [from_s, until_s), at most `limit`, with their times counted from `from_s`. Raises WorldError
    where none are left."""
    cut = (
        replace(request, at_s=request.at_s - from_s)
        for request in trace.requests
        if request.at_s >= from_s and (until_s is None or request.at_s < until_s)
    )
    requests = tuple(
        request for request, _ in zip(cut, range(limit if limit is not None else REQUESTS_MAX), strict=False)
    )
    if not requests:
        raise WorldError(f"trace: no request from {from_s:g} s to {'its end' if until_s is None else f'{until_s:g} s'}")
    return replace(trace, requests=requests)


def scale_tokens(trace: Trace, scale: float) -> Trace:
    """Lengths and blocks times `scale`, at least 1 token each: blocks that were shared still are."""
    if scale == 1:
        return trace
    block_tokens = max(1, round(trace.block_tokens * scale))
    requests: list[TraceRequest] = []
    for request in trace.requests:
        # Whole blocks stay whole, and the last one keeps a token.
        least = (len(request.blocks) - 1) * block_tokens + 1
        tokens = min(max(least, round(request.input_tokens * scale)), len(request.blocks) * block_tokens)
        output = max(1, round(request.output_tokens * scale))
        requests.append(replace(request, input_tokens=tokens, output_tokens=output))
    return replace(trace, requests=tuple(requests), block_tokens=block_tokens)


def speed_up(trace: Trace, speed: float) -> Trace:
    """The same requests, `speed` times as fast after one another."""
    return replace(trace, requests=tuple(replace(request, at_s=request.at_s / speed) for request in trace.requests))


def copies(trace: Trace, count: int, *, seconds: float | None = None) -> Iterator[TraceRequest]:
    """The load of `count` times as many users, in the order of arrival.

    A copy is the whole trace, turned in time by its own part of its length: bursts stay bursts, and no two copies burst
    together. Its users are others: its blocks have ids of their own, but for those that at least SHARED_BY_ALL of all
    requests have.
    """
    if count == 1:
        yield from trace.requests
        return
    length = max(seconds if seconds is not None else trace.seconds, 1e-9)
    met = Counter(block for request in trace.requests for block in set(request.blocks))
    common = {block for block, number in met.items() if number >= SHARED_BY_ALL * len(trace.requests)}
    step = max(met, default=0) + 1
    turns = [(copy * _GOLDEN) % 1.0 * length for copy in range(count)]
    order = sorted(
        ((request.at_s + turn) % length, copy, index)
        for copy, turn in enumerate(turns)
        for index, request in enumerate(trace.requests)
    )
    for at_s, copy, index in order:
        request = trace.requests[index]
        blocks = request.blocks
        if copy:
            offset = copy * step
            blocks = tuple(block if block in common else block + offset for block in blocks)
        yield TraceRequest(at_s, request.input_tokens, request.output_tokens, blocks)
