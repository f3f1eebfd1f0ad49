"""The KV connector for vLLM: prefill and decode engines hand requests over through pdtransfer's clients.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PDTransferConnector",
        "kv_connector_module_path": "pdtransfer.adapters.vllm", "kv_role": "kv_producer"}'

vLLM loads PDTransferConnector by this name; docs/vllm.md has the rest. Outside vLLM, and in a vLLM that it was not
written for, asking for it raises ImportError. The other modules need no vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..kit.versions import VLLM, check_version

__all__ = ["PDTransferConnector"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version(__name__, "vllm", "vLLM", VLLM)
    return getattr(import_module(f"{__name__}.connector"), name)
