"""Which prefill and which decode worker serve a request, by the load that our daemons report: pending prompts at
prefill, free slots at decode. No I/O."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from .....handoff.prefix_keys import block_keys, root_key
from .....limits import PREFIX_PLACED_BLOCKS_MAX, Limits
from .....wire import Identity
from ...fleet.prefixes import EVERYONE, PrefixHolders
from ...fleet.roles import NoPair, Pair, Role, longest_request
from .router_rooms import CompletionRequest
from .workers import Model, Worker, model_text, obstacle

Item = TypeVar("Item")
Rank: TypeAlias = tuple[Any, ...]
_FEW = 256  # members of a mask that are looked up one by one; more are met sooner on a walk from the best on


def _rank_of(ranked: tuple[Rank, object]) -> Rank:
    return ranked[0]


class Ranking(Generic[Item]):
    """Items in the order of their ranks. The last part of a rank is its item's own number, the bit of it in masks."""

    def __init__(self) -> None:
        self._order: list[Rank] = []
        self._ranked: dict[int, tuple[Rank, Item]] = {}  # by number

    def __len__(self) -> int:
        return len(self._order)

    def items(self) -> list[Item]:
        """All items, in no order."""
        return [item for _, item in self._ranked.values()]

    def put(self, item: Item, rank: Rank) -> None:
        """Ranks an item, afresh where it was ranked before."""
        before = self._ranked.get(rank[-1])
        if before is not None:
            if before[0] == rank:
                return
            del self._order[bisect_left(self._order, before[0])]
        insort(self._order, rank)
        self._ranked[rank[-1]] = rank, item

    def remove(self, number: int) -> None:
        """Removes an item; an unknown one is ignored."""
        entry = self._ranked.pop(number, None)
        if entry is not None:
            del self._order[bisect_left(self._order, entry[0])]

    def best(self, mask: int, passes: Callable[[Item], bool]) -> tuple[Rank, Item] | None:
        """The best item of the mask that passes; None if none does."""
        if mask >= 0 and mask.bit_count() <= _FEW:
            ranked = [self._ranked[number] for number in numbers_of(mask) if number in self._ranked]
            best = min(ranked, key=_rank_of, default=None)
            if best is None or passes(best[1]):
                return best
            return next((entry for entry in sorted(ranked, key=_rank_of) if passes(entry[1])), None)
        for rank in self._order:
            if mask >> rank[-1] & 1 and passes(self._ranked[rank[-1]][1]):
                return self._ranked[rank[-1]]
        return None


def numbers_of(mask: int) -> list[int]:
    """The numbers of the bits that are set."""
    octets = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(octets, bitorder="little")).tolist()


class Candidates:
    """Those of one model, best first: prefill by pending prompt tokens, decode by free slots and rooms."""

    def __init__(self) -> None:
        self.prefill, self.decode, self.sparse = Ranking[Worker](), Ranking[Worker](), Ranking[Worker]()
        self.prefill_endpoints: Sequence[str] | None = None  # of all ranks; None: not known yet

    def put(self, worker: Worker) -> None:
        """Ranks a worker by its load now."""
        load = worker.load
        assert load is not None
        rooms = len(worker.rooms), worker.peer, worker.number
        if worker.role == "prefill":
            self.prefill.put(worker, (worker.prompt_tokens, load.rooms_queued, *rooms))
            return
        self.decode.put(worker, (-worker.slots_left(enable_hisparse=False), *rooms))
        if load.enable_hisparse:
            self.sparse.put(worker, (-worker.slots_left(enable_hisparse=True), *rooms))
        else:
            self.sparse.remove(worker.number)

    def remove(self, worker: Worker) -> None:
        """Takes a worker out, ranked or not."""
        for ranking in (self.prefill, self.decode, self.sparse):
            ranking.remove(worker.number)

    def decodes(self, request: CompletionRequest) -> Ranking[Worker]:
        """The decode workers that support the request."""
        return self.sparse if request.enable_hisparse else self.decode

    def of(self, role: Role) -> list[Worker]:
        """All of one role, in the order in which they were listed or added."""
        return sorted((self.prefill if role == "prefill" else self.decode).items(), key=lambda worker: worker.number)


class CandidatesByModel:
    """Those of all models. Code that changes a worker reports it by `changed`; it is looked at when something is
    asked."""

    def __init__(self) -> None:
        self._of: dict[Model, Candidates] = {}  # none is empty
        self._changed: set[Worker] = set()  # workers that may be, or rank, elsewhere than they do here
        # Of each worker that is ranked, what decides which others it can work with, as it was then.
        self._facts: dict[Worker, tuple[Model, Identity | None, dict[str, str]]] = {}
        self._served: dict[str, int] | None = None
        self.decode_count = 0  # decode workers that are here, usable or not

    def came(self, worker: Worker) -> None:
        """The worker is here now, not usable yet."""
        self.decode_count += worker.role == "decode"

    def changed(self, worker: Worker) -> None:
        """Something of the worker may be new."""
        self._changed.add(worker)

    def forget(self, worker: Worker) -> None:
        """The worker has left."""
        self._changed.discard(worker)
        self.decode_count -= worker.role == "decode"
        self._remove(worker)

    def all(self) -> Mapping[Model, Candidates]:
        """Returns them, up to date."""
        for worker in self._changed:
            facts = (worker.model, worker.identity, worker.unusable) if worker.usable else None
            facts_then = self._facts.get(worker)
            if facts is None or facts_then is None or facts_then[1] is not facts[1] or facts_then[2] != facts[2]:
                self._remove(worker)
            if facts is not None:
                among = self._of.setdefault(facts[0], Candidates())
                among.put(worker)
                if worker not in self._facts:
                    self._facts[worker], self._served, among.prefill_endpoints = facts, None, None
        self._changed.clear()
        return self._of

    def groups(self, role: Role) -> dict[Model, list[Worker]]:
        """The usable workers of one role, by model."""
        by_model = {model: among.of(role) for model, among in self.all().items()}
        return {model: workers for model, workers in by_model.items() if workers}

    def served(self) -> Mapping[str, int]:
        """The models that some pair serves, in order. Of each, the tokens of a prompt and its answer that some pair
        takes; TOKENS_MAX where its workers report no limit."""
        candidates = self.all()
        if self._served is None:
            self._served = {}
            for model in sorted(candidates):
                sides = candidates[model].of("prefill"), candidates[model].of("decode")
                if longest := longest_request(*sides, lambda worker: worker.context_tokens, obstacle):
                    self._served[model[0]] = max(self._served.get(model[0], 0), longest)
        return self._served

    def prefill_endpoints(self, model: Model) -> Sequence[str]:
        """The endpoints of all ranks of the model's prefill workers."""
        among = self.all().get(model)
        if among is None:
            return ()
        if among.prefill_endpoints is None:
            among.prefill_endpoints = [endpoint for worker in among.of("prefill") for endpoint in worker.endpoints]
        return among.prefill_endpoints

    def _remove(self, worker: Worker) -> None:
        """Takes a worker out, if it is ranked."""
        facts = self._facts.pop(worker, None)
        if facts is not None:
            among, self._served = self._of[facts[0]], None
            among.remove(worker)
            among.prefill_endpoints = None
            if not among.prefill and not among.decode:
                del self._of[facts[0]]


WorkerPair: TypeAlias = Pair[Worker]


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

    A prompt that goes on from one that the decode worker has answered stays there without a prefill worker. It holds
    the answer as well, which prefill would compute. It gets at most `turn_tokens_max` tokens at a time, since they
    delay the answers that it generates.
    """

    def __init__(self, candidates: CandidatesByModel, holders: PrefixHolders, limits: Limits) -> None:
        self._candidates, self._holders, self._limits = candidates, holders, limits

    def choose(
        self, request: CompletionRequest, avoid: Collection[Worker], now: float, *, may_stay: bool
    ) -> WorkerPair | NoPair:
        """The best pair that can take the request now; workers in `avoid` come last. `may_stay`: decode may compute the
        rest of a prompt that goes on from one that it has answered."""
        model, enable_hisparse = request.model, request.enable_hisparse
        best: WorkerPair | None = None
        waits_ms: list[float] = []
        for key, among in self._candidates.all().items():
            if (model is not None and key[0] != model) or not among.prefill or not among.decodes(request):
                continue
            pair = self._best_pair(among, request, self._keys(key, among, request, may_stay=may_stay), avoid, now)
            if pair is None:
                waits_ms += self._waits_ms(among, request, now)
                continue
            left = pair.decode.slots_left(enable_hisparse=enable_hisparse)
            if best is None or left > best.decode.slots_left(enable_hisparse=enable_hisparse):
                best = pair
        if best is not None:
            return (self._staying(best, request) if may_stay else None) or best
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

    def _staying(self, pair: WorkerPair, request: CompletionRequest) -> WorkerPair | None:
        """The decode worker alone, where it has answered a beginning of the prompt and may compute what follows."""
        decode, block_tokens, most = pair.decode, self._limits.prefix_block_tokens, self._limits.turn_tokens_max
        if request.enable_hisparse or len(pair.keys) == PREFIX_PLACED_BLOCKS_MAX:
            return None
        # The last token is computed in any case.
        cached = min(decode.known.held(pair.keys), (request.prompt_tokens - 1) // block_tokens) * block_tokens
        rest = request.prompt_tokens - cached
        fits = rest <= decode.rest_max and sum(decode.computing.values()) + rest <= most
        return Pair(None, decode, pair.keys, computed=rest) if cached and fits else None

    def _keys(
        self, model: Model, among: Candidates, request: CompletionRequest, *, may_stay: bool
    ) -> tuple[bytes, ...]:
        if self._candidates.decode_count > 1:
            wanted = self._limits.prefix_weight > 0
        else:  # no choice to make, but whether the prompt stays
            wanted = may_stay and any(worker.rest_max for worker in among.decodes(request).items())
        if not wanted:
            return ()
        if request.keys is not None:
            return request.keys[:PREFIX_PLACED_BLOCKS_MAX]
        root, blocks_max = root_key(*model, request.salt), PREFIX_PLACED_BLOCKS_MAX
        return block_keys(root, request.prompt, block_tokens=self._limits.prefix_block_tokens, blocks_max=blocks_max)

    def _full_ms(self, worker: Worker, request: CompletionRequest, now: float) -> float:
        return worker.full_ms(now, self._limits, enable_hisparse=request.enable_hisparse)

    def _best_pair(
        self,
        among: Candidates,
        request: CompletionRequest,
        keys: tuple[bytes, ...],
        avoid: Collection[Worker],
        now: float,
    ) -> WorkerPair | None:
        """The best decode worker that some prefill worker can serve now, and the best of these; avoid ones last."""

        def accepts(worker: Worker) -> bool:
            return _takes(worker, request) and self._full_ms(worker, request, now) == 0

        def prefill_for(decode: Worker, avoid: Collection[Worker] = ()) -> Worker | None:
            best = among.prefill.best(
                EVERYONE, lambda worker: worker not in avoid and accepts(worker) and not obstacle(worker, decode)
            )
            return None if best is None else best[1]

        def served(worker: Worker) -> bool:
            return accepts(worker) and prefill_for(worker) is not None

        decode = self._best_decode(among, request, keys, lambda worker: worker not in avoid and served(worker))
        if decode is None and avoid:
            decode = self._best_decode(among, request, keys, served)
        if decode is None:
            return None
        prefill = prefill_for(decode, avoid) or prefill_for(decode)
        assert prefill is not None, "some prefill worker serves it"
        return Pair(prefill, decode, keys)

    def _waits_ms(self, among: Candidates, request: CompletionRequest, now: float) -> list[float]:
        """When some pair of these may accept a room; empty where no two of them can work together, and take it."""
        both = [worker for worker in among.prefill.items() if _takes(worker, request)]
        able = [
            worker
            for worker in among.decodes(request).items()
            if _takes(worker, request) and any(not obstacle(prefill, worker) for prefill in both)
        ]
        if not able:
            return []
        wait_ms = max(min(self._full_ms(worker, request, now) for worker in side) for side in (both, able))
        return [wait_ms or self._limits.resend_ms_max]

    def _best_decode(
        self,
        among: Candidates,
        request: CompletionRequest,
        keys: tuple[bytes, ...],
        passes: Callable[[Worker], bool],
    ) -> Worker | None:
        """The worker with the highest score, then the fewest rooms. Of those that know equally much of the prompt the
        first in the ranking has the highest."""
        best: tuple[tuple[int, int, str], Worker] | None = None
        for mask, blocks in self._holders.levels(keys):
            candidate = among.decodes(request).best(mask, passes)
            if candidate is not None:
                (negative, rooms, peer, _), worker = candidate
                ranked = (-self._score(-negative, request.tokens, blocks), rooms, peer)
                if best is None or ranked < best[0]:
                    best = ranked, worker
        return None if best is None else best[1]

    def _score(self, slots_left: int, tokens: int, known_blocks: int) -> int:
        """Returns the free slots plus the weight of the cached prefix."""
        prefix = known_blocks * self._limits.prefix_block_tokens
        fits = slots_left >= tokens - prefix
        return slots_left + (self._limits.prefix_weight * prefix if fits else 0)


def _takes(worker: Worker, request: CompletionRequest) -> bool:
    return worker.context_tokens >= request.tokens
