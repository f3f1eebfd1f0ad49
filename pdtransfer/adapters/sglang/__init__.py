"""The transfer backend for SGLang: prefill and decode engines hand requests over through pdtransfer's clients.

    python -m sglang.launch_server --disaggregation-mode decode --disaggregation-transfer-backend pdtransfer ...

SGLang finds `plugin` by the entry point sglang.srt.plugins; docs/sglang.md has the rest. All modules but
`backend` and `hooks` can be imported without SGLang.
"""

from __future__ import annotations

from importlib import import_module

from ..kit.versions import SGLANG, check_version


def plugin() -> None:
    """Adds the backend to SGLang, in each of its processes. Raises ImportError for a version that is not known."""
    check_version(__name__, "sglang", "SGLang", SGLANG)
    import_module(f"{__name__}.hooks").register()
