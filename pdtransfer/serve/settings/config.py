"""The settings of each process: TOML < environment PDTRANSFER_* < flags.

The dataclasses check their own values, so a program that embeds a node builds them directly. The command line binds the
same classes to its flags; `commands.cli` reads the lower two levels. A wrong value is a ConfigError of one line.
A router builds no settings of workers: transports and the firewall are imported where those are checked.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from cyclopts import Group, Parameter

from ...bounds import bound, card_of, check_limits, match, port_range, power_of_two
from ...bus.keys import Address, Endpoint, check_exposure, is_loopback
from ...environment import socket_directory
from ...errors import ConfigError
from ...limits import NAME_LENGTH_MAX, TOKENS_MAX, Limits
from ...wire import Ranks
from .ranks import FREE, check_advertise, check_device, check_ranks, device_of

if TYPE_CHECKING:
    from ...transports.options import Network
    from ..engine_api import EngineConfig, HiSparse

PAGE_SIZE_MAX = 65_536
SLOTS_MAX = 1 << 32  # slots are u32 on the wire
SOCKET_DIRECTORY_LENGTH_MAX = 72  # the whole path of a Unix socket has at most 107 bytes

STAMP, REFERENCE = "stamp", "reference"  # models that need no checkpoint; their ids are bytes
BUILT_IN = {  # engines by model; that of the reference model comes with pdtransfer-lab
    STAMP: "pdtransfer.serve.engines.stamp.factory:create",
    REFERENCE: "pdtransfer_lab.models.factory:create",
}
CHECKPOINT_ENGINE = "pdtransfer.serve.engines.transformers:create"
_FACTORY = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"  # of an engine

HostLayout = Literal["layer_first", "page_first", "page_first_direct", "page_head"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


def node_name(role: str) -> str:
    """Returns a name that is unique on this host."""
    return f"{role}-{socket.gethostname()[:64]}-{os.getpid()}"


def _help(text: str) -> Parameter:
    return Parameter(help=text)


_LIMITS = Group("Limits", help="Meanings and reasons: proto/v1/README.md.")
_NODE = Parameter(help="Name among peers; by default role-host-pid.", show_default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Settings of every daemon. Peers on other hosts need keys, unless `insecure` is set."""

    role: ClassVar[Literal["prefill", "decode", "router"]]

    node: Annotated[str, _NODE]
    key: Annotated[Path | None, _help("This node's secret key, as `pdtransfer keygen` writes it.")] = None
    allow: Annotated[Path | None, _help("The list of peers: their names and public keys.")] = None
    insecure: Annotated[bool, _help("Allow other hosts without keys: anyone may then read and write.")] = False
    log_level: Annotated[LogLevel, _help("How much is logged.")] = "info"
    log_format: Annotated[LogFormat, _help("How a line is written: for people, or one JSON object.")] = "text"
    log_file: Annotated[Path | None, _help("Log here; by default to standard error.")] = None
    timeline: Annotated[
        Path | None, _help("Write a timeline into this directory, as NODE.json, for `pdtransfer timeline`.")
    ] = None
    otlp: Annotated[
        str,
        _help("OpenTelemetry collector that gets spans of requests, http://host:port; needs pip install '.[otel]'."),
    ] = ""
    allowed_hosts: Annotated[
        tuple[str, ...],
        _help("Name that HTTP clients may call this server by, or *.NAME, or *, besides addresses; may be repeated."),
    ] = ()
    json: Annotated[bool, _help("Print one JSON object a line on standard output: ready, and the addresses.")] = False
    limits: Annotated[Limits, Parameter(group=_LIMITS)] = field(default_factory=Limits)

    def __post_init__(self) -> None:
        match("node", self.node, rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_LENGTH_MAX - 1}}}", "letters, digits, . _ -")
        if self.key is not None and self.allow is None:
            raise ConfigError(f"key = '{self.key}': useless without a list of peers: set allow")
        if self.allow is not None and self.key is None:
            raise ConfigError(f"allow = '{self.allow}': useless without keys: set key to this node's own")
        for host in self.allowed_hosts:
            match("allowed_hosts", host, r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", "a host name, *.NAME or *")
        if self.otlp:
            match("otlp", self.otlp, r"https?://[A-Za-z0-9._\[\]:-]+(/[!-~]*)?", "http://host:port")
        check_limits(self.limits)

    def _check_bind(self, name: str, value: str, *, scheme: str = "", keyed: bool = False) -> None:
        """Checks an address to bind, scheme + host:port; one that other hosts can reach needs keys, unless it is
        `keyed` in another way."""
        named, address = f"{name} = {value!r}", "tcp://" + value.removeprefix(scheme)
        try:
            Address.parse(address if value.startswith(scheme) else value)
        except ConfigError as error:
            raise ConfigError(f"{named}: must be {scheme}host:port ({error})") from None
        check_exposure(address, named=named, keyed=keyed or self.key is not None, insecure=self.insecure)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(NodeConfig):
    """Settings of a daemon with an engine."""

    bind: Annotated[str, _help("Where peers reach this daemon; port 0 takes a free one.")] = "tcp://127.0.0.1:0"
    advertise: Annotated[str, _help("The host that peers dial, if it is not the one in bind.")] = ""
    transport: Annotated[
        str, _help("How KV reaches decode's arena: a transport by its name, or auto for the first that reaches it.")
    ] = "auto"
    transport_ports: Annotated[str, _help("Ports of transports between hosts, first-last.")] = "21000-21999"
    transport_protocol: Annotated[
        Literal["tcp", "rdma"], _help("Protocol of transports between hosts; rdma is untested on hardware.")
    ] = "tcp"
    firewall: Annotated[
        Literal["auto", "on", "off"],
        _help("nftables rules that admit only peers with a session to those ports: auto sets them where it may."),
    ] = "auto"
    firewall_admit: Annotated[
        tuple[str, ...], _help("Address or network that is admitted to them besides; may be repeated.")
    ] = ()
    http: Annotated[str, _help("Where /health, /live and /metrics are served; empty for none.")] = ""
    model: Annotated[
        str,
        _help("What is served: stamp, which needs no model, a Hugging Face checkpoint's directory, or reference."),
    ] = STAMP
    engine: Annotated[str, _help("The engine's factory, module:attribute; by default the one of the model.")] = ""
    engine_option: Annotated[tuple[str, ...], _help("name=value for the engine; may be repeated.")] = ()
    slots: Annotated[int, _help("Tokens that the pool or the arena holds.")] = 65_536
    page_size: Annotated[int, _help("Tokens a page; a power of two.")] = 64
    host_layout: Annotated[HostLayout, _help("How the pool or the arena is laid out.")] = "layer_first"
    device: Annotated[
        str,
        _help("Where the engine computes: cpu, cuda (each rank on a card of its own), cuda:N, or cuda:N,cuda:M,..."),
    ] = "cpu"
    tp_size: Annotated[int, _help("Processes that share the heads of each layer.")] = 1
    tp_rank: Annotated[int, _help("This process's number among them; 0 leads, and routers name it.")] = 0
    group: Annotated[
        str,
        _help("Where the leader waits for its ranks, [KEY@]host:port; by default it starts them itself, on this host."),
    ] = ""

    def __post_init__(self) -> None:
        # Zero-argument super() does not work in a dataclass with slots before Python 3.14.
        NodeConfig.__post_init__(self)
        from ...transports.registry import check_name
        from ..firewall.ruleset import admit_networks

        self._check_bind("bind", self.bind, scheme="tcp://")
        if self.http:
            self._check_bind("http", self.http)
        if self.engine:
            match("engine", self.engine, _FACTORY, "module:attribute")
        if not self.model:
            raise ConfigError("model = '': must be stamp, the directory of a checkpoint, or reference")
        for option in self.engine_option:
            match("engine_option", option, r"[\w.-]+=.*", "name=value")
        check_name(self.transport)
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
            for each in fields(self):
                if each.name in FREE and getattr(self, each.name) == each.default:
                    object.__setattr__(self, each.name, FREE[each.name])
        # A router knows the leader's endpoint. The other ranks report theirs, some at the leader's address.
        check_advertise(self.advertise, self.bind, shared=self.grouped and not (self.leads and self.group))

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
            host=self.advertise, ports=ports, protocol=self.transport_protocol, loopback=is_loopback(self.bind)
        )

    @property
    def own_device(self) -> str:
        """The part of `device` that this rank uses."""
        return device_of(self.device, self.ranks)

    @property
    def card(self) -> int | None:
        """The index of the card that this rank computes on, None for cpu."""
        return card_of(self.own_device)

    @property
    def grouped(self) -> bool:
        """Whether the worker has several processes."""
        return self.ranks.tp_size * self.ranks.pp_size > 1

    @property
    def leads(self) -> bool:
        """Whether this process is the leader, to which routers connect."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """Settings of a prefill daemon."""

    role: ClassVar[Literal["prefill", "decode", "router"]] = "prefill"

    node: Annotated[str, _NODE] = field(default_factory=partial(node_name, "prefill"))
    bind: Annotated[str, _help("Where decode and router reach it; port 0 takes a free one.")] = "tcp://127.0.0.1:7101"
    http: Annotated[str, _help("Where /health, /live and /metrics are served; empty for none.")] = "127.0.0.1:7102"
    chunk_tokens: Annotated[int, _help("Tokens that are computed, and offered to decode, at a time.")] = 512
    copy_threads: Annotated[int, _help("Threads that copy rows into arenas.")] = 2
    pp_size: Annotated[int, _help("Stages that share the layers, each of tp_size processes.")] = 1
    pp_rank: Annotated[int, _help("This process's stage.")] = 0

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
        from ..engine_api import EngineConfig

        return EngineConfig(
            role="prefill",
            slots=self.slots,
            page_size=self.page_size,
            host_layout=self.host_layout,
            chunk_tokens=self.chunk_tokens,
            device=self.own_device,
            options=self.engine_options,
        )


HTTP_ENGINES = ("vllm", "sglang")
# Settings of a router that HTTP servers make useless.
_OF_DAEMONS = ("model", "key", "allow", "timeline", "enable_hisparse", "enable_resume")
_OF_HISPARSE = ("device_slots", "hot_tokens", "dense_slots", "retract_policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """Settings of a decode daemon; `slots`, `page_size` and `host_layout` describe its arena."""

    role: ClassVar[Literal["prefill", "decode", "router"]] = "decode"

    node: Annotated[str, _NODE] = field(default_factory=partial(node_name, "decode"))
    bind: Annotated[str, _help("Where the router reaches this daemon; port 0 takes a free one.")] = (
        "tcp://127.0.0.1:7201"
    )
    http: Annotated[str, _help("Where /health, /live and /metrics are served; empty for none.")] = "127.0.0.1:7202"
    slots: Annotated[int, _help("Tokens that the arena holds.")] = 131_072
    page_size: Annotated[int, _help("Tokens a page of the arena; a power of two.")] = 1
    host_layout: Annotated[HostLayout, _help("How the arena is laid out.")] = "page_first"
    batch_max: Annotated[int, _help("Requests in one decode step.")] = 64
    huge_pages: Annotated[Literal["auto", "never", "always"], _help("Back the arena with 2 MiB pages.")] = "auto"
    socket_directory: Annotated[
        Path, Parameter(help="Where the arena is handed over; by default private to this user.", show_default=False)
    ] = field(default_factory=socket_directory)
    enable_hisparse: Annotated[bool, _help("Admit requests that keep their whole KV in host memory.")] = False
    device_slots: Annotated[int, _help("Tokens of all HiSparse requests that the device holds.")] = 65_536
    hot_tokens: Annotated[int, _help("Tokens of one HiSparse request that the device holds.")] = 4_096
    dense_slots: Annotated[int, _help("Tokens of other requests that the device holds.")] = 16_384
    retract_policy: Annotated[
        Literal["longest", "shortest", "newest"],
        _help("Request retracted for waiting ones: most tokens left to generate, fewest, or newest."),
    ] = "longest"
    prefix_cache: Annotated[
        bool, Parameter(help="Keep landed prompts for later requests to share.", negative="--no-prefix-cache")
    ] = True
    verify: Annotated[bool, _help("Read back what has landed, and compare its checksum with prefill's.")] = False

    def __post_init__(self) -> None:
        WorkerConfig.__post_init__(self)
        if self.transport != "auto":
            from ...transports.registry import TRANSPORTS

            TRANSPORTS[self.transport].check(self.network)
        bound("batch_max", self.batch_max, 1, 65_536)
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
        from ..engine_api import EngineConfig

        return EngineConfig(
            role="decode",
            slots=self.slots,
            page_size=self.page_size,
            host_layout=self.host_layout,
            batch_max=self.batch_max,
            device=self.own_device,
            options=self.engine_options,
            hisparse=self._hisparse,
        )

    @property
    def _hisparse(self) -> HiSparse | None:
        if not self.enable_hisparse:
            return None
        from ..engine_api import HiSparse

        return HiSparse(
            device_slots=self.device_slots,
            hot_tokens=self.hot_tokens,
            dense_slots=self.dense_slots,
            policy=self.retract_policy,
            limits=self.limits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(NodeConfig):
    """Settings of the router: an HTTP listener and its workers; accepts `limits.rooms_max` requests at once."""

    role: ClassVar[Literal["prefill", "decode", "router"]] = "router"

    node: Annotated[str, _NODE] = field(default_factory=partial(node_name, "router"))
    listen: Annotated[str, _help("Where OpenAI's API, /health, /live and /metrics are served.")] = "127.0.0.1:8000"
    engine: Annotated[
        str, _help("What generates: daemons of pdtransfer, whatever their engine, or HTTP servers of vllm or sglang.")
    ] = "pdtransfer"
    prefill: Annotated[
        tuple[str, ...], _help("A prefill daemon, [KEY@]tcp://host:port, or server, http://host:port; may be repeated.")
    ] = ()
    decode: Annotated[
        tuple[str, ...], _help("A decode daemon, [KEY@]tcp://host:port, or server, http://host:port; may be repeated.")
    ] = ()
    workers_file: Annotated[
        Path | None, _help("More workers, a line each: prefill or decode, and its endpoint. Changes count at once.")
    ] = None
    prefill_dns: Annotated[
        tuple[str, ...],
        _help("Prefill workers by DNS, dns://NAME:PORT or srv://NAME; may be repeated; needs pip install '.[dns]'."),
    ] = ()
    decode_dns: Annotated[
        tuple[str, ...],
        _help("Decode workers by DNS, dns://NAME:PORT or srv://NAME; may be repeated; needs pip install '.[dns]'."),
    ] = ()
    dns_server: Annotated[
        str, _help("The resolver that is asked, address or address:port; by default those of this host.")
    ] = ""
    admin: Annotated[str, _help("Where workers are added, drained and removed at run time; empty for nowhere.")] = ""
    admin_token: Annotated[Path | None, _help("The file of the token that the admin API asks for.")] = None
    model: Annotated[
        str,
        _help("Whose tokenizer and chat template: a checkpoint's directory; bytes are the ids of stamp and reference."),
    ] = STAMP
    body_readers: Annotated[
        int, _help("Processes that decode and tokenise large bodies of requests, started when they are needed.")
    ] = 2
    enable_hisparse: Annotated[bool, _help("Default of requests without this field: keep their KV in host memory.")] = (
        False
    )
    enable_resume: Annotated[
        bool, _help("Default of requests without this field: go on with their answer elsewhere if its decode is lost.")
    ] = False
    without_prefill: Annotated[
        Literal["serve", "refuse"],
        _help("With engine vllm and no healthy prefill server: have decode compute prompts itself, or answer 503."),
    ] = "refuse"
    api_keys: Annotated[
        Path | None, _help("Clients need a key of this file: one a line, with an optional name, open=N and rate=N.")
    ] = None
    tls_cert: Annotated[Path | None, _help("Serve HTTPS with this certificate, and its chain, in PEM.")] = None
    tls_key: Annotated[Path | None, _help("The certificate's private key, in PEM.")] = None

    def __post_init__(self) -> None:
        NodeConfig.__post_init__(self)
        if (self.tls_cert is None) != (self.tls_key is None):
            given, lacking = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise ConfigError(f"{given} = '{getattr(self, given)}': needs {lacking} as well")
        # The setting of daemons, module:attribute, may stand in the same environment or file.
        match(
            "engine",
            self.engine,
            rf"pdtransfer|{'|'.join(HTTP_ENGINES)}|{_FACTORY}",
            f"pdtransfer, {' or '.join(HTTP_ENGINES)}",
        )
        bound("body_readers", self.body_readers, 1, 64)
        self._check_bind("listen", self.listen, keyed=self.api_keys is not None)
        if self.relays:
            for each in fields(self):
                if each.name in _OF_DAEMONS and (value := getattr(self, each.name)) != each.default:
                    raise ConfigError(f"{each.name} = {str(value)!r}: has no effect with engine {self.engine}")
        if self.without_prefill == "serve" and self.engine != "vllm":
            raise ConfigError(f"without_prefill = 'serve': only with engine vllm, engine is {self.engine}")
        if self.admin:
            self._check_bind("admin", self.admin)
        if bool(self.admin) != (self.admin_token is not None):
            raise ConfigError(f"admin = {self.admin!r}, admin_token = '{self.admin_token}': one needs the other")
        workers = [("prefill", each) for each in self.prefill] + [("decode", each) for each in self.decode]
        for name, worker in workers:
            self.check_worker(name, worker)
        listed = [worker for _, worker in workers]
        if twice := [worker for worker in listed if listed.count(worker) > 1]:
            raise ConfigError(f"prefill, decode = {twice[0]!r}: listed twice")

    @property
    def relays(self) -> bool:
        """Whether the workers are HTTP servers, to which requests are passed on."""
        return self.engine in HTTP_ENGINES

    @property
    def finds_workers(self) -> bool:
        """Whether workers may come that no flag names."""
        return self.workers_file is not None or bool(self.admin or self.prefill_dns or self.decode_dns)

    def check_worker(self, name: str, value: str) -> None:
        """Raises ConfigError for a worker that this router may not dial; `name` is where it was given."""
        (self._check_server if self.relays else self._check_peer)(name, value)

    def _check_server(self, name: str, value: str) -> None:
        scheme, _, address = value.partition("://")
        try:
            if scheme not in ("http", "https"):
                raise ConfigError("the scheme is not http")
            endpoint = Endpoint.parse(f"tcp://{address}")
        except ConfigError as error:
            raise ConfigError(
                f"{name} = {value!r}: must be http://host:port with engine {self.engine} ({error})"
            ) from None
        if scheme == "http" and not self.insecure and not is_loopback(endpoint.address):
            text = "on another host, where others may read it: take https, or set insecure"
            raise ConfigError(f"{name} = {value!r}: {text}")

    def _check_peer(self, name: str, value: str) -> None:
        try:
            peer = Endpoint.parse(value)
            guarded = self.insecure or peer.server_key is not None or is_loopback(peer.address)
        except ConfigError as error:
            raise ConfigError(f"{name} = {value!r}: {error}") from None
        if not guarded:
            raise ConfigError(f"{name} = {value!r}: on another host, so it needs its public key: KEY@tcp://host:port")
        if peer.server_key is not None and self.key is None:
            raise ConfigError(f"{name} = {value!r}: has a key, but this node has none")


Config = PrefillConfig | DecodeConfig | RouterConfig
