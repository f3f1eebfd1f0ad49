"""Hands a prompt's KV cache from prefill to decode, written straight into the memory that decode reads.

Every name that an engine needs to embed a client is importable from here. They come from `pdtransfer.client.api`, which
is loaded at the first use of one, so that `import pdtransfer` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .client.api import *
else:

    def __getattr__(name: str) -> object:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from .client import api

        if name == "__all__":
            return [*api.__all__, "__version__"]
        if name not in api.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, getattr(api, name))


def __dir__() -> list[str]:
    from .client import api

    return sorted({*globals(), *api.__all__})
