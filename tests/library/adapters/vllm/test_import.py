"""The connector says at once where it cannot run."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import pdtransfer.adapters.vllm as adapter
from pdtransfer.adapters.kit import versions


def test_outside_vllm_the_connector_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"vLLM cannot be imported here \(.*\): supported are 0\.26, .*, 0\.33"):
        _ = adapter.PDTransferConnector


@pytest.mark.parametrize("found", ["0.25.1", "0.34.0", "1.26.0", "dev"])
def test_another_vllm_is_refused_with_both_versions(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("vllm")
    fake.__version__ = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", fake)
    with pytest.raises(ImportError, match=f"found vLLM {found}, supported are 0.26, .*, 0.33"):
        _ = adapter.PDTransferConnector


@pytest.mark.parametrize("found", ["0.26.0", "0.29.3", "0.32.0+cpu", "0.33.1rc1"])
def test_known_versions_pass(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("vllm")
    fake.__version__ = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", fake)
    versions.check_version(adapter.__name__, "vllm", "vLLM", versions.VLLM)


def test_it_has_no_other_name() -> None:
    with pytest.raises(AttributeError, match="PdConnector"):
        _ = adapter.PdConnector
