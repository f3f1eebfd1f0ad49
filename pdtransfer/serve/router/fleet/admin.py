"""The admin API of a router: workers are listed, added, drained and removed. It listens apart from the clients' API."""

from __future__ import annotations

import hmac
import logging
from pathlib import Path
from typing import Literal

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from ....bus.keys import read_guarded
from ....errors import ConfigError, WorldError
from ...process.http import HttpListener
from .membership import Membership
from .roles import Departure

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 4 << 10
JSON = "application/json"
TOKEN_LENGTH_MIN, TOKEN_LENGTH_MAX = 16, 512
CONNECTIONS_MAX = 16
DEPARTURES = {"drain": Departure.DRAINS, "remove": Departure.LEAVES}


class WorkerChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a change. `worker` is an address; to drain or remove, also a node's name."""

    worker: str
    role: Literal["prefill", "decode"] | None = None


def read_token(path: Path) -> bytes:
    """Reads the token of a file that only its owner may read. Raises ConfigError."""
    try:
        token = read_guarded(path, forbidden=0o077, advice=f"others may read or change it: chmod 600 {path}").strip()
    except ConfigError as error:
        raise ConfigError(f"admin_token: {error}") from None
    if not TOKEN_LENGTH_MIN <= len(token) <= TOKEN_LENGTH_MAX or len(token.split()) != 1 or not token.isascii():
        text = f"must be one word of {TOKEN_LENGTH_MIN} to {TOKEN_LENGTH_MAX} ASCII characters"
        raise ConfigError(f"admin_token: {path}: {text}")
    return token.encode()


class AdminApi:
    """Answers on its own address. The token is read at each request, so that a new one counts at once."""

    def __init__(self, membership: Membership, token: Path, *, allowed_hosts: tuple[str, ...] = ()) -> None:
        read_token(token)
        self._membership, self._token = membership, token
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._authenticated])
        app.add_routes([web.get("/workers", self._list), web.post("/workers", self._change)])
        app.add_routes([web.post(f"/workers/{action}", self._change) for action in DEPARTURES])
        self._listener = HttpListener(app, connections_max=CONNECTIONS_MAX, allowed_hosts=allowed_hosts)

    async def open(self, listen: str) -> str:
        """Listens; returns host:port. Raises WorldError."""
        return await self._listener.open(listen, named="admin")

    async def close(self) -> None:
        """Stops listening."""
        await self._listener.close()

    @web.middleware
    async def _authenticated(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            token = read_token(self._token)
        except ConfigError as error:
            log.error("the admin API is closed: %s", error)
            return _answer(503, "the router cannot read its token")
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, b"Bearer " + token):
            log.warning("the admin API has refused %s from %s", request.path[:64], request.remote)
            refused = _answer(401, "Authorization: must be Bearer and the token of --admin-token")
            refused.headers["WWW-Authenticate"] = "Bearer"
            return refused
        return await handler(request)

    async def _list(self, _: web.Request) -> web.Response:
        workers = self._membership.site.workers_status()
        return web.Response(body=msgspec.json.encode({"workers": workers}), content_type=JSON)

    async def _change(self, http: web.Request) -> web.Response:
        action = http.path.rpartition("/")[2]
        try:
            change = msgspec.json.decode(await http.read(), type=WorkerChange)
            if action in DEPARTURES:
                self._membership.depart(change.worker, DEPARTURES[action])
            elif change.role is None:
                raise ConfigError("role: missing, prefill or decode")
            else:
                self._membership.add(change.role, change.worker)
        except (msgspec.MsgspecError, UnicodeDecodeError, ConfigError) as error:
            return _answer(400, str(error))
        except WorldError as error:
            return _answer(409, str(error))
        return await self._list(http)


def _answer(status: int, text: str) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode({"error": text}), content_type=JSON)
