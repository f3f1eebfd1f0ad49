"""The usable workers by model, and what follows from them, kept as workers change: no request looks at all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....wire import Identity
from ..fleet.roles import Role, longest_request
from ..fleet.worker import Model, Worker, obstacle
from .ranking import Ranking


class Candidates:
    """Those of one model, best first: prefill by pending prompt tokens, decode by free slots and rooms."""

    def __init__(self) -> None:
        self.prefill, self.decode, self.sparse = Ranking[Worker](), Ranking[Worker](), Ranking[Worker]()
        self.prefill_endpoints: Sequence[str] | None = None  # of all ranks; None: not known yet

    def put(self, worker: Worker) -> None:
        """Ranks a worker by its load now."""
        load = worker.load
        assert load is not None
        rooms = len(worker.rooms), worker.peer
        if worker.role == "prefill":
            self.prefill.put(worker, worker.number, (worker.prompt_tokens, load.rooms_queued, *rooms))
            return
        self.decode.put(worker, worker.number, (-worker.slots_left(enable_hisparse=False), *rooms))
        if load.enable_hisparse:
            self.sparse.put(worker, worker.number, (-worker.slots_left(enable_hisparse=True), *rooms))
        else:
            self.sparse.remove(worker.number)

    def remove(self, worker: Worker) -> None:
        """Takes a worker out, ranked or not."""
        for ranking in (self.prefill, self.decode, self.sparse):
            ranking.remove(worker.number)

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
