"""The text of an endpoint, [KEY@]tcp://host:port: where its key ends."""

from __future__ import annotations

KEY_LENGTH = 40  # Z85 characters of 32 bytes


def split_key(endpoint: str) -> tuple[str, str]:
    """KEY, empty where there is none, and the rest. A key may itself hold '@' or ':', so its length tells it."""
    if endpoint[KEY_LENGTH : KEY_LENGTH + 7] == "@tcp://":
        return endpoint[:KEY_LENGTH], endpoint[KEY_LENGTH + 1 :]
    return "", endpoint
