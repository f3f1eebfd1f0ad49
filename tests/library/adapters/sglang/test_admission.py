"""Requests that decode's scheduler has no memory for: refused, or they wait and let others pass."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.library.adapters.sglang.sglang_modules import with_stand_ins

RESERVED, TOTAL = 512, 1_200


@pytest.fixture
def admission(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = with_stand_ins("admission", monkeypatch)

    def prepare_abort(req: Any, why: str, *, status_code: int) -> None:
        req.aborted = why, status_code

    monkeypatch.setattr(module.utils, "prepare_abort", prepare_abort, raising=False)
    return module


def request(name: str, prompt: int, output: int = 0) -> Any:
    return SimpleNamespace(
        rid=name, origin_input_ids=[0] * prompt, output_ids=[0] * output, return_logprob=False, aborted=None
    )


class Queue:
    """As much of SGLang's as is read here. `free` tokens are free, and `admit` takes as SGLang does: in turn."""

    def __init__(self, *requests: Any, free: int = TOTAL) -> None:
        self.queue = [SimpleNamespace(req=req, waiting_for_input=True) for req in requests]
        self.retracted_queue, self.num_reserved_decode_tokens, self.pp_size, self.tp_rank = [], RESERVED, 1, 0
        self.free, self.streamed, self.calls = free, list[Any](), list[Any]()
        self.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: self.free)
        self.req_to_token_pool = SimpleNamespace(available_size=lambda: 7)
        self.scheduler = SimpleNamespace(
            max_total_num_tokens=TOTAL, enable_hisparse=False, page_size=1, max_req_input_len=TOTAL - 6,
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace()),
            output_streamer=SimpleNamespace(stream_output=lambda reqs, _: self.streamed.extend(reqs)),
        )  # fmt: skip

    def _prealloc_required_tokens(self, req: Any) -> tuple[int, int]:
        tokens = len(req.origin_input_ids) + max(len(req.output_ids) - 1, 0) + RESERVED
        return tokens, tokens

    def _allocatable_token_budgets(self) -> int:
        return self.free

    def admit(self, rids: list[str] | None = None) -> tuple[list[str], list[str]]:
        self.calls.append(rids)
        taken: list[str] = []
        for entry in [entry for entry in self.queue if rids is None or entry.req.rid in rids]:
            if (needed := self._prealloc_required_tokens(entry.req)[0]) > self.free:
                break
            self.free -= needed
            self.queue.remove(entry)
            taken.append(entry.req.rid)
        return taken, []


def admit(queue: Queue, *given: Any) -> Any:
    return queue.admit(*given)


@pytest.mark.parametrize(
    ("prompt", "refused"), [(TOTAL - RESERVED, False), (TOTAL - RESERVED + 1, True), (1_150, True)]
)
def test_a_prompt_that_never_fits_with_the_reserve_is_refused_with_the_numbers(
    admission: Any, prompt: int, refused: bool
) -> None:
    queue, req = Queue(), request("a", prompt)
    assert admission.exceeds_capacity(lambda *_: False, queue, req) is refused
    assert queue.streamed == ([req] if refused else [])
    if refused:
        why, status = req.aborted
        assert status == 400
        for part in (str(prompt), "--num-reserved-decode-tokens 512", str(prompt + RESERVED), "1200", "--max-total"):
            assert part in why


def test_what_sglang_refuses_or_has_taken_back_is_sglangs_to_end(admission: Any) -> None:
    queue, req, back = Queue(), request("a", 1_150), request("b", 600, output=200)
    assert admission.exceeds_capacity(lambda *_: True, queue, req)
    assert not admission.exceeds_capacity(lambda *_: False, queue, back)
    admission.HAS |= {"prealloc_ceiling"}
    queue.token_to_kv_pool_allocator.prealloc_ceiling_fits = lambda *_: True  # its parts share their bytes
    assert not admission.exceeds_capacity(lambda *_: False, queue, req)
    assert (req.aborted, back.aborted, queue.streamed) == (None, None, [])


@pytest.mark.parametrize("fails", [False, True])
def test_with_hisparse_sglang_may_name_pages_of_the_device_too(
    admission: Any, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compares the backend's name with its own Mooncake backend's, in the call that names them alone."""
    monkeypatch.setattr(admission.utils, "TransferBackend", SimpleNamespace(MOONCAKE="mooncake"), raising=False)
    queue, seen = Queue(request("a", 1)), list[str]()
    queue.scheduler.enable_hisparse, queue.transfer_backend = True, "pdtransfer"  # type: ignore[attr-defined]

    def named(queue: Any, *given: Any) -> Any:
        seen.append(queue.transfer_backend)
        if fails:
            raise RuntimeError("SGLang fails")
        return queue.admit(*given)

    with pytest.raises(RuntimeError) if fails else nullcontext():
        assert admission.pop_admitted(named, queue) == (["a"], [])
    assert (seen, queue.transfer_backend) == (["mooncake"], "pdtransfer")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("tokens", "compressed", "row"), [(35, True, None), (36, True, 108), (43, True, 109), (43, False, None)]
)
def test_behind_hisparses_full_buffer_lies_the_newest_row_of_four(
    admission: Any, tokens: int, compressed: bool, row: int | None
) -> None:
    """In each layer, once SGLang has admitted the request; of a cache with a row a token the first step computes it."""
    events = list[Any]()

    def load(pool: Any, host: Any, device: Any, layer: int, *, io_backend: str) -> None:
        assert (pool, io_backend) == (coordinator.mem_pool_device, "kernel")
        events.append((layer, *host.tolist(), *device.tolist()))

    coordinator = SimpleNamespace(
        is_dsv4_hisparse=compressed, device_buffer_size=8, host_token_len=lambda tokens: tokens // 4,
        mem_pool_device=SimpleNamespace(layer_num=2), mem_pool_host=SimpleNamespace(load_to_device_per_layer=load),
        req_to_host_pool=np.array([np.zeros(12), 100 + np.arange(12)]),
        req_to_device_buffer=np.array([np.zeros(12), 200 + np.arange(12)]),
    )  # fmt: skip
    req = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=1, kv_allocated_len=tokens))
    admission.admit_direct(lambda *given: events.append(given), coordinator, req)
    assert events == [(coordinator, req), *((layer, row, 208) for layer in range(2) if row)]


def test_with_hisparse_the_hosts_pool_counts(admission: Any) -> None:
    queue, req = Queue(), request("a", 1_150)
    queue.scheduler.enable_hisparse = True
    queue.scheduler.tp_worker.model_runner.max_token_pool_size = 10_000
    assert not admission.exceeds_capacity(lambda *_: False, queue, req)
    assert admission.context_tokens(queue.scheduler, reserved=RESERVED) == TOTAL - 6


def test_the_longest_request_fits_with_the_reserve_in_whole_pages(admission: Any) -> None:
    scheduler = Queue().scheduler
    assert admission.context_tokens(scheduler, reserved=0) == TOTAL - 6
    assert admission.context_tokens(scheduler, reserved=RESERVED) == TOTAL - RESERVED
    scheduler.page_size = 64
    assert admission.context_tokens(scheduler, reserved=RESERVED) == 640


def test_those_behind_that_fit_pass_the_first_one_that_does_not(admission: Any) -> None:
    queue = Queue(request("large", 650), request("also", 600), request("b", 10), request("c", 20), free=1_100)
    admitted, failed = admission.pop_admitted(admit, queue)
    assert (admitted, failed, queue.calls) == (["b", "c"], [], [None, ["b", "c"]])
    assert [entry.req.rid for entry in queue.queue] == ["large", "also"]
    assert admission.shown_wait(queue)["requests"] == 2
    for part in ("the first needs 1162 tokens", "--num-reserved-decode-tokens 512", "of 1200 are free", "7 more"):
        assert part in admission.shown_wait(queue)["why"]


def test_none_passes_in_a_turn_that_admitted_others_or_where_no_more_may_run(admission: Any) -> None:
    """SGLang counts what it has admitted, as against device buffers and adapters, within one call alone."""
    queue = Queue(request("a", 10), request("large", 650), request("b", 10), free=1_650)
    assert admission.pop_admitted(admit, queue) == (["a"], [])
    queue.req_to_token_pool.available_size = lambda: 0
    assert admission.pop_admitted(admit, queue) == ([], [])
    queue.req_to_token_pool.available_size = lambda: 1
    assert admission.pop_admitted(admit, queue) == (["b"], [])
    assert queue.calls == [None, None, None, ["b"]]


def test_no_more_than_a_bounded_number_passes_until_the_first_one_is_admitted(admission: Any) -> None:
    few = [request(str(number), 1) for number in range(admission.PASSED_MAX + 5)]
    queue = Queue(request("large", 650), *few, free=1_100)
    passed = 0
    for _ in range(100):
        passed += len(admission.pop_admitted(admit, queue)[0])
        queue.free = 1_100
    assert passed == admission.PASSED_MAX
    queue.free = TOTAL
    admitted, _ = admission.pop_admitted(admit, queue)
    assert admitted[0] == "large"
    queue.free = 600
    assert len(admission.pop_admitted(admit, queue)[0]) == 1


def test_stages_and_others_who_name_the_requests_are_left_alone(admission: Any) -> None:
    queue = Queue(request("large", 650), request("b", 10), free=1_100)
    assert admission.pop_admitted(admit, queue, ["large"]) == ([], [])
    queue.pp_size = 2
    assert admission.pop_admitted(admit, queue) == ([], [])
    assert queue.calls == [["large"], None]


def test_a_long_wait_is_logged_once_and_its_end(
    admission: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(admission.time, "monotonic", lambda: now[0])
    caplog.set_level("INFO")
    queue = Queue(request("large", 650), free=1_100)
    for step_s in (0.0, 0.5, 0.6, 10.0, 10.0):
        now[0] += step_s
        admission.pop_admitted(admit, queue)
    queue.free = TOTAL
    admission.pop_admitted(admit, queue)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == [
        "1 requests wait for memory of decode", "no request waits for memory of decode any more, after 21.1 s",
    ]  # fmt: skip
