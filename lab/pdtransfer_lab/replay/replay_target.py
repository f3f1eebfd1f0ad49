"""Where a replay sends its requests, and how."""

from __future__ import annotations

from dataclasses import dataclass

from .prompts import VOCABULARY, PromptKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTarget:
    """Where requests go, and how."""

    url: str
    model: str = ""
    api_key: str = ""
    prompts: PromptKind = "ids"
    vocabulary: int = VOCABULARY
    timeout_s: float = 600.0
    in_flight_max: int = 4_096  # sockets; a request beyond them is not sent, and counted
    metrics: tuple[str, ...] = ()  # host:port of the decode workers
