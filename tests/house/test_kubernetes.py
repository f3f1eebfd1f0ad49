"""deploy/kubernetes: its pods start our daemons, with keys, ports, probes and policies that fit their settings.

kubectl or kustomize renders the overlays (Debian: kubernetes-client). Without either, what needs it is skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdtransfer.bus.keys import Address, AllowList, Endpoint, KeyPair
from pdtransfer.serve.process.http import CLOSE_S
from pdtransfer.serve.router.fleet.admin import read_token
from pdtransfer.serve.router.front.api_keys import ApiKeys
from pdtransfer.serve.settings.router import RouterConfig
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from tests.house.manifests import (
    COMPONENTS,
    KUBERNETES,
    NODES,
    SOCKETS,
    Manifest,
    Pod,
    Root,
    fleet_secrets,
    kustomize,
    pods,
    render,
)  # fmt: skip
from tests.support.paths import REPO

Configs = list[tuple[Pod, Manifest, Any]]
CONFIGS = {"prefill": PrefillConfig, "decode": DecodeConfig, "router": RouterConfig}
MADE = "secrets"  # by fleet-secrets
ROOM_S = 5.0  # that a pod has left when its last room ended by its deadline
OF_OTHERS = {"leaderworkerset.x-k8s.io", "monitoring.coreos.com"}  # API groups without a schema in Kubernetes
EVERYTHING = "hosts with all components"
FILES = sorted(path for path in KUBERNETES.rglob("*.yaml") if MADE not in path.parts)

VALIDATE = os.environ.get("KUBERNETES_VALIDATE") or shutil.which("kubernetes-validate")


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Manifest]]:
    """What each overlay makes with keys of its own."""
    if not kustomize():
        pytest.skip("kubectl and kustomize are missing: apt-get install kubernetes-client")
    place = tmp_path_factory.mktemp("kubernetes") / "copy"
    shutil.copytree(KUBERNETES, place, ignore=shutil.ignore_patterns(MADE))
    for overlay, nodes in NODES.items():
        made = fleet_secrets(place / "fleet-secrets", place / "overlays" / overlay / MADE, *nodes)
        assert made.returncode == 0, made.stderr
    found = {overlay: render(place, overlay) for overlay in NODES}
    return found | {EVERYTHING: render(place, "hosts", components=True)}


@pytest.fixture(params=[*NODES, EVERYTHING])
def overlay(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def manifests(rendered: dict[str, list[Manifest]], overlay: str) -> list[Manifest]:
    return rendered[overlay]


@pytest.fixture
def configs(manifests: list[Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configs:
    return _configs(manifests, tmp_path, monkeypatch)


@cache
def _fields(role: str) -> frozenset[str]:
    return frozenset(field.name for field in fields(CONFIGS[role]))


def _kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def _matches(selector: Manifest, labels: dict[str, str]) -> bool:
    given = selector.get("matchLabels", {})
    within = selector.get("matchExpressions", ())
    assert all(each["operator"] == "In" for each in within)
    return given.items() <= labels.items() and all(labels.get(each["key"]) in each["values"] for each in within)


def _configs(manifests: list[Manifest], place: Path, patch: pytest.MonkeyPatch) -> Configs:
    found: Configs = []
    for pod in pods(manifests):
        root = Root(place / pod.name, pod, manifests)
        root.initialise()
        found += [(pod, container, root.config(container, patch)) for container in pod.containers]
    return found


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_every_file_of_a_kustomization_is_there_and_no_other() -> None:
    named: set[Path] = set()
    for file in FILES:
        if file.name != "kustomization.yaml":
            continue
        named.add(file)
        for name in (content := yaml.safe_load(file.read_text())).get("resources", []) + content.get("components", []):
            path = (file.parent / name).resolve()
            assert name == MADE or (path / "kustomization.yaml").exists() or path.is_file(), f"{file}: {name}"
            named.add(path)
        named |= {(file.parent / name).resolve() for name in content.get("configurations", ())}
        for each in content.get("configMapGenerator", ()):
            assert all((file.parent / name).is_file() for name in each["files"])
    assert set(FILES) - named == set()


def test_every_variable_of_ours_is_a_setting_of_its_container() -> None:
    seen = 0
    for file in FILES:
        for name in re.findall(r"PDTRANSFER_(\w+)", file.read_text()):
            assert any(name.lower() in _fields(role) for role in CONFIGS), f"{file}: PDTRANSFER_{name}"
            seen += 1
    assert seen > 30


def test_each_container_starts_a_daemon_with_its_own_name_key_and_ports(configs: Configs, overlay: str) -> None:
    listed = {node.partition("=")[0] for node in NODES[overlay if overlay in NODES else "hosts"]}
    assert {config.node for _, _, config in configs} == listed
    assert len(configs) == len(listed)
    names = {f"{pod.name}.{pod.service}" for pod, _, _ in configs}
    binds: dict[str, int] = {}
    for pod, container, config in configs:
        for each in container["env"]:
            if (setting := each["name"]).startswith("PDTRANSFER_"):
                assert setting.removeprefix("PDTRANSFER_").lower() in _fields(config.role), setting
        public, allowed = KeyPair.read(config.key).public, AllowList.read(config.allow)
        assert allowed.entry(public) == (config.node, frozenset({config.role}))
        assert set(allowed.names.values()) == listed
        used = {_port(config.listen)}
        if isinstance(config, RouterConfig):
            ApiKeys().read(Path(str(config.api_keys)))
            if config.admin:
                read_token(Path(str(config.admin_token)))
        elif overlay != "single":
            binds[config.node] = _port(config.bind)
            assert config.transport == "mooncake"
            assert config.advertise in names
            used |= {_port(config.bind)} | ({7301} if config.grouped else set())
        else:
            binds[config.node] = _port(config.bind)
            assert (config.transport, Address.parse(config.bind).host) == ("shm", "127.0.0.1")
        assert {each["containerPort"] for each in container["ports"]} == used
        annotated = pod.template["metadata"].get("annotations", {}).get("prometheus.io/port")
        assert annotated in (None, str(_port(config.listen)))
        if isinstance(config, DecodeConfig):
            # A directory that the daemon makes itself: a volume's own is open to all.
            [shared] = {each["name"] for each in container["volumeMounts"] if each["mountPath"] == SOCKETS}
            assert config.socket_directory.parent == Path(SOCKETS)
            sharing = {
                container["name"]
                for container in pod.containers
                for each in container["volumeMounts"]
                if each["name"] == shared
            }
            assert sharing == ({"prefill", "decode"} if overlay == "single" else {"decode"})
    for router in (config for _, _, config in configs if isinstance(config, RouterConfig)):
        allowed, dialled = AllowList.read(str(router.allow)), list[str]()
        for line in Path(str(router.workers_file)).read_text().splitlines():
            role, endpoint = line.split()
            router.check_worker(role, endpoint)
            peer = Endpoint.parse(endpoint)
            node, roles = allowed.entry(str(peer.server_key))
            assert roles == {role}
            address = Address.parse(peer.address)
            assert address.port_first == binds[str(node)]
            assert address.host == "127.0.0.1" if overlay == "single" else address.host in names
            dialled.append(str(node))
        assert sorted(dialled) == sorted(node for node in binds if node.count("-") == 1)


@pytest.mark.parametrize("overlay", ["groups"])
def test_ranks_of_a_group_meet_at_their_leader(configs: Configs) -> None:
    found = [config for *_, config in configs if config.role == "decode"]
    leader, follower = found
    assert [(each.leads, each.tp_rank, each.tp_size) for each in found] == [(True, 0, 2), (False, 1, 2)]
    assert leader.group == "10.0.0.7:7301"
    assert follower.group == f"{KeyPair.read(leader.key).public}@decode-0.decode:7301"


def test_probes_ask_where_the_daemon_answers_and_a_drain_fits_the_grace_period(configs: Configs) -> None:
    for pod, container, config in configs:
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        paths = {"startupProbe": "/live", "readinessProbe": "/health", "livenessProbe": "/live"}
        for probe, path in paths.items():
            asked = container[probe]["httpGet"]
            assert (asked["path"], ports[asked["port"]]) == (path, _port(config.listen))
            assert (asked.get("scheme") == "HTTPS") == (getattr(config, "tls_cert", None) is not None)
        assert Address.parse(f"tcp://{config.listen}").wildcard, "the kubelet asks at the pod's address"
        command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert command[0] == "sleep"
        drain_s = float(command[1]) + config.limits.room_deadline_ms / 1e3 + CLOSE_S
        assert drain_s + ROOM_S <= pod.spec["terminationGracePeriodSeconds"]


def test_no_pod_has_more_rights_than_it_needs(manifests: list[Manifest]) -> None:
    [user] = set(re.findall(r"useradd --uid (\d+)", (REPO / "Dockerfile").read_text()))
    for pod in pods(manifests):
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["enableServiceLinks"] is False
        assert pod.spec["securityContext"] == {
            "runAsNonRoot": True, "runAsUser": int(user), "runAsGroup": int(user), "fsGroup": int(user),
            "seccompProfile": {"type": "RuntimeDefault"},
        }  # fmt: skip
        for container in (*pod.spec["initContainers"], *pod.containers):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }, container["name"]  # fmt: skip
            # An arena that is touched as a whole must not be another pod's to take.
            assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
        mounted = {
            each["name"] for one in (*pod.spec["initContainers"], *pod.containers) for each in one["volumeMounts"]
        }
        assert mounted == {each["name"] for each in pod.spec["volumes"]}
        # Only an init container sees keys, and each pod's containers their own alone.
        secret = {each["name"] for each in pod.spec["volumes"] if "keys-of-all" in each["name"]}
        for each in (
            mount for container in pod.containers for mount in container["volumeMounts"] if mount["name"] in secret
        ):
            assert each["subPathExpr"].endswith(".pub")


def test_selectors_services_and_disruption_budgets_name_pods_that_there_are(manifests: list[Manifest]) -> None:
    found = pods(manifests)
    services = {each["metadata"]["name"]: each for each in _kind(manifests, "Service")}
    assert {pod.service for pod in found} <= services.keys()
    for name, service in services.items():
        chosen = [pod for pod in found if service["spec"]["selector"].items() <= pod.labels.items()]
        assert {pod.service for pod in chosen} == {name}
        for port in service["spec"]["ports"]:
            offered = [
                {each["name"]: each["containerPort"] for each in container["ports"]}
                for pod in chosen for container in pod.containers
            ]  # fmt: skip
            assert any(each.get(port["targetPort"]) == port["port"] for each in offered), (name, port)
    for each in _kind(manifests, "StatefulSet"):
        template = each["spec"]["template"]["metadata"]["labels"]
        assert _matches(each["spec"]["selector"], template)
    for each in _kind(manifests, "PodDisruptionBudget"):
        chosen = {pod.set_name for pod in found if _matches(each["spec"]["selector"], pod.labels)}
        assert chosen == {each["metadata"]["name"]}
    for each in _kind(manifests, "PodMonitor"):
        assert all(_matches(each["spec"]["selector"], pod.labels) for pod in found)
    assert {manifest["metadata"].get("namespace", "pdtransfer") for manifest in manifests} == {"pdtransfer"}


def _admitted(manifests: list[Manifest], source: dict[str, str], target: Pod, port: int, namespace: str) -> bool:
    """Whether the policies let a pod of these labels reach a port of the target."""
    open_ports = {each["name"]: each["containerPort"] for container in target.containers for each in container["ports"]}
    for policy in _kind(manifests, "NetworkPolicy"):
        if not _matches(policy["spec"]["podSelector"], target.labels):
            continue
        for rule in policy["spec"].get("ingress", ()):
            ports: list[tuple[int, int]] = []
            for each in rule.get("ports", [{"port": 0, "endPort": 0xFFFF}]):
                first = open_ports.get(each["port"], each["port"])
                ports.append((first, each.get("endPort", first)))
            if not any(first <= port <= last for first, last in ports):
                continue
            for peer in rule["from"]:
                spaces = peer.get("namespaceSelector", {"matchLabels": {"kubernetes.io/metadata.name": "pdtransfer"}})
                if _matches(spaces, {"kubernetes.io/metadata.name": namespace}) and _matches(
                    peer.get("podSelector", {}), source
                ):
                    return True
    return False


@pytest.mark.parametrize("overlay", ["hosts", "groups"])
def test_policies_admit_to_each_port_who_needs_it_and_nobody_else(
    manifests: list[Manifest], configs: Configs, overlay: str
) -> None:
    of_role = {config.role: pod for pod, _, config in configs}
    sources: dict[str, tuple[dict[str, str], str]] = {
        role: (pod.labels, "pdtransfer") for role, pod in of_role.items()
    } | {
        "client": ({"pdtransfer-client": "true"}, "shop"),
        "stranger": ({"app.kubernetes.io/name": "pdtransfer"}, "shop"),
        "neighbour": ({}, "pdtransfer"),
        "monitor": ({}, "monitoring"),
    }
    grouped = {"decode"} if overlay == "groups" else set[str]()
    for pod, _, config in configs:
        expected = {_port(config.listen): {"monitor"}, 22: set[str]()}
        if isinstance(config, RouterConfig):
            expected[_port(config.listen)] = {"client", "monitor"}
        else:
            first, last = config.network.ports
            control = {"router", "decode"} if config.role == "prefill" else {"router"}
            workers = {"prefill", "decode"}
            expected |= {_port(config.bind): control, first: workers, last: workers, first - 1: set(), last + 1: set()}
            if config.role in grouped:
                expected = {port: who | grouped for port, who in expected.items()}
        for port, who in expected.items():
            admitted = {
                name for name, (labels, space) in sources.items() if _admitted(manifests, labels, pod, port, space)
            }
            assert admitted == who, (pod.name, port)


@pytest.mark.parametrize("overlay", [EVERYTHING])
def test_components_change_what_they_are_for(
    rendered: dict[str, list[Manifest]], configs: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(COMPONENTS) == {"admin", "cards", "hugepages", "monitor", "tls"}
    for pod, container, config in configs:
        if isinstance(config, RouterConfig):
            assert (config.admin, config.tls_cert is not None) == ("127.0.0.1:8001", True)
        else:
            assert config.device == "cuda"
            assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
            assert [each["name"] for each in container["volumeMounts"] if each["mountPath"] == "/dev/shm"] == ["shm"]
            assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod.spec["volumes"]
        if isinstance(config, DecodeConfig):
            pages = {key: value for key, value in container["resources"]["limits"].items() if "hugepages" in key}
            assert (config.huge_pages, list(pages)) == ("always", ["hugepages-2Mi"])
    # Without the limit, a pod that touches such a page is killed.
    plain = _configs(rendered["hosts"], tmp_path / "plain", monkeypatch)
    assert {config.huge_pages for *_, config in plain if isinstance(config, DecodeConfig)} == {"never"}
    [monitor] = _kind(rendered[EVERYTHING], "PodMonitor")
    assert [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]] == ["http"]


def test_secrets_are_made_once_and_follow_the_nodes_that_are_named(tmp_path: Path) -> None:
    script = tmp_path / "fleet-secrets"
    shutil.copy(KUBERNETES / "fleet-secrets", script)
    made, nodes = tmp_path / "secrets", ["router-0", "prefill-0=tcp://prefill-0.prefill:7101"]
    assert fleet_secrets(script, made, *nodes).returncode == 0
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    assert {path.stat().st_mode & 0o077 for path in made.iterdir()} == {0}
    assert fleet_secrets(script, made, *nodes, "prefill-1=tcp://prefill-1.prefill:7101").returncode == 0
    kept = ("router-0.key", "prefill-0.key", "api-keys", "admin-token")
    assert all((made / name).read_bytes() == before[name] for name in kept)
    assert len((made / "workers").read_text().splitlines()) == 2
    assert fleet_secrets(script, made, *nodes).returncode == 0
    assert {path.name: path.read_bytes() for path in made.iterdir() if path.name in before} == before


@pytest.mark.parametrize("node", ["routr-0", "prefill-0", "decode-0=7201", "../x", ""])
def test_a_node_without_a_role_or_an_endpoint_is_refused_before_anything_is_made(tmp_path: Path, node: str) -> None:
    script = tmp_path / "fleet-secrets"
    shutil.copy(KUBERNETES / "fleet-secrets", script)
    refused = fleet_secrets(script, tmp_path / "secrets", "router-0", node)
    assert (refused.returncode, f"{node}: is not router-N" in refused.stderr) == (2, True)
    assert not (tmp_path / "secrets").exists()


@pytest.mark.skipif(VALIDATE is None, reason="kubernetes-validate is missing: pip install kubernetes-validate")
def test_manifests_have_the_schemas_of_kubernetes(manifests: list[Manifest], tmp_path: Path) -> None:
    own = [each for each in manifests if each["apiVersion"].rpartition("/")[0] not in OF_OTHERS]
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump_all(own))
    ran = subprocess.run([str(VALIDATE), "--strict", file], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
