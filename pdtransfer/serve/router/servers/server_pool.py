"""The HTTP servers of one router: which are healthy, and which pair serves a request. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ....limits import Limits
from ..placement import KnownPrefixes
from ..pool_worker import Departure, NoPair, Role
from ..status import WorkerState, WorkerStatus
from .dialects import ServerIdentity
from .hand_offs import HandOffs


@dataclass(slots=True, eq=False)
class Server:
    """One server. `why` is the reason why it gets no requests, empty while it is healthy."""

    url: str
    role: Role
    known: KnownPrefixes  # blocks of the prompts sent there
    why: str = "has not answered yet"
    down_since: float = 0.0  # while `why` is set, in seconds
    identity: ServerIdentity | None = None  # of a prefill server, by what it last told
    departure: Departure = Departure.STAYS
    hand_offs: HandOffs | None = None  # of a decode server, by its metrics
    unfinished: int = 0  # answers of requests that it has not answered in full
    sent: int = 0  # requests since the start

    @property
    def usable(self) -> bool:
        """Whether it gets requests."""
        return not self.why_not

    @property
    def why_not(self) -> str:
        """Why it gets no requests, empty where it does."""
        return self.why or self.departure.value

    @contextmanager
    def serving(self, answers: int) -> Generator[None]:
        """Counts a request of so many answers as open in this scope."""
        self.unfinished += answers
        try:
            yield
        finally:
            self.unfinished -= answers


@dataclass(frozen=True, slots=True)
class ServerPair:
    """The two servers of one attempt; without a prefill server decode computes the prompt."""

    prefill: Server | None
    decode: Server


class ServerPool:
    """All servers of one router."""

    def __init__(
        self, prefill: Iterable[str], decode: Iterable[str], limits: Limits, *, without_prefill: bool = False
    ) -> None:
        """`without_prefill`: decode may serve while there is no healthy prefill server."""
        self._limits, self._without_prefill = limits, without_prefill
        self.prefill = [self._new(url, "prefill") for url in prefill]
        self.decode = [self._new(url, "decode") for url in decode]

    @property
    def all(self) -> list[Server]:
        """Prefill servers, then decode servers."""
        return [*self.prefill, *self.decode]

    @property
    def usable(self) -> bool:
        """Whether there is a pair of healthy servers, or a decode server that may serve alone."""
        return any(each.usable for each in self.decode) and (self._without_prefill or not self.lacks_prefill)

    @property
    def lacks_prefill(self) -> bool:
        """Whether no prefill server is healthy."""
        return not any(each.usable for each in self.prefill)

    def _new(self, url: str, role: Role) -> Server:
        return Server(url, role, KnownPrefixes(self._limits.prefix_keys_max))

    def add(self, url: str, role: Role) -> Server | None:
        """Takes a server in and returns it; None for one that is here, which is to stay now."""
        for each in self.all:
            if each.url == url:
                each.departure = Departure.STAYS
                return None
        server = self._new(url, role)
        (self.prefill if role == "prefill" else self.decode).append(server)
        return server

    def depart(self, url: str, departure: Departure) -> None:
        """Gives a server no new requests. One that is to leave is not kept by a later drain."""
        (server,) = [each for each in self.all if each.url == url]
        if server.departure is not Departure.LEAVES:
            server.departure = departure

    def left(self, server: Server) -> bool:
        """Forgets a server that is to leave and has no request any more; returns whether it did."""
        of_role = self.prefill if server.role == "prefill" else self.decode
        if server.departure is not Departure.LEAVES or server.unfinished or server not in of_role:
            return False
        of_role.remove(server)
        return True

    def report(self, server: Server, why: str, now: float) -> bool:
        """Notes a server's health, empty `why` for healthy; returns whether it changed. A server that is down may come
        back as another process: what is known of it is forgotten."""
        changed = server.why != why
        if why and not server.why:
            server.down_since, server.identity = now, None
            server.known.clear()
        server.why = why
        return changed

    def overdue(self, server: Server, now: float) -> bool:
        """Whether it has been down for so long that its requests are lost."""
        return bool(server.why) and now - server.down_since >= self._limits.room_deadline_ms / 1e3

    @property
    def serves_alone(self) -> bool:
        """Whether decode computes the prompts of new requests itself, for want of a prefill server."""
        return self.usable and self.lacks_prefill

    @property
    def places(self) -> bool:
        """Whether a prompt's blocks matter: there is a choice to make, and prefixes have weight."""
        return self._limits.prefix_weight > 0 and max(len(self.prefill), len(self.decode)) > 1

    def choose(self, keys: Sequence[bytes], avoid: Collection[Server]) -> ServerPair | NoPair:
        """Chooses the prefill and the decode server with the fewest open answers.

        A prompt whose blocks a server all knows counts as `prefix_weight` open answers less, a part of them as that
        part. Servers in `avoid` come last.
        """
        chosen: dict[str, Server] = {}
        for role, servers in (("prefill", self.prefill), ("decode", self.decode)):
            healthy = [each for each in servers if each.usable]
            if healthy:
                chosen[role] = min(healthy, key=lambda each: (each in avoid, self._cost(each, keys), each.sent))
            elif role == "decode" or not self._without_prefill:
                whys = "; ".join(f"{each.url}: {each.why_not}" for each in servers) or "none is named"
                return NoPair(f"no {role} server is healthy: {whys}", None)
        for each in chosen.values():
            each.known.learn(keys)
            each.sent += 1
        return ServerPair(chosen.get("prefill"), chosen["decode"])

    def _cost(self, server: Server, keys: Sequence[bytes]) -> float:
        known = server.known.count(keys) / len(keys) if keys else 0.0
        return server.unfinished - self._limits.prefix_weight * known


def server_status(server: Server) -> WorkerStatus:
    """Returns what is known of an HTTP server: whether it is healthy, and what it was sent."""
    state: WorkerState = "ready" if server.usable else "unusable" if server.why else "draining"
    return WorkerStatus(
        role=server.role,
        address=server.url,
        state=state,
        why=server.why or server.departure.value or None,
        leaves=server.departure is Departure.LEAVES,
        rooms_here=server.unfinished,
    )
