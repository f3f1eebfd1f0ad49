"""Settings of `replay` and `plan`: the trace, the SLO, and a fleet as the model sees it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, cast

from cyclopts import Parameter

from pdtransfer.bounds import bound, power_of_two
from pdtransfer.errors import ConfigError
from pdtransfer.limits import LIMIT_COUNT, LIMIT_MILLISECONDS, TOKENS_MAX, Limits
from pdtransfer.serve.settings.worker import PAGE_SIZE_MAX, SLOTS_MAX

from ..plan.fleet_model import WORKERS_MAX, FleetShape
from ..plan.kv_bytes import kv_bytes_per_token
from ..plan.rates import Rates, rates_of
from ..plan.serving_figures import Slo
from ..plan.trace import Trace, TraceFormat, cut_trace, parse_trace, scale_tokens, speed_up
from ..replay.prompts import FIRST_ID
from ..replay.replay_target import ReplayTarget

COPIES_MAX = 4_096
DECODE_SLOTS = 1 << 20  # of a modelled worker, where nothing is given


def _help(text: str) -> Parameter:
    return Parameter(help=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Which requests of a trace, and how good an answer has to be."""

    format: Annotated[TraceFormat | None, _help("Of the trace; by default that of its first line.")] = None
    from_s: Annotated[float, Parameter(name="--from", help="Seconds of the trace to leave out.")] = 0.0
    until_s: Annotated[float | None, Parameter(name="--until", help="Second of the trace to stop at.")] = None
    limit: Annotated[int | None, _help("Requests at most.")] = None
    speed: Annotated[float, _help("How many times as fast requests come as in the trace.")] = 1.0
    scale_tokens: Annotated[float, _help("Factor for all lengths, for a fleet that is too small for them.")] = 1.0
    slo_ttft_ms: Annotated[float | None, _help("A good answer's time to its first token, at most.")] = None
    slo_itl_ms: Annotated[float | None, _help("A good answer's mean time between tokens, at most.")] = None

    def __post_init__(self) -> None:
        bound("from", self.from_s, 0, 1e9)
        if self.until_s is not None:
            bound("until", self.until_s, 0, 1e9)
        if self.limit is not None:
            bound("limit", self.limit, 1, 1 << 24)
        bound("speed", self.speed, 1e-3, 1e6)
        bound("scale_tokens", self.scale_tokens, 1e-4, 100)
        for name in ("slo_ttft_ms", "slo_itl_ms"):
            if getattr(self, name) is not None:
                bound(name, getattr(self, name), 1e-3, 1e8)

    @property
    def slo(self) -> Slo:
        return Slo(*(None if ms is None else ms / 1e3 for ms in (self.slo_ttft_ms, self.slo_itl_ms)))

    def read(self, path: Path) -> Trace:
        """The trace as it will be replayed."""
        try:
            with path.open(encoding="utf-8", newline="") as lines:
                trace = parse_trace(lines, self.format)
        except UnicodeDecodeError as error:
            raise ConfigError(f"trace = '{path}': not UTF-8: {error.reason} at byte {error.start}") from None
        trace = cut_trace(trace, from_s=self.from_s, until_s=self.until_s, limit=self.limit)
        return speed_up(scale_tokens(trace, self.scale_tokens), self.speed)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Workers of a modelled fleet, and what one of them does in a second."""

    rates: Annotated[
        tuple[Path, ...], _help("JSON of `pdtransfer bench pd|transfer|handoff`, or of rates; may be repeated.")
    ] = ()
    prefill_tokens_per_s: Annotated[float | None, _help("Prompt tokens that a prefill worker computes.")] = None
    decode_step_ms: Annotated[
        tuple[str, ...], _help("batch=ms of a decode step; repeated, times between are on straight lines.")
    ] = ()
    decode_context_ns: Annotated[float | None, _help("What each token of context adds to a decode step.")] = None
    link_gb_s: Annotated[float | None, _help("GB/s that a worker's link carries.")] = None
    handoff_ms: Annotated[float | None, _help("From the last byte to the decode engine.")] = None
    overhead_ms: Annotated[float | None, _help("HTTP and router, of each first token.")] = None
    model: Annotated[Path | None, _help("Directory of a checkpoint: the bytes of a token, from its config.json.")] = (
        None
    )
    kv_dtype: Annotated[str, _help("Of the KV cache, where it is not that of the weights.")] = ""
    bytes_per_token: Annotated[int | None, _help("Bytes of a token's KV, instead of --model.")] = None
    prefill_slots: Annotated[int, _help("Tokens of a prefill worker's pool.")] = 1 << 20
    decode_slots: Annotated[int | None, _help("Tokens of a decode worker's arena; by default 1 Mi.")] = None
    arena_gib: Annotated[float | None, _help("The same in GiB.")] = None
    page_size: Annotated[int, _help("Tokens of a page of the arena; a power of two.")] = 16
    chunk_tokens: Annotated[int, _help("Tokens that prefill computes at a time.")] = 8_192
    batch_max: Annotated[int, _help("Requests of a decode step at most.")] = 256
    prefix_cache: Annotated[bool, Parameter(negative="--no-prefix-cache", help="Keep landed prompts in the arena.")] = (
        True
    )
    prefill_cache_tokens: Annotated[int, _help("Tokens of prefixes that a prefill engine keeps by itself.")] = 0
    growth_min: Annotated[int, _help("max_tokens of clients at least: slots are leased for them.")] = 0
    rooms_max: Annotated[int, _help("Requests that the router accepts at once.")] = Limits().rooms_max
    queue_max: Annotated[int, _help("Requests that wait for slots of one decode worker.")] = Limits().queue_max
    room_deadline_ms: Annotated[int, _help("A request without a token for so long fails.")] = Limits().room_deadline_ms

    def __post_init__(self) -> None:
        bound("prefill_slots", self.prefill_slots, 1, SLOTS_MAX)
        bound("chunk_tokens", self.chunk_tokens, 1, TOKENS_MAX)
        bound("batch_max", self.batch_max, 1, 1 << 16)
        bound("prefill_cache_tokens", self.prefill_cache_tokens, 0, 1 << 40)
        bound("growth_min", self.growth_min, 0, TOKENS_MAX)
        bound("rooms_max", self.rooms_max, *LIMIT_COUNT)
        bound("queue_max", self.queue_max, 0, LIMIT_COUNT[1])
        bound("room_deadline_ms", self.room_deadline_ms, *LIMIT_MILLISECONDS)
        power_of_two("page_size", self.page_size, PAGE_SIZE_MAX)
        for name, least, most in (
            ("prefill_tokens_per_s", 1e-3, 1e12), ("decode_context_ns", 0, 1e9), ("link_gb_s", 1e-6, 1e6),
            ("handoff_ms", 0, 1e6), ("overhead_ms", 0, 1e6), ("bytes_per_token", 1, 1 << 30), ("arena_gib", 1e-6, 1e6),
            ("decode_slots", 1, SLOTS_MAX),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                bound(name, getattr(self, name), least, most)
        if self.decode_slots is not None and self.arena_gib is not None:
            raise ConfigError("decode_slots and arena_gib are two ways of saying the same")

    @property
    def limits(self) -> Limits:
        return Limits(rooms_max=self.rooms_max, queue_max=self.queue_max, room_deadline_ms=self.room_deadline_ms)

    def read_rates(self) -> Rates:
        """From the files, and the flags before them."""
        more: dict[str, Any] = {
            "context_s": _scaled(self.decode_context_ns, 1e-9),
            "link_bytes_s": _scaled(self.link_gb_s, 1e9),
            "handoff_s": _scaled(self.handoff_ms, 1e-3),
            "overhead_s": _scaled(self.overhead_ms, 1e-3),
        }
        if self.prefill_tokens_per_s is not None:
            more["prefill_s"] = {self.prefill_tokens_per_s: 1.0}
        if self.decode_step_ms:
            more["decode_step_s"] = dict(_point(point) for point in self.decode_step_ms)
        return rates_of([(f"rates = '{path}'", _json(path, "rates")) for path in self.rates], more)

    def shape(self, *, prefill: int, decode: int) -> FleetShape:
        """This number of these workers."""
        byte_count = self.token_bytes()
        slots = self.decode_slots or DECODE_SLOTS
        if self.arena_gib is not None:
            slots = int(self.arena_gib * (1 << 30)) // byte_count
        slots = slots // self.page_size * self.page_size
        bound("decode_slots", slots, self.page_size, SLOTS_MAX)
        names = {field.name for field in fields(FleetShape)} & {field.name for field in fields(self)}
        same = {name: getattr(self, name) for name in names - {"decode_slots", "bytes_per_token"}}
        bound("prefill", prefill, 1, WORKERS_MAX)
        bound("decode", decode, 1, WORKERS_MAX)
        return FleetShape(prefill=prefill, decode=decode, decode_slots=slots, bytes_per_token=byte_count, **same)

    def token_bytes(self) -> int:
        """Bytes of a token's KV."""
        if self.bytes_per_token is not None:
            return self.bytes_per_token
        if self.model is None:
            raise ConfigError("bytes_per_token: not given; --bytes-per-token, or --model with a checkpoint's directory")
        config = _json(self.model / "config.json", "model")
        if not isinstance(config, dict):
            raise ConfigError(f"model = '{self.model}': config.json is not a JSON object")
        return kv_bytes_per_token(cast("dict[str, Any]", config), dtype=self.kv_dtype)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _point(text: str) -> tuple[float, float]:
    """batch=ms, or ms alone for any batch."""
    batch, equals, ms = text.rpartition("=")
    try:
        return float(batch) if equals else 1.0, float(ms) / 1e3
    except ValueError:
        raise ConfigError(f"decode_step_ms = {text!r}: must be batch=ms") from None


def _json(path: Path, name: str) -> object:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{name} = '{path}': {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} = '{path}': not JSON: {error}") from None


def target_of(url: str, *, api_key: Path | None, **more: Any) -> ReplayTarget:
    """Where to replay. Raises ConfigError that names the flag."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"router = {url!r}: must be an http or https URL")
    bound("vocabulary", more["vocabulary"], FIRST_ID + 1, 1 << 31)
    bound("timeout_s", more["timeout_s"], 1e-3, 1e6)
    bound("in_flight_max", more["in_flight_max"], 1, 1 << 16)
    key = ""
    if api_key is not None:
        try:
            key = api_key.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key = '{api_key}': {error}") from None
        if not key or not key.isprintable():
            raise ConfigError(f"api_key = '{api_key}': must hold one line")
    return ReplayTarget(url=url.rstrip("/").removesuffix("/v1"), api_key=key, **more)
