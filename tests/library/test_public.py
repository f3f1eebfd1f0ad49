"""The public face of the package: which names there are, what importing them costs, and that it runs without torch."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import pdtransfer
from pdtransfer.client import api as client
from tests.support.paths import REPO

CLIENT_NEEDS = {"msgpack", "msgspec", "numpy", "pdtransfer", "uvloop", "zmq"}


def python(*arguments: str, absent: set[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python, and all Python processes that it starts, as if these modules were not installed."""
    (directory / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({sorted(absent)!r}))\n")
    environment = os.environ | {"PYTHONPATH": f"{directory}{os.pathsep}{REPO}"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, cwd=REPO, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip


def pdt(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """The command, on a host without torch."""
    return python("-m", "pdtransfer", *arguments, absent={"torch"}, directory=directory)


def test_every_public_name_is_there_and_is_the_clients() -> None:
    assert {*client.__all__, "__version__"} == set(pdtransfer.__all__)
    for name in client.__all__:
        assert getattr(pdtransfer, name) is getattr(client, name)
    assert set(pdtransfer.__all__) <= set(dir(pdtransfer))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = pdtransfer.no_such_name  # pyright: ignore


def _documented(value: Any) -> list[tuple[str, Any]]:
    """A public class or function, and the methods and properties of the class that are public."""
    if not inspect.isclass(value):
        return [(value.__name__, value)] if isinstance(value, FunctionType) else []
    own = [
        (f"{value.__name__}.{name}", member)
        for base in value.__mro__
        if base.__module__.startswith("pdtransfer.")
        for name, member in vars(base).items()
        if not name.startswith("_") and isinstance(member, FunctionType | property | classmethod)
    ]
    return [(value.__name__, value), *own]


def test_every_public_name_is_documented() -> None:
    lacking = [
        name
        for public in client.__all__
        for name, value in _documented(getattr(client, public))
        if not inspect.getdoc(value)
    ]
    assert lacking == []


def test_importing_the_package_imports_nothing_else() -> None:
    script = "import sys, pdtransfer; print(*[name for name in sys.modules if name.startswith('pdtransfer')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["pdtransfer"]


@pytest.mark.slow
def test_a_room_lands_with_what_the_client_needs_and_no_other_package(tmp_path: Path) -> None:
    absent = set(packages_distributions()) - CLIENT_NEEDS
    assert {"torch", "cyclopts", "aiohttp", "prometheus_client", "rich"} <= absent
    done = python("examples/embed.py", absent=absent, directory=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "every byte is where it belongs" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("cyclopts", ["keygen", "d0"]),
        ("aiohttp", ["router", "--listen", "127.0.0.1:0"]),
        ("prometheus_client", ["router", "--listen", "127.0.0.1:0"]),
        ("rich", ["doctor"]),
    ],
)
def test_a_command_without_a_package_of_the_daemons_reports_how_to_install_it(
    package: str, command: list[str], tmp_path: Path
) -> None:
    done = python("-m", "pdtransfer", *command, absent={package}, directory=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"pdtransfer: {package} is not installed: pip install '.[daemons]'\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["pdtransfer.serve.commands.cli", "pdtransfer.serve.router.process", "pdtransfer.serve.worker.daemon"]
)
def test_commands_and_daemons_import_without_torch(module: str, tmp_path: Path) -> None:
    done = python("-c", f"import {module}", absent={"torch"}, directory=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "what"),
    [
        (
            ["prefill", "--model", "reference"],
            "engine = 'pdtransfer_lab.models.factory:create': torch is not installed",
        ),
        (["bench", "hisparse"], "torch is not installed"),
    ],
)
def test_what_needs_torch_reports_in_one_line_how_to_install_it(command: list[str], what: str, tmp_path: Path) -> None:
    done = pdt(*command, directory=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"pdtransfer: {what}: pip install '.[transformers]'\n"


@pytest.mark.slow
def test_doctor_without_torch_misses_nothing_and_names_what_installs_it(tmp_path: Path) -> None:
    done = pdt("doctor", "--json", directory=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    findings = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    assert (findings["torch"]["state"], findings["torch"]["mend"]) == ("warn", "pip install '.[transformers]'")
    assert findings["memory"]["state"] == "ok"
