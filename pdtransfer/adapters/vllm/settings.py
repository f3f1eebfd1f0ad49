"""What `kv_connector_extra_config` may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...bounds import bound
from ...bus.keys import Address, check_exposure
from ...errors import ConfigError
from ...limits import COMPONENTS_MAX
from ..kit.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings(Settings):
    """Settings of kv_connector_extra_config beyond those of all adapters."""

    # What is transferred: vLLM's blocks as they are, or the tokens in them. With "auto" engines with equal blocks
    # exchange blocks, and others exchange tokens.
    rows: Literal["auto", "blocks", "tokens"] = "auto"
    # The largest --decode-context-parallel-size among this engine and its peers; 0: this engine's own.
    dcp_size: int = 0
    bootstrap: str = ""  # prefill: host:port of an HTTP server for proxies that ask for its name; none if empty

    def __post_init__(self) -> None:
        super(ConnectorSettings, self).__post_init__()
        bound("dcp_size", self.dcp_size, 0, COMPONENTS_MAX)
        if self.bootstrap:
            address, named = f"tcp://{self.bootstrap}", f"bootstrap = {self.bootstrap!r}"
            parsed = Address.parse(address)
            if parsed.port_first != parsed.port_last or parsed.port_first == 0:
                raise ConfigError(f"{named}: must be host:port, with one port that is not 0")
            check_exposure(address, named=named, keyed=self.key is not None, insecure=self.insecure)
            if Address.parse(self.bind).port_first == 0:
                raise ConfigError(f"{named}: proxies keep where this engine listens: set a port in bind")
