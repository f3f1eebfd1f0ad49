"""API keys of a router's clients, and how they are sent."""

from __future__ import annotations

from pathlib import Path

A, B, C = ("sk-tenant-a-0123456789", "sk-tenant-b-0123456789", "sk-tenant-c-0123456789")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def written(path: Path, text: str) -> Path:
    """A file that only its owner may read."""
    path.write_text(text)
    path.chmod(0o600)
    return path
