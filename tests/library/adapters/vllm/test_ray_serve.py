"""What Ray Serve LLM asks of pdtransfer's backend, with stand-ins for Ray's modules; and deploy/ray/serve.yaml."""

from __future__ import annotations

import re
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pdtransfer.adapters.kit.peers import Reachable
from pdtransfer.adapters.vllm.params import ReceiveFrom, SendTo, parse
from pdtransfer.adapters.vllm.settings import ConnectorSettings
from pdtransfer.errors import ConfigError
from tests.library.adapters.stand_ins import imported, stand_in
from tests.support.paths import REPO

SERVE = REPO / "deploy" / "ray" / "serve.yaml"
INTERNAL = "ray.llm._internal.serve.engines.vllm.kv_transfer"


class Backend:
    """As BaseConnectorBackend, of the replica with the rank 2."""

    def __init__(self, llm_config: Any) -> None:
        self.llm_config = llm_config
        self.kv_transfer_config = llm_config.engine_kwargs["kv_transfer_config"]

    def _compute_port_offset(self) -> int:
        return 2 * self.llm_config.engine_kwargs.get("tensor_parallel_size", 1)


class Request(SimpleNamespace):
    """As Ray's model of a request."""

    def model_copy(self, *, deep: bool) -> Request:
        assert deep
        return deepcopy(self)


def clamp(request: Any) -> None:
    request.max_tokens, request.stream = 1, False


@pytest.fixture
def ray_serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    registered: dict[str, str] = {}
    factory = SimpleNamespace(is_registered=registered.__contains__, register_backend=registered.__setitem__)
    marks = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
    stand_ins: dict[str, dict[str, Any]] = {
        "ray": {"util": SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7")},
        "ray.serve.llm": {"build_pd_openai_app": lambda arguments: (arguments, dict(registered))},
        f"{INTERNAL}.base": {
            "BaseConnectorBackend": Backend, "base_prefill_kv_transfer_params": lambda: dict(marks),
            "clamp_request_to_single_token": clamp,
        },
        f"{INTERNAL}.factory": {"KVConnectorBackendFactory": factory},
    }  # fmt: skip
    stand_in(monkeypatch, stand_ins)
    return imported("pdtransfer.adapters.vllm", "ray_serve")


def backend(ray_serve: Any, role: str, settings: dict[str, Any] | None = None, **engine: Any) -> Any:
    transfer: dict[str, Any] = {"kv_connector": "PDTransferConnector", "kv_role": role}
    if settings is not None:
        transfer["kv_connector_extra_config"] = settings
    made = ray_serve.PDTransferBackend(SimpleNamespace(engine_kwargs={"kv_transfer_config": transfer} | engine))
    made.setup()
    return made


def test_each_prefill_replica_has_ports_of_its_own_and_publishes_them(ray_serve: Any) -> None:
    prefill = backend(ray_serve, "kv_producer", {"insecure": True}, tensor_parallel_size=4)
    assert prefill.kv_transfer_config["kv_connector_module_path"] == "pdtransfer.adapters.vllm"
    settings = ConnectorSettings.of(prefill.kv_transfer_config["kv_connector_extra_config"], "settings")
    assert settings.bind == "tcp://10.0.0.7:7809"
    published = {"remote_host": "10.0.0.7", "remote_port": 7809, "tp_size": 4, "pp_size": 1, "remote_engine_id": None}
    assert prefill.replica_metadata() == published
    alone = backend(ray_serve, "kv_producer", {"bind": "tcp://127.0.0.1:9000"})
    assert alone.replica_metadata() == published | {"remote_host": "127.0.0.1", "remote_port": 9002, "tp_size": 1}
    assert backend(ray_serve, "kv_consumer").replica_metadata() == {}


@pytest.mark.parametrize(
    ("settings", "engine", "text"),
    [
        ({}, {}, "insecure"),
        ({"bind": "tcp://127.0.0.1:0"}, {}, "bind: port 0"),
        ({"insecure": True, "binds": 1}, {}, "'binds' must be one of"),
        ({"insecure": True}, {"data_parallel_size": 2}, "data_parallel_size"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(
    ray_serve: Any, settings: dict[str, Any], engine: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        backend(ray_serve, "kv_producer", settings, **engine)


def test_both_engines_get_a_transfer_id_that_no_client_chose(ray_serve: Any) -> None:
    prefill, decode = (
        backend(ray_serve, role, {"bind": "tcp://127.0.0.1:9000"}) for role in ("kv_producer", "kv_consumer")
    )
    assert decode.requires_peer_binding
    assert decode.concurrent_handoff
    reachable, labels = Reachable(None, insecure=False), set[str]()
    for _ in range(2):  # the same request of the same client twice
        asked = Request(
            request_id="r", max_tokens=9, min_tokens=5, stream=True,
            kv_transfer_params={"transfer_id": "another's", "remote_host": "10.1.1.1"},
        )  # fmt: skip
        sent = decode.prepare_prefill_request(request=asked, peer=prefill.replica_metadata())
        received = decode.prepare_decode_request(request=asked, peer=prefill.replica_metadata(), prefill_response=None)
        assert (sent.max_tokens, sent.min_tokens, sent.stream) == (1, 1, False)
        assert (received.max_tokens, received.min_tokens, received.stream) == (9, 5, True)
        sends, receives = parse(sent.kv_transfer_params, reachable), parse(received.kv_transfer_params, reachable)
        assert isinstance(sends, SendTo)
        assert receives == ReceiveFrom(sends.transfer_id or "", ("tcp://127.0.0.1:9002",))
        labels.add(receives.label)
    assert len(labels) == 2
    assert "another's" not in labels


def test_the_application_is_rays_with_the_backend_registered_once(ray_serve: Any) -> None:
    for _ in range(2):
        app = ray_serve.build_app({"prefill_config": {}})
    assert app == (
        {"prefill_config": {}},
        {"PDTransferConnector": "pdtransfer.adapters.vllm.ray_serve:PDTransferBackend"},
    )


def test_the_clusters_settings_are_ones_that_the_connector_takes(ray_serve: Any) -> None:
    [application] = yaml.safe_load(SERVE.read_text())["applications"]
    module, _, name = application["import_path"].partition(":")
    assert (module, hasattr(ray_serve, name)) == (ray_serve.__name__, True)
    configs = [
        application["args"][side]["engine_kwargs"]["kv_transfer_config"] for side in ("prefill_config", "decode_config")
    ]
    assert [config["kv_role"] for config in configs] == ["kv_producer", "kv_consumer"]
    for config in configs:
        made = backend(ray_serve, config["kv_role"], config["kv_connector_extra_config"])
        assert ConnectorSettings.of(made.kv_transfer_config["kv_connector_extra_config"], "serve.yaml").insecure
    document = (REPO / "docs" / "ray.md").read_text()
    for block in re.findall(r"^```yaml\n(.*?)^```$", document, re.DOTALL | re.MULTILINE):
        stated = yaml.safe_load(block)
        assert (
            stated.items()
            <= (
                application
                | {"kv_transfer_config": {"kv_connector": configs[0]["kv_connector"], "kv_role": "kv_producer"}}
            ).items()
        )
