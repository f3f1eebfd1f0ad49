"""The stages of a decode engine end each request together, and alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdtransfer.adapters.sglang import process
from pdtransfer.adapters.sglang.stages import ELSEWHERE, Ended, check_options, ended_here, ended_so_far
from pdtransfer.errors import ConfigError
from tests.library.adapters.sglang.sglang_modules import KVPoll, ServerArgs, with_stand_ins


@pytest.mark.parametrize("option", ["enable_hierarchical_cache", "enable_hisparse"])
def test_what_loads_a_request_at_one_stage_alone_is_refused(option: str) -> None:
    options = {"enable_hierarchical_cache": False, "enable_hisparse": False}
    for changed in ({}, {option: True, "pp_size": 1}, {option: True, "disaggregation_mode": "prefill"}):
        check_options(ServerArgs(**{"pp_size": 2} | options | changed))
    with pytest.raises(ConfigError, match=f"{option}: stages of a decode engine do not agree yet"):
        check_options(ServerArgs(**{"pp_size": 2} | options | {option: True}))


def test_what_has_not_ended_at_all_ranks_of_a_stage_has_not_ended_there() -> None:
    assert ended_here([
        ("landed", True, False, ""), ("failed", True, True, "peer_lost: gone"), ("failed beside", True, True, ""),
        ("landing", False, False, ""), ("failed, not drained beside", False, True, "deadline: over"),
    ]) == {"landed": "", "failed": "peer_lost: gone", "failed beside": ELSEWHERE}  # fmt: skip


@pytest.mark.parametrize(
    ("stages", "ended"),
    [
        ([{"r": ""}, {"r": ""}, {"r": ""}], {"r": ""}),
        ([{"r": ""}, {}, {"r": ""}], {}),
        ([{}, {"r": "lost"}, {"r": "lost"}], {}),
        ([{"r": ""}, {"r": "lost"}, {"r": ""}], {"r": "lost"}),
        ([{"r": "first"}, {"r": ""}, {"r": "last"}], {"r": "first"}),
        ([{"r": "", "s": ""}, {"s": "lost", "r": ""}], {"r": "", "s": "lost"}),
    ],
)
def test_a_request_ends_with_the_last_stage_and_fails_with_the_first_that_fails(
    stages: list[Ended], ended: Ended
) -> None:
    so_far = stages[0]
    for here in stages[1:]:
        so_far = ended_so_far(so_far, here)
    assert so_far == ended


class Request:
    """A request at a rank of a stage, and how it has ended there."""

    def __init__(self, receiver: type, rid: str, state: KVPoll, failure: str) -> None:
        self.req, self.kv_receiver = SimpleNamespace(rid=rid), type("Receiver", (receiver,), {})(None)
        vars(self.kv_receiver).update(poll=lambda: self.state, fail=self.fail, failure=failure)
        self.state, self.failure = state, failure

    def fail(self, reason: str) -> None:
        self.state, self.failure = KVPoll.Failed, reason


class Stage:
    """SGLang's scheduler of a stage that has one rank, what the stage before it has sent, and how requests end."""

    def __init__(self, hooks: Any, states: dict[str, KVPoll], failure: str, *sent: Any) -> None:
        queue = [Request(hooks.dialect.KVReceiver, rid, state, failure) for rid, state in states.items()]
        self.disagg_decode_transfer_queue = SimpleNamespace(queue=queue)
        self.pp_group = SimpleNamespace(is_first_rank=not sent)
        self.attn_tp_cpu_group = lambda flags, _: flags
        self._pp_recv_pyobj_from_prev_stage = list(sent).pop
        self.ended: dict[str, tuple[KVPoll, str]] = {}

    def end(self, ended: Any) -> list[str]:
        """As SGLang has it: the requests that have ended at all stages end here as they are here, and those that have
        landed are passed on."""
        for request in self.disagg_decode_transfer_queue.queue:
            if request.req.rid in ended:
                self.ended[request.req.rid] = request.state, request.failure
        return [rid for rid, (state, _) in self.ended.items() if state is KVPoll.Success]


def test_what_fails_at_one_stage_fails_at_all_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = with_stand_ins("hooks", monkeypatch)
    monkeypatch.setattr(process, "decode", object())
    (_, get), (_, end) = hooks.STAGE_HOOKS
    lands, fails, waits = KVPoll.Success, KVPoll.Failed, KVPoll.Transferring
    first = Stage(hooks, {"a": lands, "b": fails, "c": lands, "d": lands, "e": waits}, "peer_lost: gone")
    ended = get(None, first)
    second = Stage(hooks, {"a": lands, "b": lands, "c": fails, "d": waits, "e": lands}, "deadline: over", ended)
    ended = get(None, second)
    for stage in (first, second):
        ended = end(Stage.end, stage, ended)
        assert {rid: state for rid, (state, _) in stage.ended.items()} == {"a": lands, "b": fails, "c": fails}
        assert [stage.ended[rid][1] for rid in "bc"] == ["peer_lost: gone", "deadline: over"]


@pytest.mark.parametrize(("stages", "pool", "first"), [(1, {}, 0), (2, {"start_layer": 16}, 16)])
def test_the_first_layer_of_a_stage_is_that_of_its_pool(
    stages: int, pool: dict[str, int], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool of an engine without stages is not asked."""
    context = {"pp_size": stages, "disaggregation_mode": "decode", "disaggregation_transfer_backend": "pdtransfer"}
    hooks = with_stand_ins("hooks", monkeypatch, **context, enable_hisparse=False)
    monkeypatch.setattr(process, "first_layer", 0)
    made = SimpleNamespace(token_to_kv_pool=SimpleNamespace(**pool))
    hook = dict(hooks.HOOKS)["sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._init_pools"]
    assert hook(lambda _: made, SimpleNamespace(is_draft_worker=False, device="other")) is made
    assert process.first_layer == first
