"""What SGLang makes in different places of one process, and both the hooks and the manager need."""

from __future__ import annotations

from typing import Any

from ..kit.cache_memory import CacheMemory, Extent

memory: CacheMemory | None = None  # of the KV cache, once SGLang has allocated it
extent: Extent | None = None  # where the cache is, if host memory has to be set aside beside it
identity: dict[str, object] | None = None  # what peers compare of this rank, once it runs, as `shown` makes it
decode: Any = None  # the manager, where this process decodes: it takes what bootstrap servers answer
