"""The settings of a daemon with an engine, of prefill and of decode. No router builds them: transports and the firewall
are imported where they are checked."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from ...bounds import bound, device_index, match, port_range, power_of_two
from ...bus.keys import is_loopback
from ...environment import socket_directory
from ...errors import ConfigError
from ...limits import HOST_BUFFER_GIB, HOST_BUFFER_GIB_MAX, HOST_BUFFER_GIB_MIN, TOKENS_MAX
from ...wire import Ranks
from .node import BUILT_IN, FACTORY, NODE_NAME, STAMP, NodeConfig, flag, node_name
from .ranks import FREE, check_advertise, check_device, check_ranks, device_of

if TYPE_CHECKING:
    from ...transports.options import Network
    from ..engine_api import EngineConfig, HiSparse

PAGE_SIZE_MAX = 65_536
SLOTS_MAX = 1 << 32  # slots are u32 on the wire
SOCKET_DIRECTORY_LENGTH_MAX = 72  # the whole path of a Unix socket has at most 107 bytes
CHECKPOINT_ENGINE = "pdtransfer.serve.engines.transformers:create"

HostLayout = Literal["layer_first", "page_first", "page_first_direct", "page_head"]
LISTEN = "Where /health, /live and /metrics are served; empty for none. Until 0.3 also --http."
_OF_HISPARSE = ("device_slots", "hot_tokens", "dense_slots", "retract_policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(NodeConfig):
    """Settings of a daemon with an engine."""

    bind: Annotated[str, flag("Where peers reach this daemon; port 0 takes a free one.")] = "tcp://127.0.0.1:0"
    advertise: Annotated[str, flag("The host that peers dial, if it is not the one in bind.")] = ""
    transport: Annotated[
        str, flag("How KV reaches decode's arena: a transport by its name, or auto for the first that reaches it.")
    ] = "auto"
    transport_ports: Annotated[str, flag("Ports of transports between hosts, first-last.")] = "21000-21999"
    transport_protocol: Annotated[
        Literal["tcp", "rdma"], flag("Protocol of transports between hosts; rdma is untested on hardware.")
    ] = "tcp"
    firewall: Annotated[
        Literal["auto", "on", "off"],
        flag("nftables rules that admit only peers with a session to transport ports: auto sets them where it may."),
    ] = "auto"
    firewall_admit: Annotated[
        tuple[str, ...], flag("Address or network that may reach the transport ports too; may be repeated.")
    ] = ()
    listen: Annotated[str, flag(LISTEN)] = ""
    http: Annotated[str | None, Parameter(show=False)] = None  # until 0.3: the older name of `listen`
    model: Annotated[
        str,
        flag("A Hugging Face checkpoint's directory; stamp, which needs no model; or reference, with random weights."),
    ] = STAMP
    engine: Annotated[str, flag("The engine's factory, module:attribute; by default the one of the model.")] = ""
    engine_option: Annotated[tuple[str, ...], flag("name=value for the engine; may be repeated.")] = ()
    slots: Annotated[int, flag("Tokens that the pool or the arena holds.")] = 65_536
    page_size: Annotated[int, flag("Tokens a page; a power of two.")] = 64
    host_layout: Annotated[HostLayout, flag("How the pool or the arena is laid out.")] = "layer_first"
    device: Annotated[
        str, flag("Where the engine computes: cpu, cuda (each rank on a GPU of its own), cuda:N, or cuda:N,cuda:M,...")
    ] = "cpu"
    tp_size: Annotated[int, flag("Processes that share the heads of each layer.")] = 1
    tp_rank: Annotated[int, flag("This process's number among them; 0 is the leader, which routers connect to.")] = 0
    group: Annotated[
        str,
        flag("Where the leader waits for its ranks, [KEY@]host:port; by default it starts them itself, on this host."),
    ] = ""

    def __post_init__(self) -> None:
        # Zero-argument super() does not work in a dataclass with slots before Python 3.14.
        NodeConfig.__post_init__(self)
        from ...transports.registry import check
        from ..firewall.ruleset import admit_networks

        self._check_bind("bind", self.bind, scheme="tcp://")
        if self.http is not None:
            object.__setattr__(self, "listen", self.http)
        if self.listen:
            self._check_bind("listen", self.listen)
        if self.engine:
            match("engine", self.engine, FACTORY, "module:attribute")
        if not self.model:
            raise ConfigError("model = '': must be stamp, the directory of a checkpoint, or reference")
        if self.factory == CHECKPOINT_ENGINE and not os.path.isdir(self.model):
            raise ConfigError(f"model = {self.model!r}: no such directory; a checkpoint is not fetched by its name")
        for option in self.engine_option:
            match("engine_option", option, r"[\w.-]+=.*", "name=value")
        port_range("transport_ports", self.transport_ports)
        admit_networks("firewall_admit", self.firewall_admit)
        power_of_two("page_size", self.page_size, PAGE_SIZE_MAX)
        bound("slots", self.slots, 1, SLOTS_MAX)
        if self.slots % self.page_size:
            raise ConfigError(f"slots = {self.slots}: must be a multiple of page_size {self.page_size}")
        check_ranks(self.ranks, self.group, keyed=self.key is not None, insecure=self.insecure)
        check_device(self.device, self.ranks)
        if not self.leads:
            # The defaults are taken by the leader where all ranks are on one host.
            for field in fields(self):
                if field.name in FREE and getattr(self, field.name) == field.default:
                    object.__setattr__(self, field.name, FREE[field.name])
        # A router knows the leader's endpoint. The other ranks report theirs, some at the leader's address.
        check_advertise(self.advertise, self.bind, shared=self.grouped and not (self.leads and self.group))
        check(self.transport, self.network)

    @property
    def ranks(self) -> Ranks:
        """This process's place in its worker's group."""
        return Ranks(self.tp_rank, self.tp_size)

    @property
    def network(self) -> Network:
        """How peers on other hosts reach this daemon's transports."""
        from ...transports.options import Network

        ports = port_range("transport_ports", self.transport_ports)
        return Network(
            host=self.advertise, ports=ports, protocol=self.transport_protocol, bind=self.bind,
            loopback=is_loopback(self.bind),
        )  # fmt: skip

    @property
    def own_device(self) -> str:
        """The part of `device` that this rank uses."""
        return device_of(self.device, self.ranks)

    @property
    def device_index(self) -> int | None:
        """The index of the GPU that this rank computes on, None for cpu."""
        return device_index(self.own_device)

    @property
    def grouped(self) -> bool:
        """True if the worker has several processes."""
        return self.ranks.tp_size * self.ranks.pp_size > 1

    @property
    def leads(self) -> bool:
        """True if this process is the leader, to which routers connect."""
        return self.ranks.tp_rank == self.ranks.pp_rank == 0

    @property
    def allowed(self) -> Path | None:
        """The allow-list, None without keys."""
        return self.allow if self.key is not None else None

    @property
    def factory(self) -> str:
        """The engine's factory."""
        return self.engine or BUILT_IN.get(self.model, CHECKPOINT_ENGINE)

    @property
    def engine_options(self) -> dict[str, str]:
        """`engine_option` as a mapping, and a checkpoint's directory as `model`; the last value of a name counts."""
        given = {name: value for name, _, value in (option.partition("=") for option in self.engine_option)}
        return given if self.model in BUILT_IN else given | {"model": self.model}

    def _engine_config(self, role: Literal["prefill", "decode"], **of_role: Any) -> EngineConfig:
        from ..engine_api import EngineConfig

        return EngineConfig(
            role=role, slots=self.slots, page_size=self.page_size, host_layout=self.host_layout, device=self.own_device,
            options=self.engine_options, **of_role,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """Settings of a prefill daemon."""

    role: ClassVar[Literal["prefill", "decode", "router"]] = "prefill"

    node: Annotated[str, NODE_NAME] = field(default_factory=partial(node_name, "prefill"))
    bind: Annotated[str, flag("Where decode and router reach it; port 0 takes a free one.")] = "tcp://127.0.0.1:7101"
    listen: Annotated[str, flag(LISTEN)] = "127.0.0.1:7102"
    chunk_tokens: Annotated[int, flag("Tokens that are computed, and offered to decode, at a time.")] = 512
    copy_threads: Annotated[int, flag("Threads that copy rows into arenas.")] = 2
    pp_size: Annotated[int, flag("Stages that share the layers, each of tp_size processes.")] = 1
    pp_rank: Annotated[int, flag("This process's stage.")] = 0

    def __post_init__(self) -> None:
        WorkerConfig.__post_init__(self)
        bound("chunk_tokens", self.chunk_tokens, 1, TOKENS_MAX)
        bound("copy_threads", self.copy_threads, 1, 64)

    @property
    def ranks(self) -> Ranks:
        """This process's place in its worker's group."""
        return Ranks(self.tp_rank, self.tp_size, self.pp_rank, self.pp_size)

    @property
    def engine_config(self) -> EngineConfig:
        """The argument of the engine's factory."""
        return self._engine_config("prefill", chunk_tokens=self.chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """Settings of a decode daemon; `slots`, `page_size` and `host_layout` describe its arena."""

    role: ClassVar[Literal["prefill", "decode", "router"]] = "decode"

    node: Annotated[str, NODE_NAME] = field(default_factory=partial(node_name, "decode"))
    bind: Annotated[str, flag("Where the router reaches it; port 0 takes a free one.")] = "tcp://127.0.0.1:7201"
    listen: Annotated[str, flag(LISTEN)] = "127.0.0.1:7202"
    slots: Annotated[int, flag("Tokens that the arena holds.")] = 131_072
    page_size: Annotated[int, flag("Tokens a page of the arena; a power of two.")] = 1
    host_layout: Annotated[HostLayout, flag("How the arena is laid out.")] = "page_first"
    batch_max: Annotated[int, flag("Requests in one decode step.")] = 64
    huge_pages: Annotated[Literal["auto", "never", "always"], flag("Back the arena with 2 MiB pages.")] = "auto"
    host_buffer_gib: Annotated[
        float,
        flag(
            "With KV on a GPU: host memory for rows of prefill workers that do not reach it, in GiB. It is backed when "
            "the first of them comes."
        ),
    ] = HOST_BUFFER_GIB
    socket_directory: Annotated[
        Path, Parameter(help="Where the arena is handed over; by default private to this user.", show_default=False)
    ] = field(default_factory=socket_directory)
    enable_hisparse: Annotated[bool, flag("Admit requests that keep their whole KV in host memory.")] = False
    device_slots: Annotated[int, flag("Tokens of all HiSparse requests that the device holds.")] = 65_536
    hot_tokens: Annotated[int, flag("Tokens of one HiSparse request that the device holds.")] = 4_096
    dense_slots: Annotated[int, flag("Tokens of other requests that the device holds.")] = 16_384
    retract_policy: Annotated[
        Literal["longest", "shortest", "newest"],
        flag("Request retracted for waiting ones: most tokens left to generate, fewest, or newest."),
    ] = "longest"
    prefix_cache: Annotated[
        bool, Parameter(help="Keep landed prompts for later requests to share.", negative="--no-prefix-cache")
    ] = True
    verify: Annotated[bool, flag("Read back what has landed, and compare its checksum with prefill's.")] = False

    def __post_init__(self) -> None:
        WorkerConfig.__post_init__(self)
        bound("batch_max", self.batch_max, 1, 65_536)
        bound("host_buffer_gib", self.host_buffer_gib, HOST_BUFFER_GIB_MIN, HOST_BUFFER_GIB_MAX)
        for name in _OF_HISPARSE:
            value, default = getattr(self, name), DecodeConfig.__dataclass_fields__[name].default
            if name != "retract_policy":
                bound(name, value, 1, SLOTS_MAX)
            if value != default and not self.enable_hisparse:
                raise ConfigError(f"{name} = {value}: has no effect without enable_hisparse")
        if len(os.fsencode(self.socket_directory)) > SOCKET_DIRECTORY_LENGTH_MAX:
            text = f"socket_directory = '{self.socket_directory}': longer than {SOCKET_DIRECTORY_LENGTH_MAX} bytes"
            raise ConfigError(text)

    @property
    def engine_config(self) -> EngineConfig:
        """The argument of the engine's factory."""
        return self._engine_config("decode", batch_max=self.batch_max, hisparse=self._hisparse)

    @property
    def _hisparse(self) -> HiSparse | None:
        if not self.enable_hisparse:
            return None
        from ..engine_api import HiSparse

        return HiSparse(
            device_slots=self.device_slots, hot_tokens=self.hot_tokens, dense_slots=self.dense_slots,
            policy=self.retract_policy, limits=self.limits,
        )  # fmt: skip
