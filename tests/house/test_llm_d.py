"""deploy/llm-d: the engines' settings are ones that the connector takes, ports fit, and docs/llm-d.md has the same."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from pdtransfer.adapters.vllm.settings import ConnectorSettings
from pdtransfer.bus.keys import Address
from tests.support.paths import REPO

ENGINES = REPO / "deploy" / "llm-d" / "engines.yaml"
DOCUMENT = REPO / "docs" / "llm-d.md"
ADDRESS = "10.0.0.7"  # of a pod
_BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(ENGINES.read_text(encoding="utf-8")))


def pod(role: str) -> dict[str, Any]:
    [manifest] = [manifest for manifest in manifests() if manifest["metadata"]["name"] == f"vllm-{role}"]
    return manifest["spec"]["template"]["spec"]


def options(container: dict[str, Any]) -> dict[str, str]:
    """Its arguments, as the kubelet hands them over."""
    pairs = (argument.removeprefix("--").split("=", 1) for argument in container["args"])
    return {name: value.replace("$(POD_IP)", ADDRESS) for name, value in pairs}


def transfer(role: str) -> dict[str, Any]:
    return json.loads(options(pod(role)["containers"][0])["kv-transfer-config"])


def settings(role: str) -> ConnectorSettings:
    return ConnectorSettings.of(transfer(role)["kv_connector_extra_config"], "engines.yaml")


@pytest.mark.parametrize(("role", "kind"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_the_connector_takes_its_settings(role: str, kind: str) -> None:
    assert settings(role).insecure
    config = transfer(role)
    assert (config["kv_connector"], config["kv_connector_module_path"]) == (
        "PDTransferConnector", "pdtransfer.adapters.vllm",
    )  # fmt: skip
    assert config["kv_role"] == kind


def test_each_port_that_is_dialled_is_open_to_the_pool() -> None:
    prefill, [sidecar] = settings("prefill"), pod("decode")["initContainers"]
    ports = {Address.parse(prefill.bind).port_first, Address.parse(f"tcp://{prefill.bootstrap}").port_first}
    assert int(options(sidecar)["mooncake-bootstrap-port"]) in ports
    [policy] = [manifest for manifest in manifests() if manifest["kind"] == "NetworkPolicy"]
    everybody, pool = policy["spec"]["ingress"]
    opened = [range(port["port"], port.get("endPort", port["port"]) + 1) for port in pool["ports"]]
    first, last = map(int, prefill.transport_ports.split("-"))
    assert all(any(port in each for each in opened) for port in {*ports, first, last})
    assert everybody == {"ports": [{"port": int(options(sidecar)["port"])}]}
    named = {port["containerPort"] for port in pod("prefill")["containers"][0]["ports"]}
    assert named == ports | {int(options(pod("prefill")["containers"][0])["port"])}
    assert options(sidecar)["model-server-port"] == options(pod("decode")["containers"][0])["port"]


def test_the_sidecar_is_the_release_that_has_run() -> None:
    [sidecar] = pod("decode")["initContainers"]
    name, _, release = sidecar["image"].rpartition("/")[2].partition(":")
    text = DOCUMENT.read_text(encoding="utf-8")
    assert f"`{name}`, {release} or later" in text
    assert f"llm-d's sidecar {release}, " in text.partition("## What has run")[2]


def test_the_document_has_the_same_arguments() -> None:
    arguments = [
        argument
        for role in ("prefill", "decode")
        for container in (*pod(role).get("initContainers", ()), *pod(role)["containers"])
        for argument in container["args"]
    ]
    stated = [
        argument for block in _BLOCK.findall(DOCUMENT.read_text(encoding="utf-8")) for argument in yaml.safe_load(block)
    ]
    assert len(stated) == 4
    assert set(stated) <= set(arguments)
