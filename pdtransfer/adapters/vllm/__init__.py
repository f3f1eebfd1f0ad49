"""The KV connector for vLLM: prefill and decode engines hand requests over through pdtransfer's clients.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PDTransferConnector",
        "kv_connector_module_path": "pdtransfer.adapters.vllm", "kv_role": "kv_producer"}'

vLLM loads PDTransferConnector by this name; docs/vllm.md has the rest. Outside vLLM, and in a vLLM that it was not
written for, asking for it raises ImportError. The other modules need no vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

VERSIONS = (0, 26), (0, 32)  # of vLLM: the first and the last minor version whose interface this package speaks

__all__ = ["PDTransferConnector"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version(_installed())
    return getattr(import_module(f"{__name__}.connector"), name)


def check_version(found: str) -> None:
    """Raises ImportError, with the found and the supported versions, for a vLLM whose interface is not known."""
    first, last = (".".join(map(str, each)) for each in VERSIONS)
    numbers = found.split("+", maxsplit=1)[0].split(".")[:2]
    if not all(number.isdigit() for number in numbers) or not VERSIONS[0] <= tuple(map(int, numbers)) <= VERSIONS[1]:
        raise ImportError(f"{__name__}: found vLLM {found}, supported are {first} to {last}")


def _installed() -> str:
    first, last = (".".join(map(str, each)) for each in VERSIONS)
    try:
        return str(import_module("vllm").__version__)
    except ImportError as error:
        raise ImportError(
            f"{__name__} is a part of vLLM's engines, and vLLM cannot be imported here ({error}): "
            f"supported are {first} to {last}"
        ) from None
