"""What the hooks and the manager of one process share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

from ...environment import sglang_settings
from ...errors import ConfigError
from ..kit.cache_memory import CacheMemory, Extent
from ..kit.settings import Settings

memory: CacheMemory | None = None  # of the KV cache, once SGLang has allocated it
extent: Extent | None = None  # where the cache is, if host memory has to be set aside beside it
host_tensors = 1  # of equal sizes, that SGLang makes its host pool of
host_memory: list[torch.Tensor] = []  # for those of them that it has not made yet
draft_runners: Sequence[Any] = ()  # SGLang's, of draft models whose caches it allocates after the model's
draft_scope: Callable[[], AbstractContextManager[object]] = nullcontext  # in which it does so
pool_config: Any = None  # from which it derives the sizes of all these caches
first_layer = 0  # of this pipeline stage's, among those of the model
identity: dict[str, object] | None = None  # what peers compare of this rank, once it runs, as `shown` makes it
decode: Any = None  # the manager, where this process decodes: it takes what bootstrap servers answer


def settings() -> Settings:
    """The settings in PDTRANSFER_SGLANG: JSON, or the path of a file that has it. Raises ConfigError."""
    where, text = "PDTRANSFER_SGLANG", sglang_settings().strip()
    try:
        if text and not text.startswith("{"):
            where = f"{where} = {text}"
            with open(text, encoding="utf-8") as file:
                text = file.read()
        given: Any = json.loads(text or "{}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: must be a JSON object")
    return Settings.of(cast("dict[str, Any]", given), where)
