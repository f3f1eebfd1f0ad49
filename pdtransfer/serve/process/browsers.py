"""Which requests a listener takes from browsers: a page of another site can make them send some, with stored
credentials.

A browser marks every request of a page to another site with its origin, by Sec-Fetch-Site or Origin. It sends JSON to
another site only after a preflight, which is never allowed here. What remains is DNS rebinding: a page whose own name
begins to resolve to this host belongs to the same site. So the name in a request has to be one of this host's own.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections.abc import Iterable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from ...bus.sockets import LogThrottle

log = logging.getLogger(__name__)

REFUSED_LOG_MS = 1_000  # between two log lines about refused requests
ANY = "*"
LOOPBACK = ("localhost", "*.localhost")  # no public name ends so (RFC 6761)
_SAME = ("same-origin", "none")  # none: the user has typed the address
_JSON = "application/json"
# What a form can send: a text may be JSON, and no client of an API sends a form's parts.
_FORMS = frozenset({"text/plain", "multipart/form-data"})
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/@ ]*)(:[0-9]*)?")


class RefusedError(Exception):
    """A request is not taken, with this HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class BrowserGuard:
    """The middleware of one listener. `hosts` are names that clients may call it by, besides loopback names and all IP
    addresses, which nobody can make mean another host. `*.example.org` is for all below it, `*` for any."""

    def __init__(self, hosts: Iterable[str]) -> None:
        self._hosts = (*LOOPBACK, *(host.lower() for host in hosts))
        self._throttle = LogThrottle(REFUSED_LOG_MS)

    @web.middleware
    async def through(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Passes a request on, or answers it."""
        try:
            self.check(request)
        except RefusedError as why:
            suppressed = self._throttle.due(asyncio.get_running_loop().time())
            if suppressed is not None:
                log.warning("a request from %s is refused: %s; %d others not logged", request.remote, why, suppressed)
            answer = {"message": str(why), "type": "invalid_request_error", "param": None, "code": None}
            return web.Response(
                status=why.status, body=msgspec.json.encode({"error": answer}), content_type="application/json"
            )
        return await handler(request)

    def check(self, request: web.Request) -> None:
        """Raises RefusedError."""
        headers = request.headers
        hosts = headers.getall("Host", [])
        for host in hosts:
            if not self._is_own(host):
                name = host[:64]
                raise RefusedError(403, f"Host: {name!r} is not a name of this server: see --allowed-hosts")
        sites, origins = headers.getall("Sec-Fetch-Site", []), headers.getall("Origin", [])
        for site in sites:
            if site not in _SAME and not _shows_a_page(request):
                raise RefusedError(403, f"Sec-Fetch-Site: {site[:64]!r}: a page of another site has sent this")
        for origin in () if sites else origins:
            if origin.partition("://")[2].lower() not in (host.lower() for host in hosts):
                raise RefusedError(403, f"Origin: {origin[:64]!r}: a page of another site has sent this")
        if request.method not in ("GET", "HEAD", "OPTIONS"):
            kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if kind in _FORMS or ((sites or origins) and kind != _JSON):
                raise RefusedError(415, f"Content-Type: {kind[:64]!r}, must be {_JSON}")

    def _is_own(self, host: str) -> bool:
        authority = _AUTHORITY.fullmatch(host.strip())
        if ANY in self._hosts:
            return True
        if authority is None:
            return False
        name = authority[1].lower().removesuffix(".")
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return any(
                name == allowed or (allowed[:2] == "*." and name.endswith(allowed[1:])) for allowed in self._hosts
            )
        return True


def _shows_a_page(request: web.Request) -> bool:
    """True if the user follows a link: the page is shown to them, and not to the site that has the link."""
    headers = request.headers
    page = headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
    return page and request.method == "GET"
