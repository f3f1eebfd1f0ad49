"""What holds the house together: the wheel's content, the layers, the examples in deploy/."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pdtransfer
from pdtransfer.bus.keys import Address, AllowList, KeyPair
from pdtransfer.serve.commands import cli
from tests.support.http_answers import answering
from tests.support.paths import REPO

PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
CONTRACTS = {contract["id"]: contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"]}


def shared_files(folder: str) -> set[str]:
    return {
        path.relative_to(REPO).as_posix()
        for path in (REPO / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_carries_package_kernels_and_protocol_and_no_tests(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    built = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(next(name for name in names if name.endswith("/entry_points.txt"))).decode()
        about = Parser().parsestr(archive.read(next(name for name in names if name.endswith("/METADATA"))).decode())
    shared = shared_files("kernels") | shared_files("proto")
    assert any(name.startswith("kernels/") for name in shared)
    assert {f"pdtransfer/_share/{name}" for name in shared} <= names
    assert {path.relative_to(REPO).as_posix() for path in (REPO / "pdtransfer").rglob("*.py")} <= names
    assert all(name.startswith(("pdtransfer/", f"pdtransfer-{pdtransfer.__version__}.dist-info/")) for name in names)
    assert not any("__pycache__" in name for name in names)
    assert "pdtransfer = pdtransfer.__main__:main" in entry_points
    assert "pdtransfer/py.typed" in names
    assert f"pdtransfer-{pdtransfer.__version__}.dist-info/licenses/LICENSE" in names
    assert (about["License-Expression"], about["Description-Content-Type"]) == ("Apache-2.0", "text/markdown")
    assert set(about.get_all("Provides-Extra", [])) == {
        "cuda", "daemons", "dev", "dns", "mooncake", "otel", "test", "text", "transformers",
    }  # fmt: skip


def test_only_install_commands_that_work_in_a_checkout_are_printed() -> None:
    extras = set(PYPROJECT["project"]["optional-dependencies"])
    texts = [*(REPO / "pdtransfer").rglob("*.py"), *(REPO / "lab").rglob("*.py"), *(REPO / "examples").glob("*.py")]
    called = r"""pip_install\(['"](\w+)['"]\)|pip install '\.\[(\w+)\]'"""
    named = {extra for path in texts for found in re.findall(called, path.read_text()) for extra in found if extra}
    assert named == extras - {"dev", "test"}
    assert not any("pdtransfer[" in path.read_text() for path in texts)


def test_what_make_starts_keeps_its_bytecode() -> None:
    asked = ["make", "--silent", "--no-print-directory", '--eval=told:; @echo "<$$PYTHONDONTWRITEBYTECODE>"', "told"]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    printed = subprocess.run(asked, cwd=REPO, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert printed.stdout == "<>\n"


def test_the_base_install_has_what_the_clients_need_and_no_other_package() -> None:
    named = {re.match(r"[\w-]+", each)[0] for each in PYPROJECT["project"]["dependencies"]}
    assert named == {"numpy", "pyzmq", "msgpack", "msgspec", "uvloop"}
    daemons = CONTRACTS["client"]["forbidden_modules"]
    extra = PYPROJECT["project"]["optional-dependencies"]["daemons"]
    imported = {re.match(r"[\w-]+", each)[0].replace("-", "_") for each in extra}
    imported = imported - {"python_json_logger"} | {"pythonjsonlogger"}  # as it is imported
    assert imported | {"opentelemetry", "dns"} == set(daemons)


def test_core_contract_names_every_package_below_the_shells() -> None:
    layers = [set(re.findall(r"\w+", layer)) for layer in CONTRACTS["houses"]["layers"]]
    shells = next(index for index, layer in enumerate(layers) if "environment" in layer)
    below = {f"pdtransfer.{name}" for layer in layers[shells + 1 :] for name in layer}
    assert below <= set(CONTRACTS["core"]["source_modules"])
    assert {"pdtransfer.handoff", "pdtransfer.layout", "pdtransfer.wire"} <= below


def linted(root: Path) -> str:
    """What import-linter says of the package in `root`."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", program, "--no-cache", "--no-logo"]
    environment = os.environ | {"PYTHONPATH": str(root / "lab")}
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=False
    ).stdout


# A line more in a module, and what import-linter says of it.
BREAKS = [
    ("handoff/slot_allocator.py", "import time", "pdtransfer.handoff is not allowed to import time"),
    ("handoff/decode/prefill_peers.py", "import zmq", "pdtransfer.handoff is not allowed to import zmq"),
    ("layout/layout.py", "from ..wire import Message", "pdtransfer.layout is not allowed to import pdtransfer.wire"),
    ("client/labels.py", "import rich", "pdtransfer.client is not allowed to import rich"),
    ("errors.py", "from .serve import settings", "pdtransfer.errors is not allowed to import pdtransfer.serve"),
    ("client/labels.py", "from ..serve import sampling", "pdtransfer.client is not allowed to import pdtransfer.serve"),
    ("serve/sampling.py", "from .router import router", "sampling is not allowed to import pdtransfer.serve.router"),
    ("hisparse/coordinator.py", "import torch", "pdtransfer.hisparse.coordinator is not allowed to import torch"),
    (
        "../lab/pdtransfer_lab/models/tokens.py",
        "from pdtransfer.bus import Bus",
        "pdtransfer_lab.models.tokens -> pdtransfer.bus",
    ),
    (
        "serve/settings/worker.py",
        "from ..engines.stamp.factory import create",
        "pdtransfer.serve.settings.worker -> pdtransfer.serve.engines.stamp.factory",
    ),
    (
        "serve/settings/worker.py",
        "from pdtransfer_lab.models.factory import create",
        "pdtransfer is not allowed to import pdtransfer_lab",
    ),
    ("novelty.py", '"""A module that has no place yet."""', "- pdtransfer.novelty"),
]


@pytest.mark.slow
def test_layer_contracts_catch_what_they_forbid(tmp_path: Path) -> None:
    """All in one copy of the tree, of which the linter says nothing without them (`make check`)."""
    for package in ("pdtransfer", "lab"):
        shutil.copytree(REPO / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    for module, line, _ in BREAKS:
        changed = tmp_path / "pdtransfer" / module
        changed.write_text((changed.read_text() if changed.exists() else "") + f"\n{line}\n")
    output = linted(tmp_path)
    assert [complaint for _, _, complaint in BREAKS if complaint not in output] == []


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_deployed_unit_starts_a_daemon_that_its_example_settings_satisfy(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = (REPO / "deploy" / f"pdtransfer-{role}.service").read_text()
    program, *arguments = shlex.split(re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)[0])
    assert Path(program).name == "pdtransfer"
    for name in re.findall(r"^Environment=(PDTRANSFER_\w+)=(.*)$", unit, re.MULTILINE):
        monkeypatch.setenv(*name)
    at = arguments.index("--config") + 1
    assert Path(arguments[at]).name == "pdtransfer.toml"
    arguments[at] = str(REPO / "deploy" / "pdtransfer.toml")
    seen: list[Any] = []
    module = "serve.router.process" if role == "router" else "serve.worker.daemon"
    fake = SimpleNamespace(run=lambda given: seen.append(given) or 0)
    monkeypatch.setitem(sys.modules, f"pdtransfer.{module}", fake)
    assert cli.main(arguments) == 0
    assert seen[0].role == role
    for directory in re.findall(r"^RuntimeDirectory=(.*)$", unit, re.MULTILINE):
        assert seen[0].socket_directory == Path("/run") / directory


def test_prometheus_scrapes_where_the_example_settings_listen() -> None:
    settings = tomllib.loads((REPO / "deploy" / "pdtransfer.toml").read_text())
    listeners = {settings[role]["listen"] for role in ("prefill", "decode", "router")}
    targets = re.findall(r'targets: \["(.*?)"\]', (REPO / "deploy" / "prometheus.yml").read_text())
    assert set(targets) == listeners


def test_image_copies_only_what_is_there_and_is_not_ignored() -> None:
    kept = {line[1:] for line in (REPO / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [
        name
        for line in re.findall(r"^COPY (?!--from)(.*)$", (REPO / "Dockerfile").read_text(), re.MULTILINE)
        for name in line.split()[:-1]
    ]
    assert {
        name.replace("[s]", "s").replace("image/install", "image").replace("image/sbom.py", "image") for name in copied
    } == kept
    assert all((REPO / name).exists() for name in copied if "[" not in name)


def test_image_is_healthy_once_its_daemon_reports_that_it_is_ready() -> None:
    command = [sys.executable, REPO / "deploy" / "healthy"]
    with answering(lambda path, _: (200 if path == "/ready" else 503, b"")) as url:
        urls = [f"{url}/{path}" for path in ("ready", "health")]
        asked = [subprocess.run(command, env={"HEALTH_URL": each}, timeout=60, check=False) for each in urls]
    nobody = subprocess.run(command, env={"HEALTH_URL": urls[0]}, timeout=60, check=False)
    assert [each.returncode for each in (*asked, nobody)] == [0, 1, 1]


def _composed() -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Each worker and router of the compose file: its name, its command line, and what its environment sets."""
    text = (REPO / "deploy" / "compose.yaml").read_text()
    shared: dict[str, dict[str, str]] = {}
    for name, lines in re.findall(r"^x-\w+: &(\w+)\n((?:  .*\n)+)", text, re.MULTILINE):
        inherited = re.findall(r"<<: \*(\w+)", lines)
        lines = re.sub(r"\$\{\w+-([^}]*)\}", r"\1", lines)  # what compose takes where the environment says nothing
        settings = dict(re.findall(r"^  (PDTRANSFER_\w+): (.*)$", lines, re.MULTILINE))
        shared[name] = {key: value for each in inherited for key, value in shared.get(each, {}).items()} | settings
    for command, anchor in re.findall(r"command: \[(.*)\]\n +environment: \*(\w+)", text):
        words = [word.strip(' "') for word in command.split(",")]
        yield words[words.index("--node") + 1], words, shared[anchor]


@pytest.mark.slow
def test_composed_nodes_start_daemons_with_the_keys_and_names_that_fleet_keys_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    text = (REPO / "deploy" / "compose.yaml").read_text()
    nodes = re.findall(r"^      - (router|[\w-]+=tcp://.*)$", text, re.MULTILINE)
    for node in nodes:
        (keys / node.partition("=")[0]).mkdir(parents=True)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, line in {"pdtransfer": f'exec {sys.executable} -m pdtransfer "$@"', "chown": ":"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    command = [REPO / "deploy" / "fleet-keys", keys, *nodes]
    for _ in range(2):  # the second time there is nothing to make
        subprocess.run(command, env=os.environ | {"PATH": path}, cwd=REPO, timeout=120, check=True)
    publics = {path.name: KeyPair.read(path / "node.key").public for path in keys.iterdir()}
    seen: dict[str, list[Any]] = {}
    fake = SimpleNamespace(run=lambda given: seen[given.node].append(given) or 0)
    for module in ("serve.worker.daemon", "serve.router.process"):
        monkeypatch.setitem(sys.modules, f"pdtransfer.{module}", fake)
    for name, words, environment in _composed():
        seen.setdefault(name, [])
        with monkeypatch.context() as patch:
            for key, value in environment.items():
                patch.setenv(key, value.replace("/keys", str(keys / name)))
            assert cli.main([word.replace("/keys", str(keys / name)) for word in words]) == 0
    # A worker in either profile, and what both routers are.
    assert {name: len(given) for name, given in seen.items()} == dict.fromkeys(publics, 2) | {"router": 1}
    for name, given in seen.items():
        for config in given:
            assert KeyPair.read(config.key).public == publics[name]
            allowed = AllowList.read(config.allow)
            assert {allowed.entry(public) for public in publics.values()} == {
                (each, frozenset({each.partition("-")[0]})) for each in publics
            }
    [router] = seen["router"]
    for node in nodes[1:]:
        name, _, endpoint = node.partition("=")
        role = name.partition("-")[0]
        assert f"{publics[name]}@{endpoint}" in getattr(router, role)
        for worker in seen[name]:
            assert endpoint == f"tcp://{name}:{Address.parse(worker.bind).port_first}"
            assert re.search(rf"aliases: \[{re.escape(worker.advertise)}\]", text), worker.advertise


def test_the_composed_prometheus_names_each_daemon_as_it_answers_to() -> None:
    """A daemon answers requests for its own names alone."""
    text = (REPO / "deploy" / "monitoring" / "prometheus.yml").read_text()
    hosts = {each.partition(":")[0] for each in re.findall(r'"([\w-]+:\d+)"', text)}
    answered: dict[str, set[str]] = {}
    for name, words, _ in _composed():
        given = {word for flag, word in pairwise(words) if flag == "--allowed-hosts"}
        answered[name] = answered.get(name, given) & given
    assert hosts == {"router", "prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert all(host in answered[host] for host in hosts), answered
