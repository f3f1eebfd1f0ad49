"""The HTTP servers of one router, what is known of them, and which two of them serve a request. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from .....limits import PREFIX_PLACED_BLOCKS_MAX, TEXT_LENGTH_MAX, TOKENS_MAX, Limits
from ...fleet.prefixes import KnownPrefixes
from ...fleet.roles import Departure, NoPair, Pair, Role, longest_request
from ...fleet.status import WorkerState, WorkerStatus

# How decode reaches a prefill server's KV: fields that are equal for all requests of one process.
ServerIdentity: TypeAlias = dict[str, object]

RANK_HEADER = "X-data-parallel-rank"  # vLLM's: which of a server's engines gets a request
NO_LISTENER = "cannot connect: Connection refused"  # `Server.why` of a process that has ended, or is about to


@dataclass(frozen=True, slots=True)
class HandOffs:
    """Hand-offs of a decode server since its start, of all ranks together."""

    received: int = 0
    computed: int = 0  # their prompt was computed there
    kv_bytes: int = 0
    refusals: tuple[str, ...] = ()  # its facts, name=value, in which prefill engines differ


class Waiting(Struct, frozen=True):
    """Requests that a decode server has no memory for now, of all ranks together, and what they wait for."""

    requests: Annotated[int, Meta(ge=0, le=1 << 32)] = 0
    why: Annotated[str, Meta(max_length=TEXT_LENGTH_MAX)] = ""

    def __str__(self) -> str:
        return f"{self.requests} requests wait for its memory: {self.why}"


@dataclass(slots=True, eq=False)
class Server:
    """One server, or one data parallel rank of it: an engine with a cache of its own behind the same URL. `why` is the
    reason why it gets no requests, empty while it is healthy."""

    url: str
    role: Role
    known: KnownPrefixes  # blocks of the prompts sent there
    why: str = "has not answered yet"
    down_since: float = 0.0  # while `why` is set, in seconds
    refused_since: float = 0.0  # while `why` is NO_LISTENER
    identity: ServerIdentity | None = None  # of a prefill server, by what it last reported
    departure: Departure = Departure.STAYS
    hand_offs: HandOffs | None = None  # of a decode server, by its metrics
    waiting: Waiting | None = None  # of a decode server, by what it last reported
    waits_seen: int = 0  # times in a row that some request waited
    longest: int | None = None  # tokens of a prompt and its answer that it takes, where it reports them
    unfinished: int = 0  # answers of requests that it has not answered in full
    sent: int = 0  # requests since the start
    computing: int = 0  # tokens of prompts that a decode server computes itself, up to its first tokens
    # Of a decode server: whether its chats of a kind begin as those of a prefill engine do (early_token.py).
    begins_alike: dict[tuple[object, bytes], bool] = field(default_factory=dict[tuple[object, bytes], bool])
    twin: Server | None = None  # the same server in its other role
    rank: int | None = None  # None where the server has only one
    ranks: list[Server] = field(default_factory=list["Server"])  # all of this server, itself among them
    gone: bool = False  # a rank that the server had, and has no more

    def __post_init__(self) -> None:
        self.ranks.append(self)

    @property
    def name(self) -> str:
        """For people."""
        return self.url if self.rank is None else f"{self.url} (rank {self.rank})"

    @property
    def headers(self) -> dict[str, str]:
        """What a request for it has, so that this engine gets it."""
        return {} if self.rank is None else {RANK_HEADER: str(self.rank)}

    @property
    def load(self) -> int:
        """Open answers, in both roles."""
        return self.unfinished + (0 if self.twin is None else self.twin.unfinished)

    @property
    def usable(self) -> bool:
        """True if it gets requests."""
        return not self.why_not

    @property
    def why_not(self) -> str:
        """Why it gets no requests, empty where it does."""
        return self.why or self.departure.value


ServerPair: TypeAlias = Pair[Server]


def none_healthy(role: str, servers: Sequence[Server]) -> NoPair:
    """Why each of them gets no requests."""
    whys = dict.fromkeys(f"{server.url}: {server.why_not}" for server in servers)  # once for all ranks
    return NoPair(f"no {role} server is healthy: {'; '.join(whys) or 'none is named'}", None)


@dataclass(frozen=True, slots=True)
class FewestAnswers:
    """The prefill and the decode server with the fewest open answers, then with the fewest requests so far.

    A prompt whose blocks a server all knows counts as `prefix_weight` open answers less, a part of them as that part.

    Decode computes the prompt itself where one server is chosen for both roles, and where the prompt goes on from one
    that it had. It holds its own answer as well, which prefill would compute. It gets at most `turn_tokens_max` tokens
    at a time, since they delay the answers that it generates.
    """

    servers: Mapping[Role, Sequence[Server]]
    limits: Limits
    without_prefill: bool  # decode may serve while there is no healthy prefill server
    keeps_turns: bool  # decode may compute the next turns of what it holds

    def choose(self, keys: tuple[bytes, ...], avoid: Collection[Server]) -> ServerPair | NoPair:
        """The best pair for a prompt of these blocks; servers in `avoid` come last."""
        chosen: dict[str, Server] = {}
        for role, servers in self.servers.items():
            healthy = [server for server in servers if server.usable]
            if healthy:
                chosen[role] = min(healthy, key=lambda server: (server in avoid, self._cost(server, keys), server.sent))
            elif role == "decode" or not self.without_prefill:
                return none_healthy(role, servers)
        prefill, decode = chosen.get("prefill"), chosen["decode"]
        blocks_held = decode.known.held(keys)
        rest = (len(keys) - blocks_held) * self.limits.prefix_block_tokens
        fits = decode.computing + rest <= self.limits.turn_tokens_max and len(keys) < PREFIX_PLACED_BLOCKS_MAX
        turn = self.keeps_turns and blocks_held > 0 and fits and decode not in avoid
        if prefill is not None and (turn or prefill is decode.twin):
            return Pair(None, decode, computed=rest)
        return Pair(prefill, decode)

    def _cost(self, server: Server, keys: tuple[bytes, ...]) -> float:
        share_held = server.known.count(keys) / len(keys) if keys else 0.0
        return server.load - self.limits.prefix_weight * share_held


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
        self.prefill = [self._new(url, "prefill") for url in prefill]
        self.decode = [self._new(url, "decode") for url in decode]
        self._pair_twins()
        self.by_role: Mapping[Role, list[Server]] = {"prefill": self.prefill, "decode": self.decode}
        keeps_turns = decode_computes and limits.turn_tokens_max > 0
        self._policy = FewestAnswers(self.by_role, limits, without_prefill=without_prefill, keeps_turns=keeps_turns)

    @property
    def all(self) -> list[Server]:
        """Prefill servers, then decode servers, each rank of them."""
        return [*self.prefill, *self.decode]

    @property
    def sites(self) -> list[list[Server]]:
        """The same, the ranks of each server together."""
        return [server.ranks for server in self.all if server is server.ranks[0]]

    @property
    def usable(self) -> bool:
        """True if there is a pair of healthy servers, or a decode server that may serve alone."""
        return any(server.usable for server in self.decode) and (self._without_prefill or not self.lacks_prefill)

    @property
    def lacks_prefill(self) -> bool:
        """True if no prefill server is healthy."""
        return not any(server.usable for server in self.prefill)

    def _new(self, url: str, role: Role) -> Server:
        return Server(url, role, KnownPrefixes(self._limits.prefix_keys_max))

    def _pair_twins(self) -> None:
        prefills = {(server.url, server.rank or 0): server for server in self.prefill}
        for decode in self.decode:
            if (prefill := prefills.get((decode.url, decode.rank or 0))) is not None:
                prefill.twin, decode.twin = decode, prefill

    def resize(self, server: Server, count: int) -> None:
        """Notes that a server has that many data parallel ranks. `server` is the first of them and stays; one that is
        no more gets no new requests."""
        ranks = {rank.rank or 0: rank for rank in server.ranks}
        server.rank = 0 if count > 1 else None
        for number in range(1, count):
            if number not in ranks:
                rank = ranks[number] = self._new(server.url, server.role)
                rank.rank, rank.why, rank.down_since = number, server.why, server.down_since
                self.by_role[server.role].append(rank)
                server.ranks.append(rank)
                rank.ranks = server.ranks
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
        self.by_role[role].append(server)
        return server

    def depart(self, url: str, departure: Departure) -> None:
        """Gives a server no new requests. One that is to leave is not kept by a later drain."""
        for server in self.all:
            if server.url == url and server.departure is not Departure.LEAVES:
                server.departure = departure

    def left(self, server: Server) -> bool:
        """Forgets a server that is to leave once none of its ranks has a request; returns whether it did. A rank that
        it has no more is forgotten before."""
        gone = [rank for rank in server.ranks if rank.departure is Departure.LEAVES and not rank.unfinished]
        if server in gone and len(gone) < len(server.ranks):
            return False
        for rank in gone:
            server.ranks.remove(rank)
            self.by_role[rank.role].remove(rank)
            self._forget(rank)
        return server in gone

    def report(self, server: Server, why: str, now: float) -> bool:
        """Notes a server's health, empty `why` for healthy; returns whether it changed. A server that is down may come
        back as another process: what is known of it is forgotten."""
        changed = server.why != why
        if is_down := bool(why) and not server.why:
            server.down_since = now
        if is_refused := why == NO_LISTENER != server.why:
            server.refused_since = now
        if is_down or is_refused:
            self._forget(server)
        server.why = why
        return changed

    def _forget(self, server: Server) -> None:
        """What is known of a process that has ended, or that has left this router, also what decode servers know."""
        server.identity = server.longest = server.waiting = None
        server.waits_seen = 0
        server.known.clear()
        server.begins_alike.clear()
        engines = {rank.identity.get("remote_engine_id") for rank in self.prefill if rank.identity is not None}
        for decode in self.decode:
            for key in [key for key in decode.begins_alike if key[0] not in engines]:
                del decode.begins_alike[key]

    def overdue(self, server: Server, now: float) -> bool:
        """True if it has been down for so long that its requests are lost. Engines end what they have under way before
        they stop listening: what has no end then may never get one, and soon counts as lost."""
        deadline_s = self._limits.room_deadline_ms / 1e3
        if server.why == NO_LISTENER and now - server.refused_since >= min(self._limits.silence_ms / 1e3, deadline_s):
            return True
        return bool(server.why) and now - server.down_since >= deadline_s

    @property
    def serves_alone(self) -> bool:
        """True if decode computes the prompts of new requests itself, for want of a prefill server."""
        return self.usable and self.lacks_prefill

    @property
    def places(self) -> bool:
        """True if a prompt's blocks matter: decode may compute it, or there is a choice and prefixes have weight."""
        return self._policy.keeps_turns or (
            self._limits.prefix_weight > 0 and max(len(self.prefill), len(self.decode)) > 1
        )

    def one_decode(self) -> Server | NoPair:
        """The healthy decode server with the fewest open answers, for what is no request."""
        healthy = [server for server in self.decode if server.usable]
        return min(healthy, key=lambda server: server.load) if healthy else none_healthy("decode", self.decode)

    def longest(self) -> int:
        """The tokens of a prompt and its answer that some pair takes, or decode alone where there is no prefill server;
        TOKENS_MAX where none reports it."""
        prefill, decode = ([server for server in side if server.usable] for side in (self.prefill, self.decode))
        return longest_request(prefill or decode, decode, _tokens)

    def is_shorter(self, server: Server) -> bool:
        """True if another server of its role takes longer requests."""
        return any(_tokens(other) > _tokens(server) for other in self.by_role[server.role] if other.usable)

    def choose(self, keys: tuple[bytes, ...], avoid: Collection[Server]) -> ServerPair | NoPair:
        """Chooses a pair by the policy for a prompt of these blocks, and counts it as sent there."""
        pair = self._policy.choose(keys, avoid)
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
