"""The policy for HTTP servers, which report no load: the fewest answers that this router waits for. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ....limits import PREFIX_PLACED_BLOCKS_MAX, Limits
from ..fleet.server import Server
from .placement import NoPair, Pair, RoutedRequest


def none_healthy(role: str, servers: Sequence[Server]) -> NoPair:
    """Why each of them gets no requests."""
    whys = dict.fromkeys(f"{server.url}: {server.why_not}" for server in servers)  # once for all ranks
    return NoPair(f"no {role} server is healthy: {'; '.join(whys) or 'none is named'}", None)


class FewestAnswers:
    """The prefill and the decode server with the fewest open answers, then with the fewest requests so far.

    A prompt whose blocks a server all knows counts as `prefix_weight` open answers less, a part of them as that part.

    Decode computes the prompt itself where one server is chosen for both roles, and where the prompt goes on from one
    that it had: it holds its own answer as well, which prefill would compute. It gets at most `turn_tokens_max` tokens
    at a time, since they delay the answers that it generates.
    """

    def __init__(
        self,
        prefill: Sequence[Server],
        decode: Sequence[Server],
        limits: Limits,
        *,
        without_prefill: bool,
        keep_turns: bool,
    ) -> None:
        """`without_prefill`: decode may serve while there is no healthy prefill server. `keep_turns`: it may compute
        the next turns of what it holds."""
        self._servers = {"prefill": prefill, "decode": decode}
        self._limits, self._without_prefill, self._keep_turns = limits, without_prefill, keep_turns

    def choose(
        self, request: RoutedRequest, avoid: Collection[Server | None], now: float
    ) -> Pair[Server | None, Server] | NoPair:
        """As PlacementPolicy.choose."""
        del now
        chosen: dict[str, Server] = {}
        for role, servers in self._servers.items():
            healthy = [server for server in servers if server.usable]
            if healthy:
                chosen[role] = min(
                    healthy, key=lambda server: (server in avoid, self._cost(server, request), server.sent)
                )
            elif role == "decode" or not self._without_prefill:
                return none_healthy(role, servers)
        prefill, decode = chosen.get("prefill"), chosen["decode"]
        keys = request.keys or ()
        blocks_held = decode.known.held(keys)
        rest = (len(keys) - blocks_held) * self._limits.prefix_block_tokens
        fits = decode.computing + rest <= self._limits.turn_tokens_max and len(keys) < PREFIX_PLACED_BLOCKS_MAX
        turn = self._keep_turns and blocks_held > 0 and fits and decode not in avoid
        if prefill is not None and (turn or prefill is decode.twin):
            return Pair(None, decode, computed=rest)
        return Pair(prefill, decode)

    def _cost(self, server: Server, request: RoutedRequest) -> float:
        share_held = server.known.count(request.keys) / len(request.keys) if request.keys else 0.0
        return server.load - self._limits.prefix_weight * share_held
