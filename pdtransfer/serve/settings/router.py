"""The settings of the router, and which workers it may dial."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from ...bounds import bound, match
from ...bus.keys import Endpoint, is_loopback
from ...errors import ConfigError
from .node import FACTORY, NODE_NAME, STAMP, NodeConfig, flag, node_name

HTTP_ENGINES = ("vllm", "sglang")
# Settings that HTTP servers make useless.
_OF_DAEMONS = ("model", "key", "allow", "timeline", "enable_hisparse", "enable_resume")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(NodeConfig):
    """Settings of the router: an HTTP listener and its workers; accepts `limits.rooms_max` requests at once."""

    role: ClassVar[Literal["prefill", "decode", "router"]] = "router"

    node: Annotated[str, NODE_NAME] = field(default_factory=partial(node_name, "router"))
    listen: Annotated[str, flag("Where OpenAI's API, /health, /live and /metrics are served.")] = "127.0.0.1:8000"
    engine: Annotated[
        str, flag("The workers: daemons of pdtransfer, whatever their engine, or HTTP servers of vllm or sglang.")
    ] = "pdtransfer"
    prefill: Annotated[
        tuple[str, ...], flag("A prefill daemon, [KEY@]tcp://host:port, or server, http://host:port; may be repeated.")
    ] = ()
    decode: Annotated[
        tuple[str, ...], flag("A decode daemon, [KEY@]tcp://host:port, or server, http://host:port; may be repeated.")
    ] = ()
    workers_file: Annotated[
        Path | None, flag("More workers, a line each: prefill or decode, and its endpoint. Read again once changed.")
    ] = None
    prefill_dns: Annotated[
        tuple[str, ...],
        flag("Prefill workers by DNS, dns://NAME:PORT or srv://NAME; may be repeated; needs pip install '.[dns]'."),
    ] = ()
    decode_dns: Annotated[
        tuple[str, ...],
        flag("Decode workers by DNS, dns://NAME:PORT or srv://NAME; may be repeated; needs pip install '.[dns]'."),
    ] = ()
    dns_server: Annotated[
        str, flag("The resolver that is asked, address or address:port; by default those of this host.")
    ] = ""
    admin: Annotated[str, flag("Where workers are added, drained and removed at run time; empty for nowhere.")] = ""
    admin_token: Annotated[Path | None, flag("The file of the token that the admin API asks for.")] = None
    model: Annotated[
        str,
        flag("Tokenizer and chat template: a checkpoint's directory; with stamp and reference token ids are bytes."),
    ] = STAMP
    body_readers: Annotated[
        int, flag("Processes that decode and tokenise large bodies of requests, started when they are needed.")
    ] = 2
    enable_hisparse: Annotated[bool, flag("For requests that do not set this field: keep their KV in host memory.")] = (
        False
    )
    enable_resume: Annotated[
        bool, flag("For requests that do not set this field: continue their answer elsewhere if its decode is lost.")
    ] = False
    stream_from: Annotated[
        Literal["prefill", "decode"],
        flag("What a stream begins with: prefill's first token at once, where decode picks the same one, or decode's."),
    ] = "prefill"
    without_prefill: Annotated[
        Literal["serve", "refuse"],
        flag("With engine vllm and no healthy prefill server: have decode compute prompts itself, or answer 503."),
    ] = "refuse"
    api_keys: Annotated[
        Path | None, flag("Clients need a key of this file: one a line, with an optional name, open=N and rate=N.")
    ] = None
    tls_cert: Annotated[Path | None, flag("Serve HTTPS with this certificate, and its chain, in PEM.")] = None
    tls_key: Annotated[Path | None, flag("The certificate's private key, in PEM.")] = None

    def __post_init__(self) -> None:
        NodeConfig.__post_init__(self)
        if (self.tls_cert is None) != (self.tls_key is None):
            given, lacking = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise ConfigError(f"{given} = '{getattr(self, given)}': needs {lacking} as well")
        # The setting of daemons, module:attribute, may stand in the same environment or file.
        match(
            "engine",
            self.engine,
            rf"pdtransfer|{'|'.join(HTTP_ENGINES)}|{FACTORY}",
            f"pdtransfer, {' or '.join(HTTP_ENGINES)}",
        )
        bound("body_readers", self.body_readers, 1, 64)
        self._check_bind("listen", self.listen, keyed=self.api_keys is not None, remedy="set api_keys, a file of keys")
        if self.relays:
            for field in fields(self):
                if field.name in _OF_DAEMONS and (value := getattr(self, field.name)) != field.default:
                    raise ConfigError(f"{field.name} = {str(value)!r}: has no effect with engine {self.engine}")
        if self.without_prefill == "serve" and self.engine != "vllm":
            raise ConfigError(f"without_prefill = 'serve': only with engine vllm, engine is {self.engine}")
        if self.admin:
            self._check_bind("admin", self.admin)
        if bool(self.admin) != (self.admin_token is not None):
            raise ConfigError(f"admin = {self.admin!r}, admin_token = '{self.admin_token}': one needs the other")
        workers = [("prefill", address) for address in self.prefill] + [("decode", address) for address in self.decode]
        for name, worker in workers:
            self.check_worker(name, worker)
        listed = [worker for _, worker in workers]
        # A server of vLLM may have both roles.
        both = set(self.prefill) & set(self.decode) if self.engine == "vllm" else set[str]()
        if twice := [worker for worker in listed if listed.count(worker) > 1 + (worker in both)]:
            raise ConfigError(f"prefill, decode = {twice[0]!r}: listed twice")

    @property
    def relays(self) -> bool:
        """True if the workers are HTTP servers, to which requests are passed on."""
        return self.engine in HTTP_ENGINES

    @property
    def finds_workers(self) -> bool:
        """True if workers may come that no flag names."""
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
        except ConfigError:
            text = f"must be http://host:port with engine {self.engine}, and one that can be dialled"
            raise ConfigError(f"{name} = {value!r}: {text}") from None
        if scheme == "http" and not self.insecure and not is_loopback(endpoint.address):
            text = "on another host, where others may read it: take https, or set insecure"
            raise ConfigError(f"{name} = {value!r}: {text}")

    def _check_peer(self, name: str, value: str) -> None:
        if value.startswith(("http://", "https://")):
            text = "a daemon is tcp://host:port; for servers of vLLM or SGLang set engine to vllm or sglang"
            raise ConfigError(f"{name} = {value!r}: {text}")
        try:
            peer = Endpoint.parse(value)
            guarded = self.insecure or peer.server_key is not None or is_loopback(peer.address)
        except ConfigError as error:
            reason = str(error).removeprefix(f"endpoint {value!r}: ")
            raise ConfigError(f"{name} = {value!r}: {reason}") from None
        if not guarded:
            raise ConfigError(f"{name} = {value!r}: on another host, so it needs its public key: KEY@tcp://host:port")
        if peer.server_key is not None and self.key is None:
            raise ConfigError(f"{name} = {value!r}: has a key, but this node has none")
