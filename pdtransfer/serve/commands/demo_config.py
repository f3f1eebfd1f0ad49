"""Settings of the demo: the fleet, the prompts, and the devices."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ...bounds import bound, device_index, match, power_of_two
from ...errors import ConfigError
from ...wire import Ranks
from ...wire.ranks import SIZE_MAX, ranks_of
from ..settings.node import BUILT_IN, REFERENCE, STAMP, flag
from ..settings.ranks import check_device, device_of
from ..settings.worker import PAGE_SIZE_MAX, HostLayout

# What the workers are like that the demo starts: of a router that runs already, others have decided it.
_OF_WORKERS = (
    "prefill", "decode", "prefill_tp", "prefill_pp", "decode_tp", "prefill_page_size", "decode_page_size",
    "prefill_layout", "decode_layout", "prefill_device", "transport", "timeline",
)  # fmt: skip
_BOUNDS = {
    "requests": (1, 1_000_000), "concurrency": (1, 4_096), "prompt_bytes_max": (1, 1 << 19), "max_tokens": (1, 65_536),
    "shared_prefix": (0, 1 << 18), "seed": (0, (1 << 63) - 1), "prefill": (1, 64), "decode": (1, 64),
    "prefill_tp": (1, SIZE_MAX), "prefill_pp": (1, SIZE_MAX), "decode_tp": (1, SIZE_MAX),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """A router, prefill and decode workers, and prompts whose answers are compared with a single process."""

    model: Annotated[
        str, flag("A Hugging Face checkpoint's directory; stamp, which answers by digests of the KV; or reference.")
    ] = STAMP
    requests: Annotated[int | None, flag("Prompts to send; by default 32, or each question to a checkpoint.")] = None
    concurrency: Annotated[int, flag("Concurrent requests.")] = 32
    prompt_bytes_max: Annotated[int, flag("Prompts have 1 to this many bytes, but for a checkpoint's.")] = 8_192
    shared_prefix: Annotated[int, flag("Bytes of a common prefix; the first prompt is sent ahead.")] = 0
    max_tokens: Annotated[int, flag("Tokens to generate for each.")] = 32
    seed: Annotated[int, flag("Determines the prompts.")] = 0
    engine_option: Annotated[tuple[str, ...], flag("name=value for the engine; may be repeated.")] = ()
    device: Annotated[str, flag("Device of prefill and decode: cpu, cuda or cuda:N.")] = "cpu"
    prefill_device: Annotated[str, flag("Device of prefill, if it differs; cuda:N,cuda:M,... for its ranks.")] = ""
    decode_device: Annotated[str, flag("Device of decode, if it differs.")] = ""
    prefill: Annotated[int, flag("Prefill workers.")] = 1
    decode: Annotated[int, flag("Decode workers.")] = 1
    prefill_tp: Annotated[int, flag("Processes of a prefill worker that share the heads of each layer.")] = 1
    prefill_pp: Annotated[int, flag("Stages of a prefill worker that share the layers.")] = 1
    decode_tp: Annotated[int, flag("Processes of a decode worker that share the heads of each layer.")] = 1
    prefill_page_size: Annotated[int, flag("Tokens a page of prefill's pool; a power of two.")] = 64
    decode_page_size: Annotated[int, flag("Tokens a page of decode's arena; a power of two.")] = 1
    prefill_layout: Annotated[HostLayout, flag("How prefill's pool is laid out.")] = "layer_first"
    decode_layout: Annotated[
        HostLayout, Parameter(name=("--decode-layout", "--host-layout"), help="How decode's arena is laid out.")
    ] = "page_first"
    transport: Annotated[str, flag("How KV reaches decode's arena: auto, or a transport by its name.")] = "auto"
    verify: Annotated[bool, flag("Have decode compare the checksum of every row with prefill's.")] = False
    hisparse: Annotated[bool, flag("Decode from the arena, with the hot tokens on the device.")] = False
    timeline: Annotated[Path | None, flag("Directory for all timelines, for `pdtransfer timeline`.")] = None
    json: Annotated[bool, flag("Print one JSON object instead of the table.")] = False
    router: Annotated[str, flag("Use the running router at this URL, and start nothing.")] = ""
    metrics: Annotated[tuple[str, ...], flag("host:port of a decode daemon there; may be repeated.")] = ()

    def __post_init__(self) -> None:
        device_index(self.device)
        from ...transports.registry import check_name

        check_name(self.transport)
        for name, (low, high) in _BOUNDS.items():
            if (value := getattr(self, name)) is not None:
                bound(name, value, low, high)
        if self.model not in BUILT_IN and (self.hisparse or max(self.prefill_tp, self.prefill_pp, self.decode_tp) > 1):
            raise ConfigError(f"hisparse, prefill_tp, prefill_pp and decode_tp are for {STAMP} and {REFERENCE} alone")
        for option in self.engine_option:
            match("engine_option", option, r"[\w.-]+=.*", "name=value")
            if option.lower() in ("digests=false", "digests=0"):
                raise ConfigError(f"engine_option = {option!r}: answers are compared by their digests")
        power_of_two("prefill_page_size", self.prefill_page_size, PAGE_SIZE_MAX)
        power_of_two("decode_page_size", self.decode_page_size, PAGE_SIZE_MAX)
        self._check_running()
        for name, device, ranks in self._workers:
            check_device(device, ranks, name if getattr(self, name) else "device")
        if len({number is None for number in self.cards}) > 1:
            text = f"prefill_device = {self.devices[0]!r}, decode_device = {self.devices[1]!r}"
            raise ConfigError(f"{text}: a GPU computes other bits than the CPU, so no answer would be identical")

    def _check_running(self) -> None:
        if self.metrics and not self.router:
            raise ConfigError(f"metrics = {self.metrics[0]!r}: needs --router, the URL of a running fleet")
        for address in self.metrics:
            match("metrics", address, r"[^/\s]+:\d{1,5}", "host:port of a decode daemon's /metrics")
        if not self.router:
            return
        match("router", self.router, r"https?://[^/\s]+/?", "the URL of a running router, http://host:port")
        for name in ("verify", "hisparse"):
            if getattr(self, name) and not self.metrics:
                raise ConfigError(f"{name}: with --router needs --metrics, where each decode daemon counts what it did")
        for option in fields(self):
            if option.name in _OF_WORKERS and (value := getattr(self, option.name)) != option.default:
                text = f"{option.name} = {value}: has no effect with --router"
                raise ConfigError(f"{text}, whose workers were started with their own flags")

    @property
    def devices(self) -> tuple[str, str]:
        """The devices of prefill and of decode."""
        return self.prefill_device or self.device, self.decode_device or self.device

    @property
    def cards(self) -> set[int | None]:
        """The GPUs of all ranks; None stands for the CPU."""
        return {
            device_index(device_of(device, ranks))
            for _, device, worker_config in self._workers
            for ranks in ranks_of(worker_config.tp_size, worker_config.pp_size)
        }

    @property
    def _workers(self) -> tuple[tuple[str, str, Ranks], ...]:
        prefill, decode = self.devices
        return (
            ("prefill_device", prefill, Ranks(tp_size=self.prefill_tp, pp_size=self.prefill_pp)),
            ("decode_device", decode, Ranks(tp_size=self.decode_tp)),
        )
