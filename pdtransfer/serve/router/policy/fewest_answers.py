"""The policy for HTTP servers, which report no load: the fewest answers that this router waits for. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ....limits import Limits
from ..fleet.server import Server
from .placement import NoPair, Pair, RoutedRequest


class FewestAnswers:
    """The prefill and the decode server with the fewest open answers, then with the fewest requests so far.

    A prompt whose blocks a server all knows counts as `prefix_weight` open answers less, a part of them as that part.
    """

    def __init__(
        self, prefill: Sequence[Server], decode: Sequence[Server], limits: Limits, *, without_prefill: bool
    ) -> None:
        """`without_prefill`: decode may serve while there is no healthy prefill server."""
        self._servers = {"prefill": prefill, "decode": decode}
        self._limits, self._without_prefill = limits, without_prefill

    def choose(
        self, request: RoutedRequest, avoid: Collection[Server | None], now: float
    ) -> Pair[Server | None, Server] | NoPair:
        """As PlacementPolicy.choose."""
        del now
        chosen: dict[str, Server] = {}
        for role, servers in self._servers.items():
            healthy = [each for each in servers if each.usable]
            if healthy:
                chosen[role] = min(healthy, key=lambda each: (each in avoid, self._cost(each, request), each.sent))
            elif role == "decode" or not self._without_prefill:
                whys = "; ".join(f"{each.url}: {each.why_not}" for each in servers) or "none is named"
                return NoPair(f"no {role} server is healthy: {whys}", None)
        return Pair(chosen.get("prefill"), chosen["decode"])

    def _cost(self, server: Server, request: RoutedRequest) -> float:
        known = server.known.count(request.keys) / len(request.keys) if request.keys else 0.0
        return server.unfinished - self._limits.prefix_weight * known
