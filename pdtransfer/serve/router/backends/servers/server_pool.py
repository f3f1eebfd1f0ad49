"""The HTTP servers of one router, and which are healthy. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import TypeAlias

from .....limits import TOKENS_MAX, Limits
from ...fleet.prefixes import KnownPrefixes
from ...fleet.roles import Departure, Role, longest_request
from ...fleet.server import Server
from ...fleet.status import WorkerState, WorkerStatus
from ...policy.fewest_answers import FewestAnswers, none_healthy
from ...policy.placement import NoPair, Pair, PlacementPolicy, RoutedRequest

ServerPair: TypeAlias = Pair[Server | None, Server]  # without a prefill server decode computes the prompt


class ServerPool:
    """All servers of one router."""

    def __init__(
        self,
        prefill: Iterable[str],
        decode: Iterable[str],
        limits: Limits,
        *,
        without_prefill: bool = False,
        decode_computes: bool = False,
    ) -> None:
        """`without_prefill`: decode may serve while there is no healthy prefill server. `decode_computes`: it can
        compute a prompt."""
        self._limits, self._without_prefill = limits, without_prefill
        self._keeps_turns = decode_computes and limits.turn_tokens_max > 0
        self.prefill = [self._new(url, "prefill") for url in prefill]
        self.decode = [self._new(url, "decode") for url in decode]
        self._pair_twins()
        self._policy: PlacementPolicy[Server | None, Server] = FewestAnswers(
            self.prefill, self.decode, limits, without_prefill=without_prefill, keep_turns=self._keeps_turns
        )

    @property
    def all(self) -> list[Server]:
        """Prefill servers, then decode servers, each rank of them."""
        return [*self.prefill, *self.decode]

    @property
    def sites(self) -> list[list[Server]]:
        """The same by role and URL: the ranks of each server, the first one first."""
        sites: dict[tuple[Role, str], list[Server]] = {}
        for server in self.all:
            sites.setdefault((server.role, server.url), []).append(server)
        return list(sites.values())

    @property
    def usable(self) -> bool:
        """Whether there is a pair of healthy servers, or a decode server that may serve alone."""
        return any(server.usable for server in self.decode) and (self._without_prefill or not self.lacks_prefill)

    @property
    def lacks_prefill(self) -> bool:
        """Whether no prefill server is healthy."""
        return not any(server.usable for server in self.prefill)

    def _new(self, url: str, role: Role) -> Server:
        return Server(url, role, KnownPrefixes(self._limits.prefix_keys_max))

    def _of(self, role: Role) -> list[Server]:
        return self.prefill if role == "prefill" else self.decode

    def _pair_twins(self) -> None:
        for prefill, decode in product(self.prefill, self.decode):
            if (prefill.url, prefill.rank or 0) == (decode.url, decode.rank or 0):
                prefill.twin, decode.twin = decode, prefill

    def ranks(self, server: Server) -> list[Server]:
        """All data parallel ranks of a server, itself among them."""
        return [rank for rank in self._of(server.role) if rank.url == server.url]

    def resize(self, server: Server, count: int) -> None:
        """Notes that a server has that many data parallel ranks. `server` is the first of them and stays; one that is
        no more gets no new requests."""
        ranks = {rank.rank or 0: rank for rank in self.ranks(server)}
        server.rank = 0 if count > 1 else None
        for number in range(1, count):
            if number not in ranks:
                rank = ranks[number] = self._new(server.url, server.role)
                rank.rank, rank.why, rank.down_since = number, server.why, server.down_since
                self._of(server.role).append(rank)
        for number, rank in ranks.items():
            if number > 0:
                rank.gone = number >= count
                rank.departure = Departure.LEAVES if rank.gone else server.departure
        self._pair_twins()

    def add(self, url: str, role: Role) -> Server | None:
        """Takes a server in and returns it; None for one that is here, which is to stay now with the
        ranks that it has."""
        ranks = [server for server in self.all if server.url == url]
        for rank in ranks:
            if not rank.gone:
                rank.departure = Departure.STAYS
        if ranks:
            return None
        server = self._new(url, role)
        self._of(role).append(server)
        return server

    def depart(self, url: str, departure: Departure) -> None:
        """Gives a server no new requests. One that is to leave is not kept by a later drain."""
        for server in self.all:
            if server.url == url and server.departure is not Departure.LEAVES:
                server.departure = departure

    def left(self, server: Server) -> bool:
        """Forgets a server that is to leave once none of its ranks has a request; returns whether it did. A rank that
        it has no more is forgotten before."""
        ranks = self.ranks(server)
        gone = [rank for rank in ranks if rank.departure is Departure.LEAVES and not rank.unfinished]
        if server in gone and len(gone) < len(ranks):
            return False
        for rank in gone:
            self._of(rank.role).remove(rank)
            self._forget(rank)
        return server in gone

    def report(self, server: Server, why: str, now: float) -> bool:
        """Notes a server's health, empty `why` for healthy; returns whether it changed. A server that is down may come
        back as another process: what is known of it is forgotten."""
        changed = server.why != why
        if why and not server.why:
            server.down_since = now
            self._forget(server)
        server.why = why
        return changed

    def _forget(self, server: Server) -> None:
        """What is known of a process that has ended, or that has left this router, also what decode servers know."""
        server.identity = server.longest = None
        server.is_shorter = False
        server.known.clear()
        server.begins_alike.clear()
        engines = {rank.identity.get("remote_engine_id") for rank in self.prefill if rank.identity is not None}
        for decode in self.decode:
            for key in [key for key in decode.begins_alike if key[0] not in engines]:
                del decode.begins_alike[key]

    def overdue(self, server: Server, now: float) -> bool:
        """Whether it has been down for so long that its requests are lost."""
        return bool(server.why) and now - server.down_since >= self._limits.room_deadline_ms / 1e3

    @property
    def serves_alone(self) -> bool:
        """Whether decode computes the prompts of new requests itself, for want of a prefill server."""
        return self.usable and self.lacks_prefill

    @property
    def places(self) -> bool:
        """Whether a prompt's blocks matter: decode may compute it, or there is a choice and prefixes have weight."""
        return self._keeps_turns or (self._limits.prefix_weight > 0 and max(len(self.prefill), len(self.decode)) > 1)

    def one_decode(self) -> Server | NoPair:
        """The healthy decode server with the fewest open answers, for what is no request."""
        healthy = [server for server in self.decode if server.usable]
        return min(healthy, key=lambda server: server.load) if healthy else none_healthy("decode", self.decode)

    def longest(self) -> int:
        """The tokens of a prompt and its answer that some pair takes, or decode alone where there is no prefill server;
        TOKENS_MAX where none reports it."""
        sides = [[server for server in side if server.usable] for side in (self.prefill, self.decode)]
        for side in sides:
            most = max((_tokens(server) for server in side), default=0)
            for server in side:
                server.is_shorter = _tokens(server) < most
        return longest_request(sides[0] or sides[1], sides[1], _tokens)

    def choose(self, keys: tuple[bytes, ...], avoid: Collection[Server], now: float) -> ServerPair | NoPair:
        """Chooses a pair by the policy for a prompt of these blocks, and counts it as sent there."""
        pair = self._policy.choose(RoutedRequest(keys=keys), avoid, now)
        if isinstance(pair, Pair):
            for server in (pair.prefill, pair.decode):
                if server is not None:
                    server.known.learn(keys)
                    server.sent += 1
        return pair


def _tokens(server: Server) -> int:
    return TOKENS_MAX if server.longest is None else server.longest


def server_status(ranks: Sequence[Server]) -> WorkerStatus:
    """Returns what is known of an HTTP server by its ranks: whether it is healthy, and what it was sent."""
    server = ranks[0]
    state: WorkerState = "ready" if server.usable else "unusable" if server.why else "draining"
    return WorkerStatus(
        role=server.role,
        address=server.url,
        state=state,
        why=server.why or server.departure.value or None,
        leaves=server.departure is Departure.LEAVES,
        rooms_here=sum(rank.unfinished for rank in ranks),
    )
