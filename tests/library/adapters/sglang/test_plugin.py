"""The plugin says at once where it cannot run, and SGLang finds it."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import pdtransfer.adapters.sglang as adapter
from pdtransfer.adapters.kit import versions

REPO = Path(__file__).parents[4]


def test_sglang_finds_it_by_its_entry_point() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["sglang.srt.plugins"]["pdtransfer"].partition(":")
    assert getattr(import_module(module), name) is adapter.plugin


def test_outside_sglang_it_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ImportError, match=r"SGLang cannot be imported here \(.*\): supported are 0\.5\.17, .*0\.5\.23"):
        adapter.plugin()


def has_sglang(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("sglang")
    fake.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", fake)


@pytest.mark.parametrize("found", ["0.5.16", "0.5.24", "0.6.0", "1.5.23", "dev"])
def test_another_sglang_is_refused_with_both_versions(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_sglang(found, monkeypatch)
    with pytest.raises(ImportError, match=f"found SGLang {found}, supported are 0.5.17, .*0.5.23"):
        adapter.plugin()


@pytest.mark.parametrize(("found", "tested"), [("0.5.17", True), ("0.5.18", False), ("0.5.19+cpu", True)])
def test_a_version_between_that_was_not_tested_is_named(
    found: str, tested: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_sglang(found, monkeypatch)
    versions.check_version("adapter", "sglang", "SGLang", ((0, 5, 17), (0, 5, 19)))
    warning = "adapter: SGLang 0.5.18 has not been tested, supported are 0.5.17, 0.5.19"
    assert [record.getMessage() for record in caplog.records] == ([] if tested else [warning])
