"""The pods that deploy/kubernetes makes: rendered by kustomize, their volumes as directories, their settings read."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pdtransfer.bus.keys import generate
from pdtransfer.serve.commands import cli
from tests.support.paths import REPO

KUBERNETES = REPO / "deploy" / "kubernetes"
COMPONENTS = tuple(sorted(path.name for path in (KUBERNETES / "components").iterdir()))
NODES = {
    "hosts": [
        *("router-0", "router-1"),
        *(f"prefill-{i}=tcp://prefill-{i}.prefill:7101" for i in range(2)),
        *(f"decode-{i}=tcp://decode-{i}.decode:7201" for i in range(2)),
    ],
    "single": ["router-0", "prefill-0=tcp://127.0.0.1:7101", "decode-0=tcp://127.0.0.1:7201"],
    "groups": [
        *("router-0", "router-1"),
        *(f"prefill-{i}=tcp://prefill-{i}.prefill:7101" for i in range(2)),
        *("decode-0=tcp://decode-0.decode:7201", "decode-0-1"),
    ],
}
ADDRESS = "10.0.0.7"  # of every pod
SOCKETS = "/run/pdtransfer"  # stays as it is: a socket's path has a bounded length

Manifest = dict[str, Any]


def kustomize() -> list[str]:
    """The command that renders a directory, empty without one."""
    if found := shutil.which("kustomize"):
        return [found, "build"]
    return [found, "kustomize"] if (found := shutil.which("kubectl")) else []


def fleet_secrets(script: Path, made: Path, *nodes: str) -> subprocess.CompletedProcess[str]:
    """Runs fleet-secrets with a `pdtransfer keygen` that takes new keys from a store, which is quick."""
    store = Path(tempfile.mkdtemp(dir=script.parent))
    for name in {node.partition("=")[0] for node in nodes} - {""}:
        if "/" not in name:
            generate(store / name)
    tool = store / "pdtransfer"
    tool.write_text(f'#!/bin/sh\n[ "$1" = keygen ] && cp {store}/"$2".key {store}/"$2".pub .\n')
    tool.chmod(0o755)
    environment = os.environ | {"PATH": f"{store}:{os.environ['PATH']}"}
    return subprocess.run(
        [script, made, *nodes], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def render(place: Path, overlay: str, *, components: bool = False) -> list[Manifest]:
    """What an overlay of a copy at `place` makes, with all components or with none."""
    directory = place / "overlays" / overlay
    if components:
        file = directory / "kustomization.yaml"
        listed = ", ".join(f"../../components/{each}" for each in COMPONENTS)
        text, count = re.subn(r"^components: \[\]", f"components: [{listed}]", file.read_text(), flags=re.MULTILINE)
        assert count == 1
        file.write_text(text)
    ran = subprocess.run([*kustomize(), directory], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return list(yaml.safe_load_all(ran.stdout))


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of a set, as its template says."""

    name: str
    kind: str
    set_name: str
    service: str
    template: Manifest
    labels: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def spec(self) -> Manifest:
        return self.template["spec"]

    @property
    def containers(self) -> list[Manifest]:
        return self.spec["containers"]


def pods(manifests: list[Manifest]) -> list[Pod]:
    """Every pod, with the name and the labels that its controller gives it."""
    found: list[Pod] = []
    for manifest in manifests:
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "StatefulSet":
            template, service = manifest["spec"]["template"], manifest["spec"]["serviceName"]
            labels = template["metadata"]["labels"]
            found += [
                Pod(f"{name}-{i}", manifest["kind"], name, service, template, labels) for i in range(_count(manifest))
            ]
        elif manifest["kind"] == "LeaderWorkerSet":
            templates = manifest["spec"]["leaderWorkerTemplate"]
            for group in range(_count(manifest)):
                for index in range(templates["size"]):
                    template = templates["workerTemplate" if index else "leaderTemplate"]
                    own = {"group-index": str(group), "worker-index": str(index)}
                    labels = template["metadata"]["labels"] | {
                        f"leaderworkerset.sigs.k8s.io/{key}": value for key, value in own.items()
                    }
                    pod = f"{name}-{group}" + (f"-{index}" if index else "")
                    found.append(Pod(pod, manifest["kind"], name, name, template, labels))
    return found


def _count(manifest: Manifest) -> int:
    return manifest["spec"]["replicas"]


def variables(pod: Pod, container: Manifest) -> dict[str, str]:
    """A container's environment, with $(NAME) put in."""
    found: dict[str, str] = {}
    if pod.kind == "LeaderWorkerSet":
        found["LWS_LEADER_ADDRESS"] = re.sub(r"^(\w+-\d+).*", rf"\1.{pod.service}", pod.name)
    for each in container.get("env", ()):
        if (value := each.get("value")) is None:
            path = each["valueFrom"]["fieldRef"]["fieldPath"]
            label = re.fullmatch(r"metadata\.labels\['(.*)'\]", path)
            value = pod.labels[label[1]] if label else {"metadata.name": pod.name, "status.podIP": ADDRESS}[path]
        found[each["name"]] = _expanded(value, found)
    return found


def _expanded(text: str, known: dict[str, str]) -> str:
    """As the kubelet does it: a name that is not there stays as it is, which none here should."""
    assert set(re.findall(r"\$\((\w+)\)", text)) <= known.keys(), text
    return re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], text)


class Root:
    """A pod's files below a directory of its own, each volume once for all its containers."""

    def __init__(self, path: Path, pod: Pod, manifests: list[Manifest]) -> None:
        self.path, self._pod, self._volumes = path, pod, path / "volumes"
        stored = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}
        for volume in pod.spec["volumes"]:
            place = self._volumes / volume["name"]
            place.mkdir(parents=True)
            sources = volume.get("projected", {}).get("sources", [volume])
            for source in sources:
                if (secret := source.get("secret")) is not None:
                    name = secret.get("secretName") or secret["name"]
                    made = {"tls.crt": "", "tls.key": ""} if name == "router-tls" else stored["Secret", name]["data"]
                    _write(place, {key: base64.b64decode(value) for key, value in made.items()}, 0o440)
                elif (settings := source.get("configMap")) is not None:
                    made = stored["ConfigMap", settings["name"]]["data"]
                    _write(place, {key: value.encode() for key, value in made.items()}, 0o444)
                else:
                    assert "emptyDir" in source, source

    def moved(self, container: Manifest, text: str) -> str:
        """The text with each path in a mount led to where its volume is."""
        places: dict[str, str] = {}
        for each in container["volumeMounts"]:
            if each["mountPath"] == SOCKETS:
                continue
            part = each.get("subPath") or _expanded(each.get("subPathExpr", ""), variables(self._pod, container))
            places[each["mountPath"]] = str(self._volumes / each["name"] / part)
        longest_first = "|".join(map(re.escape, sorted(places, key=len, reverse=True)))
        return re.sub(rf"(?<![\w.-])({longest_first})(?![\w.-])", lambda found: places[found[1]], text)

    def initialise(self) -> None:
        """Runs the commands of the init containers."""
        for container in self._pod.spec["initContainers"]:
            command = [self.moved(container, word) for word in container["command"]]
            subprocess.run(command, env=os.environ | variables(self._pod, container), check=True, timeout=60)

    def config(self, container: Manifest, patch: pytest.MonkeyPatch) -> Any:
        """The settings with which the container's daemon would start."""
        seen: list[Any] = []

        def run(config: Any) -> int:
            seen.append(config)
            return 0

        fake = SimpleNamespace(run=run)
        for module in ("worker.daemon", "router.process"):
            patch.setitem(sys.modules, f"pdtransfer.serve.{module}", fake)
        environment = {name: self.moved(container, value) for name, value in variables(self._pod, container).items()}
        words = [self.moved(container, word) for word in container["args"]]
        if "command" in container:
            words, environment = self._through_shell(container, words, environment)
        with patch.context() as within:
            for name, value in environment.items():
                within.setenv(name, value)
            assert cli.main(words) == 0
        [config] = seen
        return config

    def _through_shell(
        self, container: Manifest, words: list[str], environment: dict[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """What the container's command hands to `pdtransfer`."""
        tool = self.path / "bin" / "pdtransfer"
        tool.parent.mkdir()
        tool.write_text('#!/bin/sh\nenv -0\nprintf "=arguments\\0"\nprintf "%s\\0" "$@"\n')
        tool.chmod(0o755)
        command = [self.moved(container, word) for word in container["command"]]
        given = environment | {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
        ran = subprocess.run([*command, *words], env=given, capture_output=True, text=True, check=True, timeout=60)
        before, _, after = ran.stdout.partition("=arguments\0")
        set_now = dict(each.split("=", 1) for each in before.split("\0")[:-1])
        del set_now["PATH"]
        return after.split("\0")[:-1], set_now


def _write(place: Path, files: dict[str, bytes], mode: int) -> None:
    for name, content in files.items():
        (place / name).write_bytes(content)
        (place / name).chmod(mode)
