"""The plugin says at once where it cannot run, and SGLang finds it."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import pdtransfer.adapters.sglang as adapter

REPO = Path(__file__).parents[4]


def test_sglang_finds_it_by_its_entry_point() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["sglang.srt.plugins"]["pdtransfer"].partition(":")
    assert getattr(import_module(module), name) is adapter.plugin


def test_outside_sglang_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ImportError, match=r"SGLang cannot be imported here \(.*\): supported is 0\.5\.23"):
        adapter.plugin()


@pytest.mark.parametrize("found", ["0.5.22", "0.5.24", "0.6.0", "1.5.23", "dev"])
def test_another_sglang_is_refused_with_both_versions(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("sglang")
    fake.__version__ = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", fake)
    with pytest.raises(ImportError, match=f"found SGLang {found}, supported is 0.5.23"):
        adapter.plugin()
