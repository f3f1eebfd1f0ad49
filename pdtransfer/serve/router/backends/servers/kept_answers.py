"""What is kept of servers' answers until both of a choice are joined: bounded for all choices of a request together."""

from __future__ import annotations

from collections import Counter

from .....errors import Cause
from .....limits import HTTP_BODY_BYTES_MAX
from .server_pool import Server
from .upstream import AttemptFailedError


class KeptAnswers:
    """Bytes of a request's answers, by the role of their servers: a joined answer has those of both."""

    def __init__(self) -> None:
        self._bytes = Counter[str]()

    def take(self, server: Server, byte_count: int) -> None:
        """More bytes of an answer are kept. Raises AttemptFailedError beyond the bound that all answers have joined."""
        self._bytes[server.role] += byte_count
        if self._bytes[server.role] > HTTP_BODY_BYTES_MAX:
            text = f"{server.role}'s are larger than {HTTP_BODY_BYTES_MAX} bytes together"
            raise AttemptFailedError(f"the answers to its choices do not fit: {text}", Cause.BREACH, (), again=False)

    def give_back(self, byte_counts: Counter[str]) -> None:
        """What an attempt has kept of each role is kept no more."""
        self._bytes -= byte_counts
