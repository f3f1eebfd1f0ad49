"""tools/venv says by its status whether packages cannot be had here: 3, or something is wrong: 1."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPO


def made(folder: Path, kind: str, requirement: str, **variables: str) -> tuple[int, str]:
    """Status and message of `tools/venv KIND` in a copy whose only requirement is this, without any index."""
    for name in ("tools", "tests/engines"):
        (folder / name).mkdir(parents=True)
    shutil.copy(REPO / "tools" / "venv", folder / "tools" / "venv")
    (folder / "tests" / "engines" / f"requirements-{kind}.txt").write_text(requirement)
    ran = subprocess.run(
        [folder / "tools" / "venv", kind],
        env=os.environ | {"PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"} | variables,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return ran.returncode, ran.stderr


def wheel(folder: Path, name: str, version: str) -> None:
    """A wheel of an empty package."""
    about = folder / "src" / name
    about.mkdir(parents=True)
    (about / f"{name}.py").touch()
    (about / "pyproject.toml").write_text(
        f'[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        f'[project]\nname = "{name}"\nversion = "{version}"\n'
    )
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=about, check=True, capture_output=True, timeout=120)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_packages_that_no_index_has_are_nothing_that_is_wrong(kind: str, tmp_path: Path) -> None:
    status, said = made(tmp_path, kind, "", PIP_FIND_LINKS="")
    assert (status, "No matching distribution found for uv" in said) == (3, True), said
    assert f"build/setup-{kind}.log" in said
    assert not (tmp_path / f".venv-{kind}" / ".stamp").exists()


@pytest.mark.full
def test_requirements_that_contradict_each_other_are_wrong(tmp_path: Path) -> None:
    links = tmp_path / "links"
    wheel(links, "torch", "2.13.0")
    status, said = made(tmp_path, "vllm", "torch==2.13.0\ntorch!=2.13.0\n", PIP_FIND_LINKS=str(links))
    assert (status, "and its requirements could not be installed" in said) == (1, True), said


def test_another_kind_is_refused(tmp_path: Path) -> None:
    status, said = made(tmp_path, "other", "")
    assert (status, "usage" in said) == (2, True), said


def test_an_environment_is_made_with_the_python_that_it_is_named_after(tmp_path: Path) -> None:
    status, said = made(tmp_path, "3.99", "")
    assert (status, "not 3.99" in said) == (1, True), said
    assert not (tmp_path / ".venv-3.99").exists()
