"""Runs in .venv-vllm: one vLLM engine, its scheduler and its worker in this process, stepped as long as it has work.

Requests come while others run: whether a prefill engine or a decode engine gets a prompt first is up to the test.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import msgspec
import numpy as np
import vllm
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.sampling_params import RequestOutputKind

from tests.support.json_process import LATER, Requests

# Before 0.28 LLM's engine, unlike a server's, drops the figures of a step that makes no output.
RECORDS_OUTPUTS_ALONE = [int(part) for part in vllm.__version__.split(".")[:2]] < [0, 28]
IDLE_STEP_S = 0.001  # between steps in which nothing runs, as vLLM's own loop: transfers get the interpreter


class Driver:
    """What a test may ask of the engine: each public method by its name."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._numbers: dict[str, int] = {}  # of the requests of `generate` that are not answered, by their id
        self._held = False

    def start(self, *, stand_in: str | None = None, **options: Any) -> dict[str, Any]:
        """Starts the engine with LLM's options, and a module with stand-ins for what vLLM lacks; returns what its KV
        cache has, and how long our connector took."""
        if stand_in is not None:
            import_module(stand_in)
        register_s = _times_registration()
        self._engine = LLM(**options).llm_engine
        self._core = self._engine.engine_core.engine_core
        if RECORDS_OUTPUTS_ALONE and self._engine.logger_manager is not None:
            self._engine.engine_core.get_output = partial(self._recorded, self._engine.engine_core.get_output)
        cache = self._engine.vllm_config.cache_config
        blocks = self._core.scheduler.kv_cache_config.num_blocks
        return {"blocks": blocks, "block_size": cache.block_size, "register_s": sum(register_s)}

    def generate(
        self,
        *,
        number: int,
        request: str,
        prompt: list[int],
        tokens: int,
        kv_transfer_params: dict[str, Any] | None,
        logprobs: int | None,
    ) -> object:
        """Answers later: exactly this many greedy tokens, why it ended, and what the KV connector returned."""
        extra = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params is not None else None
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra,
            output_kind=RequestOutputKind.FINAL_ONLY, logprobs=logprobs,
        )  # fmt: skip
        self._engine.add_request(request, {"prompt_token_ids": prompt}, params)
        self._numbers[request] = number
        return LATER

    def abort(self, *, request: str) -> None:
        """Ends a request as a client's disconnection does; its `generate` is answered, without tokens."""
        self._engine.abort_request([request])
        if (number := self._numbers.pop(request, None)) is not None:
            self._requests.answer(number, {"tokens": [], "finish_reason": "abort", "kv_transfer_params": None})

    def state(self) -> dict[str, int]:
        """Blocks that nobody has, and requests that the scheduler knows, those included that wait for a transfer."""
        scheduler = self._core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return {"free_blocks": pool.get_num_free_blocks(), "requests": len(scheduler.requests)}

    def kv_digest(self, *, request: str, tokens: int, rank: int) -> str:
        """The SHA-256 of the first `tokens` tokens' KV at a rank, in all layers, of a request of a model whose layers
        see all of them; of ranks that have the tokens in turn, `rank` being the first, of each token at its rank."""
        scheduler = self._core.scheduler
        [known] = [each for each in scheduler.requests if each.startswith(f"{request}-")]
        tables = scheduler.kv_cache_manager.get_block_ids(known)
        blocks = {
            name: list(table)
            for table, group in zip(tables, scheduler.kv_cache_config.kv_cache_groups, strict=True)
            if getattr(group, "enable_kv_transfer", True)
            for name in group.layer_names
        }
        made, config = hashlib.sha256(), self._engine.vllm_config
        size, ranks = config.cache_config.block_size, config.parallel_config.decode_context_parallel_size
        positions = np.arange(tokens)
        rank_of, row_of = positions // size % ranks, positions // (size * ranks) * size + positions % size
        by_rank = self._core.model_executor.collective_rpc("cache_rows", args=(blocks,))
        for layer in zip(*by_rank[rank : rank + ranks], strict=True):
            made.update(np.stack(layer)[rank_of, row_of].tobytes())
        return made.hexdigest()

    def forget(self) -> bool:
        """Empties the prefix cache; False while a request has blocks."""
        return self._engine.reset_prefix_cache()

    def hold(self) -> None:
        """Runs no step from now on, but those that `step` asks for."""
        self._held = True

    def step(self, *, count: int) -> None:
        """Runs this many steps."""
        for _ in range(count):
            self._step()

    def resume(self) -> None:
        """Ends `hold`."""
        self._held = False

    def metrics(self, *, prefix: str) -> dict[str, float]:
        """Samples of this process's Prometheus metrics, by name and by the labels other than vLLM's own."""
        made: dict[str, float] = {}
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
                if sample.name.startswith(prefix) and "le" not in labels and not sample.name.endswith("_created"):
                    made[" ".join([sample.name, *labels.values()])] = sample.value
        return made

    def figures_of(self, *, connector: str, data: dict[str, Any]) -> dict[str, Any]:
        """What vLLM's MultiConnector makes of the figures of one of its connectors that come from another process."""
        return MultiConnector.build_kv_connector_stats({connector: data}).reduce()

    def _recorded(self, get_output: Callable[[], Any]) -> Any:
        """What a step has made. Its figures are recorded here where the engine would drop them."""
        made = get_output()
        if made.scheduler_stats is not None:  # as from a process of the engine's own
            made.scheduler_stats.kv_connector_stats = msgspec.to_builtins(made.scheduler_stats.kv_connector_stats)
        if made.scheduler_stats is not None and not made.outputs:
            self._engine.logger_manager.record(scheduler_stats=made.scheduler_stats, iteration_stats=None)
        return made

    def run(self) -> None:
        """Until the input ends; then the engine is shut down."""
        while True:
            for number, name, arguments in self._requests.take(wait=not self._is_busy()):
                does = getattr(self, name)
                self._requests.attempt(number, partial(does, number=number) if name == "generate" else does, arguments)
            if self._requests.ended:
                break
            if self._is_busy():
                self._step()
        if hasattr(self, "_engine"):
            self._engine.engine_core.shutdown()

    def _is_busy(self) -> bool:
        """Also while a request that has ended still holds blocks: its transfer ends in a step."""
        return not self._held and hasattr(self, "_core") and self._core.scheduler.has_requests()

    def _step(self) -> None:
        for output in self._engine.step():
            [made] = output.outputs
            answer = {
                "tokens": list(made.token_ids), "finish_reason": made.finish_reason,
                "kv_transfer_params": output.kv_transfer_params,
                "logprobs": [{token: of.logprob for token, of in likely.items()} for likely in made.logprobs or ()],
            }  # fmt: skip
            self._requests.answer(self._numbers.pop(output.request_id), answer)
        if not self._core.scheduler.running:
            time.sleep(IDLE_STEP_S)


def _times_registration() -> list[float]:
    """From now on our connector adds to the list how many seconds register_kv_caches took."""
    from pdtransfer.adapters.vllm import PDTransferConnector

    register, taken = PDTransferConnector.register_kv_caches, list[float]()

    def timed(self: Any, kv_caches: Any) -> None:
        begin = time.monotonic()
        register(self, kv_caches)
        taken.append(time.monotonic() - begin)

    PDTransferConnector.register_kv_caches = timed
    return taken


if __name__ == "__main__":
    Driver(Requests()).run()
