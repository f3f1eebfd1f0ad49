"""The policy for our own daemons, which report their load: pending prompts at prefill, free slots at decode. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

from ....handoff.prefix_keys import block_keys, root_key
from ....limits import PREFIX_PLACED_BLOCKS_MAX, Limits
from ..fleet.prefixes import EVERYONE, PrefixHolders
from ..fleet.worker import Model, Worker, model_text, obstacle
from .candidates import CandidatesByModel
from .placement import NoPair, Pair, RoutedRequest
from .ranking import Ranking

WorkerPair: TypeAlias = Pair[Worker | None, Worker]  # without a prefill worker decode computes the rest of a prompt


def _no_pair_reason(prefills: Collection[Model], decodes: Collection[Model], model: str | None) -> str:
    """Explains why the ready workers make no pair."""
    for role, models in (("prefill", prefills), ("decode", decodes)):
        if not models:
            return f"no {role} worker is ready; the router's /health has the reason"
    prefill_models, decode_models = (", ".join(sorted(map(model_text, models))) for models in (prefills, decodes))
    of_model = "of one model" if model is None else f"of model {model!r}"
    if any(model is None or key[0] == model for key in set(prefills) & set(decodes)):
        return f"no prefill and decode workers {of_model} can work together; the router's /health has the reason"
    return (
        f"no prefill and decode workers {of_model} are ready: prefill has {prefill_models}, decode has {decode_models}"
    )


class FreeSlots:
    """The least loaded pair: prefill by pending prompt tokens, decode by free slots, then by rooms.

    Each prompt token cached at a decode worker counts as `prefix_weight` free slots, unless the room would queue there.
    Both workers serve one model; HiSparse needs a decode worker that supports it.

    A prompt that goes on from one that the decode worker has answered stays there without a prefill worker: it holds
    the answer as well, which prefill would compute. It gets at most `turn_tokens_max` tokens at a time, since they
    delay the answers that it generates.
    """

    def __init__(self, candidates: CandidatesByModel, holders: PrefixHolders, limits: Limits) -> None:
        self._candidates, self._holders, self._limits = candidates, holders, limits

    def choose(self, request: RoutedRequest, avoid: Collection[Worker | None], now: float) -> WorkerPair | NoPair:
        """As PlacementPolicy.choose."""
        model, enable_hisparse = request.model, request.enable_hisparse
        best: WorkerPair | None = None
        waits_ms: list[float] = []

        def takes(worker: Worker) -> bool:
            return worker.context_tokens >= request.tokens

        def accepts(worker: Worker) -> bool:
            return takes(worker) and worker.full_ms(now, self._limits, enable_hisparse=enable_hisparse) == 0

        for key, among in self._candidates.all().items():
            decodes = among.sparse if enable_hisparse else among.decode
            if (model is not None and key[0] != model) or not among.prefill or not decodes:
                continue
            keys = self._keys(key, request, decodes)
            pair = self._best_pair(among.prefill, decodes, keys, request.tokens, avoid, accepts)
            if pair is None:
                wait_ms = self._wait_ms(among.prefill, decodes, takes, now, enable_hisparse=enable_hisparse)
                if wait_ms is not None:
                    waits_ms.append(wait_ms)
                continue
            left = pair.decode.slots_left(enable_hisparse=enable_hisparse)
            if best is None or left > best.decode.slots_left(enable_hisparse=enable_hisparse):
                best = pair
        if best is not None:
            return self._staying(best, request) or best
        if waits_ms:
            return NoPair("every worker is full", int(min(waits_ms)) + 1)
        longest = max(
            (tokens for name, tokens in self._candidates.served().items() if model in (None, name)), default=0
        )
        if 0 < longest < request.tokens:
            return NoPair(f"no pair of workers takes {request.tokens} tokens, only {longest}", None)
        return NoPair(
            _no_pair_reason(self._candidates.groups("prefill"), self._candidates.groups("decode"), model), None
        )

    def _staying(self, pair: WorkerPair, request: RoutedRequest) -> WorkerPair | None:
        """The decode worker alone, where it has answered a beginning of the prompt and may compute what follows."""
        decode, block_tokens, most = pair.decode, self._limits.prefix_block_tokens, self._limits.turn_tokens_max
        if not request.may_stay or request.enable_hisparse or len(pair.keys) == PREFIX_PLACED_BLOCKS_MAX:
            return None
        # The last token is computed in any case.
        cached = min(decode.known.held(pair.keys), (request.prompt_tokens - 1) // block_tokens) * block_tokens
        rest = request.prompt_tokens - cached
        fits = rest <= decode.rest_max and sum(decode.computing.values()) + rest <= most
        return Pair(None, decode, pair.keys, computed=rest) if cached and fits else None

    def _keys(self, model: Model, request: RoutedRequest, decodes: Ranking[Worker]) -> tuple[bytes, ...]:
        if self._candidates.decode_count > 1:
            wanted = self._limits.prefix_weight > 0
        else:  # no choice to make, but whether the prompt stays
            wanted = request.may_stay and any(worker.rest_max for worker in decodes.items())
        if not wanted:
            return ()
        if request.keys is not None:
            return request.keys[:PREFIX_PLACED_BLOCKS_MAX]
        root, blocks_max = root_key(*model, request.salt), PREFIX_PLACED_BLOCKS_MAX
        return block_keys(root, request.ids, block_tokens=self._limits.prefix_block_tokens, blocks_max=blocks_max)

    def _best_pair(
        self, prefills: Ranking[Worker], decodes: Ranking[Worker], keys: tuple[bytes, ...], tokens: int,
        avoid: Collection[Worker | None], accepts: Callable[[Worker], bool],
    ) -> WorkerPair | None:  # fmt: skip
        """The best decode worker that some prefill worker can serve now, and the best of these; avoid ones last."""

        def serves(decode: Worker) -> Callable[[Worker], bool]:
            return lambda worker: accepts(worker) and not obstacle(worker, decode)

        def served(worker: Worker) -> bool:
            return accepts(worker) and prefills.best(EVERYONE, serves(worker)) is not None

        decode = self._best_decode(decodes, keys, tokens, lambda worker: worker not in avoid and served(worker))
        if decode is None and avoid:
            decode = self._best_decode(decodes, keys, tokens, served)
        if decode is None:
            return None
        fits = serves(decode)
        best = prefills.best(EVERYONE, lambda worker: worker not in avoid and fits(worker))
        best = best or prefills.best(EVERYONE, fits)
        assert best is not None, "some prefill worker serves it"
        return Pair(best[1], decode, keys)

    def _wait_ms(
        self, prefills: Ranking[Worker], decodes: Ranking[Worker], takes: Callable[[Worker], bool], now: float, *,
        enable_hisparse: bool,
    ) -> float | None:  # fmt: skip
        """When some pair of these may accept a room; None where no two of them can work together, and take it."""
        both = [worker for worker in prefills.items() if takes(worker)]
        able = [
            worker
            for worker in decodes.items()
            if takes(worker) and any(not obstacle(prefill, worker) for prefill in both)
        ]
        if not able:
            return None
        sides = [
            min(worker.full_ms(now, self._limits, enable_hisparse=enable_hisparse) for worker in side)
            for side in (both, able)
        ]
        return max(sides) or self._limits.resend_ms_max

    def _best_decode(
        self, decodes: Ranking[Worker], keys: tuple[bytes, ...], tokens: int, passes: Callable[[Worker], bool]
    ) -> Worker | None:
        """The worker with the highest score, then the fewest rooms. Of those that know equally much of the prompt the
        first in the ranking has the highest."""
        best: tuple[tuple[int, int, str], Worker] | None = None
        for level in self._holders.levels(keys):
            candidate = decodes.best(level.mask, passes)
            if candidate is not None:
                (negative, rooms, peer), worker = candidate
                ranked = (-self._score(-negative, tokens, level.blocks), rooms, peer)
                if best is None or ranked < best[0]:
                    best = ranked, worker
        return None if best is None else best[1]

    def _score(self, slots_left: int, tokens: int, known_blocks: int) -> int:
        """Returns the free slots plus the weight of the cached prefix."""
        prefix = known_blocks * self._limits.prefix_block_tokens
        fits = slots_left >= tokens - prefix
        return slots_left + (self._limits.prefix_weight * prefix if fits else 0)
