"""Ray Serve LLM's prefill and decode deployments with pdtransfer: `build_app` in place of Ray's `build_pd_openai_app`.

Each prefill replica listens at its node's address. Ray's decode replica asks prefill and its own engine at once, so
that KV lands layer by layer while prefill computes.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any
from uuid import uuid4

import ray
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import (
    BaseConnectorBackend,
    base_prefill_kv_transfer_params,
    clamp_request_to_single_token,
)
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.serve.llm import build_pd_openai_app

from ...bus.keys import Address, address_of
from ...errors import ConfigError
from .settings import ConnectorSettings

CONNECTOR = "PDTransferConnector"
PORT = 7801  # of a deployment's first replica, each next one has the next port; unless bind names another


class PDTransferBackend(BaseConnectorBackend):
    """What Ray's decode replica does for this connector: it chooses the prefill replica first, and then asks both
    engines at once, with one transfer id."""

    requires_peer_binding = True
    concurrent_handoff = True
    _published: dict[str, Any] = {}  # noqa: RUF012 -- replaced, never changed

    def setup(self) -> None:
        """Before the engine starts: a prefill replica gets its address, and publishes it. Raises ConfigError."""
        config, engine = self.kv_transfer_config, self.llm_config.engine_kwargs
        if engine.get("data_parallel_size", 1) > 1:
            raise ConfigError("data_parallel_size: Ray's data parallel deployments do not work with pdtransfer yet")
        config.setdefault("kv_connector_module_path", "pdtransfer.adapters.vllm")
        if config.get("kv_role") != "kv_producer":
            return
        given = config.setdefault("kv_connector_extra_config", {})
        given.setdefault("bind", address_of(ray.util.get_node_ip_address(), PORT))
        settings = ConnectorSettings.of(given, "kv_connector_extra_config")
        given["bind"] = settings.bind_of(self._compute_port_offset())
        if (port := Address.parse(given["bind"]).port_first) == 0:
            raise ConfigError("bind: port 0: decode replicas need the port before prefill listens")
        self._published = {
            "remote_host": settings.host, "remote_port": port,
            "remote_engine_id": config.get("engine_id"), "tp_size": engine.get("tensor_parallel_size", 1),
            "pp_size": engine.get("pipeline_parallel_size", 1),
        }  # fmt: skip

    def replica_metadata(self) -> dict[str, Any]:
        """What decode has to know of this prefill replica."""
        return self._published

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any:
        """Prefill's request. `request` keeps the transfer id for decode's: an id of the client's own choice could be
        that of another client's request."""
        request.kv_transfer_params = {"transfer_id": str(uuid4())}
        prefill_request = request.model_copy(deep=True)
        prefill_request.kv_transfer_params |= base_prefill_kv_transfer_params()
        clamp_request_to_single_token(prefill_request)
        prefill_request.min_tokens = min(prefill_request.min_tokens, 1)
        return prefill_request

    def prepare_decode_request(self, *, request: Any, peer: dict[str, Any] | None, prefill_response: Any) -> Any:
        """Decode's request, behind that of prefill."""
        decode_request = request.model_copy(deep=True)
        decode_request.kv_transfer_params |= {"do_remote_prefill": True, "do_remote_decode": False} | (peer or {})
        return decode_request


def build_app(pd_serving_args: dict[str, Any]) -> Any:
    """Ray's application of prefill and decode deployments, with PDTransferConnector known to it."""
    if not KVConnectorBackendFactory.is_registered(CONNECTOR):
        KVConnectorBackendFactory.register_backend(CONNECTOR, f"{__name__}:{PDTransferBackend.__name__}")
    return build_pd_openai_app(pd_serving_args)
