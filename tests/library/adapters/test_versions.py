"""Adapters say at once where they cannot run. What a version has: its number decides, and a name proves it."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import import_module

import pytest

from pdtransfer.adapters import sglang, vllm
from pdtransfer.adapters.kit import versions
from pdtransfer.adapters.kit.versions import Since, capabilities
from tests.library.adapters.stand_ins import stand_in
from tests.support.paths import REPO

TABLE = {"old": Since("0.5.9", "logging:Logger.info"), "new": Since("0.5.20")}
LOADS = {"vllm": lambda: vllm.PDTransferConnector, "sglang": sglang.plugin}
SUPPORTED = {"vllm": r"0\.26, .*, 0\.33", "sglang": r"0\.5\.17, .*0\.5\.23"}
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}


def has(package: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, {package: {"__version__": version}})


@pytest.mark.parametrize("package", ENGINES)
def test_outside_its_engine_an_adapter_names_what_is_missing(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    text = rf"{ENGINES[package]} cannot be imported here \(.*\): supported are {SUPPORTED[package]}"
    with pytest.raises(ImportError, match=text):
        LOADS[package]()


@pytest.mark.parametrize(
    ("package", "found"),
    [("vllm", found) for found in ("0.25.1", "0.34.0", "1.26.0", "dev")]
    + [("sglang", found) for found in ("0.5.16", "0.5.24", "0.6.0", "1.5.23", "dev")],
)
def test_another_version_is_refused_with_both(package: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has(package, found, monkeypatch)
    with pytest.raises(ImportError, match=f"found {ENGINES[package]} {found}, supported are {SUPPORTED[package]}"):
        LOADS[package]()


@pytest.mark.parametrize("found", ["0.26.0", "0.29.3", "0.32.0+cpu", "0.33.1rc1"])
def test_known_versions_pass(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has("vllm", found, monkeypatch)
    versions.check_version(vllm.__name__, "vllm", "vLLM", versions.VLLM)


def test_sglang_finds_its_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["sglang.srt.plugins"]["pdtransfer"].partition(":")
    assert getattr(import_module(module), name) is sglang.plugin


def test_the_connector_has_no_other_name() -> None:
    with pytest.raises(AttributeError, match="PdConnector"):
        _ = vllm.PdConnector


@pytest.mark.parametrize(("found", "tested"), [("0.5.17", True), ("0.5.18", False), ("0.5.19+cpu", True)])
def test_a_version_between_that_was_not_tested_is_named(
    found: str, tested: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has("sglang", found, monkeypatch)
    versions.check_version("adapter", "sglang", "SGLang", ((0, 5, 17), (0, 5, 19)))
    warning = "adapter: SGLang 0.5.18 has not been tested, supported are 0.5.17, 0.5.19"
    assert [record.getMessage() for record in caplog.records] == ([] if tested else [warning])


@pytest.mark.parametrize(
    ("found", "expected"),
    [("0.5.8", set()), ("0.5.9", {"old"}), ("0.5.20+cpu", {"old", "new"}), ("0.5.100.post1", {"old", "new"})],
)
def test_the_number_decides(found: str, expected: set[str]) -> None:
    assert capabilities("an engine", TABLE, found) == expected


def test_a_name_that_the_number_promises_and_the_engine_lacks_ends_the_import() -> None:
    for proof in ("logging:Log.x", "logging.none:Log.x"):
        text = f"an engine 0.6.1: has no {proof}, which 0.6 is the first to have"
        with pytest.raises(ImportError, match=f"^{re.escape(text)}$"):
            capabilities("an engine", {"wrong": Since("0.6", proof)}, "0.6.1")
