"""Serves the status document as JSON on /status, and the status page on /."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from aiohttp import web

from ..fleet.status import FleetStatus

SHARED_S = 0.2  # a document is made this often at most, however many people watch
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class StatusPages:
    """The two paths; `make` returns the document as it is now."""

    def __init__(self, make: Callable[[], FleetStatus]) -> None:
        self._make = make
        self._document, self._made_s = b"", float("-inf")
        self._page = Path(__file__).with_name("status_page.html").read_bytes()
        self._headers = {
            "Content-Security-Policy": content_security_policy(self._page.decode()),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }

    @property
    def routes(self) -> list[web.RouteDef]:
        """The routes of an application."""
        return [web.get("/status", self._on_status), web.get("/", self._on_page)]

    async def _on_status(self, _: web.Request) -> web.Response:
        now = time.monotonic()
        if now - self._made_s >= SHARED_S:
            self._document, self._made_s = msgspec.json.encode(self._make()), now
        headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        return web.Response(body=self._document, headers=headers, content_type="application/json")

    async def _on_page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._page, headers=self._headers, content_type="text/html", charset="utf-8")


def content_security_policy(page: str) -> str:
    """Allows the page's own script and style, by their digests, and requests to the router itself; nothing else."""
    sources: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        sources[kind].append(f"'sha256-{digest}'")
    assert all(sources.values()), "the page has a script and a style"
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(sources['script'])}",
            f"style-src {' '.join(sources['style'])}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    )
