"""Sends a trace's requests to an endpoint at their own times, whether earlier ones were answered or not."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec

from pdtransfer.errors import WorldError

from ..plan.serving_figures import ServingFigures, Slo, percentiles_ms
from ..plan.trace import Trace, TraceRequest
from .metrics_watch import MetricsWatch
from .prompts import prompt_of
from .replay_target import ReplayTarget
from .stream import CompletionStream

LATE_S = 0.1  # a request sent later than this after its time is counted
TEXT_BYTES_MAX = 4_096  # of an error's body that is read
_JSON = {"Content-Type": "application/json"}


@dataclass(slots=True)
class ReplayOutcome:
    """What came back, and how well the sender kept its times."""

    figures: ServingFigures
    late_s: array[float] = field(default_factory=lambda: array("d"))
    in_flight: int = 0
    in_flight_max: int = 0
    short: int = 0  # answers with fewer tokens than were asked for
    unreported: int = 0  # answers without a usage: their tokens were counted by events
    arena: dict[str, float] | None = None

    def report(self) -> dict[str, Any]:
        """For programs."""
        late = [late_s for late_s in self.late_s if late_s > LATE_S]
        arena = self.arena or {}
        return self.figures.report() | {
            "arena_high_water_tokens": arena.get("tokens"),
            "arena_high_water_share": arena.get("share"),
            "short_answers": self.short,
            "answers_without_usage": self.unreported,
            "sender": {
                "late_ms": percentiles_ms(self.late_s),
                "late_over_100_ms": len(late),
                "in_flight_max": self.in_flight_max,
            },
        }


async def replay(
    trace: Trace, target: ReplayTarget, slo: Slo, progress: Callable[[ReplayOutcome], None] = lambda _: None
) -> ReplayOutcome:
    """Replays the whole trace; `progress` is called as requests end. Raises WorldError where the endpoint cannot be
    reached at all."""
    done = ReplayOutcome(ServingFigures(slo))
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    timeout = aiohttp.ClientTimeout(total=target.timeout_s, connect=min(30.0, target.timeout_s))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        sender = _RequestSender(
            session, trace.block_tokens, target, target.model or await _model(session, target.url), done
        )
        watch = MetricsWatch(session, target.metrics)
        watching = asyncio.create_task(watch.run()) if target.metrics else None
        try:
            await sender.send(trace.requests, progress)
        finally:
            if watching is not None:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching
        if target.metrics:
            await watch.look()
            done.arena = watch.high_water
    return done


async def _model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model that the endpoint serves."""
    try:
        async with session.get(f"{url}/v1/models") as response:
            body: Any = await response.json()
        return str(body["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise WorldError(f"{url}/v1/models: {error or type(error).__name__}") from error
    except (KeyError, IndexError, TypeError, ValueError):
        raise WorldError(f"{url}/v1/models names no model; --served-model says which to ask for") from None


class _RequestSender:
    def __init__(
        self, session: aiohttp.ClientSession, block_tokens: int, target: ReplayTarget, model: str, done: ReplayOutcome
    ) -> None:
        self._session, self._block_tokens, self._target = session, block_tokens, target
        self._model, self._done = model, done
        self._began_s = 0.0

    async def send(self, requests: Sequence[TraceRequest], progress: Callable[[ReplayOutcome], None]) -> None:
        tasks: set[asyncio.Task[None]] = set()
        done = self._done
        self._began_s = time.monotonic()
        for request in requests:
            # Made ahead of its time: a long prompt takes a while.
            body = self._body(request)
            wait_s = self._began_s + request.at_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            elif len(done.late_s) % 16 == 0:
                await asyncio.sleep(0)  # answers are read even where the sender is late
            if done.in_flight >= self._target.in_flight_max:
                done.figures.failed("not sent", ended_s=request.at_s)
                continue
            done.in_flight += 1
            done.in_flight_max = max(done.in_flight_max, done.in_flight)
            task = asyncio.create_task(self._ask(request, body, progress))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _body(self, request: TraceRequest) -> bytes:
        prompt = prompt_of(
            request, block_tokens=self._block_tokens, kind=self._target.prompts, vocabulary=self._target.vocabulary
        )
        return msgspec.json.encode({
            "model": self._model, "prompt": prompt, "max_tokens": request.output_tokens,
            "min_tokens": request.output_tokens, "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        })  # fmt: skip

    async def _ask(self, request: TraceRequest, body: bytes, progress: Callable[[ReplayOutcome], None]) -> None:
        done, begins_s = self._done, time.monotonic()
        done.late_s.append(max(0.0, begins_s - self._began_s - request.at_s))
        stream = CompletionStream()
        failure = ""
        try:
            async with self._session.post(f"{self._target.url}/v1/completions", data=body, headers=_JSON) as response:
                if response.status == 200:
                    async for data in response.content.iter_any():
                        stream.feed(data, time.monotonic())
                else:
                    failure = str(response.status)
                    await response.content.read(TEXT_BYTES_MAX)
        except TimeoutError:
            failure = "timeout"
        except (aiohttp.ClientError, OSError):
            failure = "connection"
        finally:
            done.in_flight -= 1
        ended_s = time.monotonic()
        failure = failure or stream.error or ("" if stream.times_s else "no token")
        if not failure and not stream.done:
            failure = "cut off"
        if failure:
            done.figures.failed(failure, ended_s=ended_s - self._began_s)
        else:
            self._answered(request, stream, begins_s)
        progress(done)

    def _answered(self, request: TraceRequest, stream: CompletionStream, begins_s: float) -> None:
        """Times count from the sending: a sender that is late shows in its own figures."""
        done, times = self._done, stream.times_s
        tokens = len(times) if stream.output_tokens is None else stream.output_tokens
        done.unreported += stream.output_tokens is None
        done.short += tokens < request.output_tokens
        for earlier, later in pairwise(times):
            done.figures.gaps.add(later - earlier)
        done.figures.answered(
            at_s=begins_s - self._began_s, ttft_s=times[0] - begins_s, total_s=times[-1] - begins_s,
            prompt_tokens=request.input_tokens if stream.prompt_tokens is None else stream.prompt_tokens,
            cached_tokens=stream.cached_tokens or 0, output_tokens=tokens,
        )  # fmt: skip
