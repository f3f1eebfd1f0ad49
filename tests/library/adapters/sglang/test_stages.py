"""The stages of a decode engine end each request together, and alike."""

from __future__ import annotations

from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

from pdtransfer import KVPoll as HandOff
from pdtransfer.adapters.sglang import process
from pdtransfer.adapters.sglang.options import ELSEWHERE, Ended, check_options, ended_here, ended_so_far
from pdtransfer.errors import ConfigError
from pdtransfer.wire import Ranks
from tests.library.adapters.sglang.sglang_modules import ROOM, KVPoll, KVTransferError, ServerArgs, with_stand_ins
from tests.library.adapters.sglang.sglang_ranks import stage_of, world


@pytest.mark.parametrize("option", ["enable_hierarchical_cache", "enable_hisparse"])
def test_what_loads_a_request_at_one_stage_alone_is_refused(option: str) -> None:
    options = {"enable_hierarchical_cache": False, "enable_hisparse": False}
    for changed in (
        {},
        {option: True, "pp_size": 1},
        {"enable_hierarchical_cache": True, "disaggregation_mode": "prefill"},
    ):
        check_options(ServerArgs(**{"pp_size": 2} | options | changed), on_host=False)
    with pytest.raises(ConfigError, match=f"{option}: stages of a decode engine do not agree yet"):
        check_options(ServerArgs(**{"pp_size": 2} | options | {option: True}), on_host=False)


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

    def __init__(self, receiver: type, number: int, rid: str, state: KVPoll, failure: str) -> None:
        self.req = SimpleNamespace(rid=rid, bootstrap_room=100 + number)
        self.kv_receiver, self.metadata_buffer_index = type("Receiver", (receiver,), {})(None), number
        vars(self.kv_receiver).update(poll=lambda: self.state, fail=self.fail, failure=failure)
        self.state, self.failure = state, failure

    def fail(self, reason: str) -> None:
        self.state, self.failure = KVPoll.Failed, reason
        vars(self.kv_receiver).update(failure=reason)


class Rows(list[list[int]]):
    """In place of a tensor (rows, 8)."""

    def __getitem__(self, index: Any) -> Any:
        row, column = index
        return super().__getitem__(row)[column]


class Stage:
    """SGLang's scheduler of a stage that has one rank, what the stage before it has sent, and how requests end."""

    def __init__(self, hooks: Any, states: dict[str, KVPoll], failure: str, *sent: Any) -> None:
        queue = [
            Request(hooks.dialect.KVReceiver, number, rid, state, failure)
            for number, (rid, state) in enumerate(states.items())
        ]
        self.rooms = [[request.req.bootstrap_room] * 8 for request in queue]
        buffers = SimpleNamespace(bootstrap_room=Rows(self.rooms))
        self.disagg_decode_transfer_queue = SimpleNamespace(queue=queue, metadata_buffers=buffers)
        self.pp_group = SimpleNamespace(is_first_rank=not sent)
        self.attn_tp_cpu_group = lambda flags, _: flags
        self._pp_recv_pyobj_from_prev_stage = list(sent).pop
        self.ended: dict[str, tuple[KVPoll, str]] = {}
        self.keeps = ""  # a request that it keeps in its queue all the same

    def end(self, ended: Any) -> list[str]:
        """As SGLang has it: the requests that have ended at all stages end here as they are here, and those that have
        landed are passed on."""
        queue = self.disagg_decode_transfer_queue
        for request in [request for request in queue.queue if request.req.rid in ended]:
            if request.req.rid != self.keeps:
                self.ended[request.req.rid] = request.state, request.failure
                queue.queue.remove(request)
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


@pytest.mark.parametrize("room", [0, 7], ids=["nobody's", "another's"])
def test_metadata_of_another_request_fails_it_at_all_stages(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would keep the first at this stage for good, and end the second at this stage alone."""
    hooks = with_stand_ins("hooks", monkeypatch)
    monkeypatch.setattr(process, "decode", object())
    (_, get), (_, end) = hooks.STAGE_HOOKS
    first = Stage(hooks, {"a": KVPoll.Success, "b": KVPoll.Success}, "")
    first.rooms[1][0] = room
    ended = get(None, first)
    second = Stage(hooks, {"a": KVPoll.Success, "b": KVPoll.Success}, "", ended)
    ended = get(None, second)
    for stage in (first, second):
        ended = end(Stage.end, stage, ended)
        assert stage.ended["a"] == (KVPoll.Success, "")
        assert stage.ended["b"] == (
            KVPoll.Failed, f"prefill sent the metadata of bootstrap_room {room}, not of 101"
        )  # fmt: skip


def test_what_stays_at_one_stage_stays_at_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = with_stand_ins("hooks", monkeypatch)
    monkeypatch.setattr(process, "decode", object())
    _, (_, end) = hooks.STAGE_HOOKS
    stages = [Stage(hooks, {"a": KVPoll.Success, "b": KVPoll.Success}, "") for _ in range(2)]
    stages[0].keeps = "b"
    ended = {"a": "", "b": ""}
    for stage in stages:
        ended = end(Stage.end, stage, ended)
        assert list(stage.ended) == ["a"]


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


@pytest.mark.parametrize("stages", [1, 2])
def test_a_stage_has_the_fact_of_all_stages_about_states(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one has no states. An engine without stages has nobody to ask."""
    group = SimpleNamespace(all_gather_object=lambda texts: [["whole:1x24"], texts])
    context = {"pp_group": group, "enable_dsa_cache_layer_split": False, "enable_cp_tp_group_sharing": False}
    backend = with_stand_ins("backend", monkeypatch, **context)
    manager = object.__new__(backend.Manager)
    for name in ("attn_tp_size", "attn_cp_size", "dcp_size"):
        setattr(manager, name, 1)
    manager.attn_tp_rank, manager.pp_rank, manager.pp_size = 0, stages - 1, stages
    manager.kv_args = SimpleNamespace(state_types=[])
    manager._model_config = SimpleNamespace(hf_text_config=SimpleNamespace())
    manager._learn_ranks()
    assert manager._ranks == Ranks(pp_rank=stages - 1, pp_size=stages)
    assert manager._states_fact == ({"states": "whole:1x24"} if stages == 2 else {})


@pytest.mark.parametrize("cp_rank", [0, 1])
def test_of_ranks_that_share_a_context_the_first_sends_alone(cp_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = with_stand_ins("backend", monkeypatch)
    manager, started = object.__new__(backend.Manager), list[str]()
    vars(manager).update(
        attn_cp_rank=cp_rank, _learn_ranks=lambda: started.append("ranks"),
        _start_prefill=lambda: started.append("node"),
    )  # fmt: skip
    monkeypatch.setattr(
        backend.dialect.KVManager, "register_to_bootstrap", lambda _: started.append("registered"), raising=False
    )
    manager.register_to_bootstrap()
    assert (manager.enable_all_cp_ranks_for_transfer, manager.is_dummy_cp_rank) == (False, cp_rank > 0)
    assert started == ["ranks", "node", "registered"]


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("state", [KVPoll.Bootstrapping, KVPoll.Failed])
def test_a_request_that_has_failed_before_it_begins_opens_no_room(
    takes: bool, state: KVPoll, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, begun = with_stand_ins("backend", monkeypatch), list[int]()
    manager = SimpleNamespace(
        takes=lambda _: takes, request_status={ROOM: state}, sending=SimpleNamespace(begin=begun.append)
    )
    backend.Sender(manager, "host:1", ROOM)
    assert begun == ([ROOM] if takes and state is KVPoll.Bootstrapping else [])


@pytest.mark.parametrize("knows", [True, False], ids=["knows prefill", "does not know prefill"])
def test_a_request_that_fails_at_one_stage_before_it_has_pages_fails_at_prefill_at_once(
    knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill would wait for all stages' grants for minutes, SGLang's own limit. The number may be used again."""
    backend = with_stand_ins("backend", monkeypatch)
    with world(decode_stages=[stage_of([0], []), stage_of([1, 2], [])]) as engines:
        monkeypatch.setattr(backend, "sources_of", lambda infos, _: engines.sources if infos else [])
        engines.begin(ROOM)
        receivers: list[Any] = []
        for rank in engines.decode:
            manager = SimpleNamespace(
                receiving=rank.side, reachable=None, pp_size=2, takes=lambda _: True, turn=rank.turn,
                request_status={ROOM: KVPoll.WaitingForInput}, failure_records={}, failure_lock=Lock(),
                connection_pool={}, is_abort_release_safe=lambda *_: True,
            )  # fmt: skip
            manager.check_status = manager.request_status.get
            receivers.append(backend.Receiver(manager, "host:1", ROOM))
        failed = receivers[0]
        failed.bootstrap_infos = failed.bootstrap_infos if knows else None
        failed.kv_mgr.request_status[ROOM], failed.kv_mgr.failure_records[ROOM] = KVPoll.Failed, "it has failed"
        assert [receiver.poll() for receiver in receivers] == [KVPoll.Failed, KVPoll.WaitingForInput]
        for receiver in receivers:  # as SGLang does on each stage, once one has failed
            with pytest.raises(KVTransferError):
                receiver.failure_exception()
            receiver.clear()
        engines.until(ROOM, HandOff.FAILED, engines.prefill)
        reason = engines.prefill[0].states[ROOM][-1].reason
        reasons = [ELSEWHERE, *(["it has failed"] if knows else [])]
        assert reason.partition("gave it up: ")[2] in [f"bootstrap_room {ROOM}: {text}" for text in reasons]
        engines.hand_over(ROOM, source=[5, 2], target=[1, 8])
