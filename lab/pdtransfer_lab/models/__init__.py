"""The reference model: a small engine with bitwise reproducible results, and a deep variant at real dimensions."""

from typing import Literal, TypeAlias

AttentionKind: TypeAlias = Literal["mla", "gqa"]
