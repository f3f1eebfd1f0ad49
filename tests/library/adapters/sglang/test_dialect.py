"""What a version lacks is supplied, or refused by name: with modules that have as little as SGLang 0.5.17's."""

from __future__ import annotations

import traceback
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest

from pdtransfer.errors import ConfigError
from tests.library.adapters.sglang.sglang_modules import ROOM, KVPoll, KVTransferError, ServerArgs, with_stand_ins


@pytest.fixture
def dialect(monkeypatch: pytest.MonkeyPatch) -> Any:
    return with_stand_ins("dialect", monkeypatch)


def manager(state: KVPoll) -> Any:
    states = {ROOM: state}
    return SimpleNamespace(
        request_status=states, check_status=states.__getitem__, connection_pool={"host:1_0": 1, "host:12_0": 2},
        failure_lock=Lock(), failure_records={ROOM: "peer_lost: gone"},
    )  # fmt: skip


def test_a_request_that_has_failed_stays_failed(dialect: Any) -> None:
    """Also when its last pages leave after that; and one that was cleared stays unknown."""
    kv_manager = dialect.KVManager()
    for state in (KVPoll.Bootstrapping, KVPoll.WaitingForInput, KVPoll.Failed, KVPoll.Transferring, KVPoll.Success):
        kv_manager.update_status(ROOM, state)
    assert kv_manager.request_status == {ROOM: KVPoll.Failed}
    kv_manager.request_status.clear()
    for state in (KVPoll.Transferring, KVPoll.Failed, KVPoll.Success):
        kv_manager.update_status(ROOM, state)
    assert kv_manager.request_status == {}
    kv_manager.update_status(ROOM, KVPoll.Bootstrapping)
    kv_manager.update_status(ROOM, KVPoll.Transferring)
    assert kv_manager.request_status == {ROOM: KVPoll.Transferring}


@pytest.mark.parametrize("side", ["KVSender", "KVReceiver"])
def test_requests_poll_and_fail(dialect: Any, side: str) -> None:
    request = getattr(dialect, side)(manager(KVPoll.Transferring))
    assert request.poll() is KVPoll.Transferring
    request.kv_mgr.request_status[ROOM] = KVPoll.Failed
    assert request.poll() is KVPoll.Failed
    with pytest.raises(KVTransferError, match="peer_lost: gone"):
        request.failure_exception()
    assert request.poll() is KVPoll.Failed


@pytest.mark.parametrize(
    ("side", "state"), [("KVSender", KVPoll.Bootstrapping), ("KVReceiver", KVPoll.WaitingForInput)]
)
def test_requests_end_by_sglangs_own_limits(dialect: Any, side: str, state: KVPoll) -> None:
    request = getattr(dialect, side)(manager(state))
    assert request.poll() is state
    request.timed_out = KVPoll.Failed
    assert request.poll() is KVPoll.Failed


def test_a_server_that_is_gone_is_forgotten_and_no_other_one(dialect: Any) -> None:
    receiver = dialect.KVReceiver(manager(KVPoll.Failed))
    receiver.invalidate_cached_bootstrap_infos()
    assert receiver.kv_mgr.connection_pool == {"host:12_0": 2}


@pytest.mark.parametrize("elsewhere", [True, False], ids=["another rank's", "this rank's"])
def test_pages_of_a_failed_request_are_held_until_no_rank_has_a_writer(
    dialect: Any, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang reuses them as soon as it reads Failed."""
    import torch

    here, given_up, others = [elsewhere], [], [not elsewhere]

    class Receiver(dialect.KVReceiver):
        def is_abort_release_safe(self) -> bool:
            return here[0]

        def _send_abort_notification(self) -> None:
            given_up.append(self.bootstrap_room)

    def all_reduce(drained: Any, op: Any, group: str) -> None:
        assert (op, group) == (torch.distributed.ReduceOp.MIN, "gloo")
        drained.mul_(torch.tensor(others, dtype=torch.uint8))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    requests = [SimpleNamespace(kv_receiver=Receiver(manager(KVPoll.Failed))), SimpleNamespace(kv_receiver=object())]
    queue = SimpleNamespace(queue=requests, gloo_group="gloo")
    states = [int(KVPoll.Failed), int(KVPoll.Failed)]
    (_, hook), *_ = dialect.HOOKS
    for _ in range(2):
        assert hook(lambda _: list(states), queue) == [KVPoll.Transferring, KVPoll.Failed]
    assert given_up == [ROOM]  # once, also where only another rank has failed
    here[0] = others[0] = True
    assert hook(lambda _: list(states), queue) == states


def test_a_release_that_is_deferred_is_made_before_the_cache_can_be_flushed(dialect: Any) -> None:
    dialect.HAS |= {"resolves_releases"}
    *_, (name, hook) = dialect.HOOKS
    assert name.endswith("DecodeTransferQueue.pop_transferred")
    steps = list[str]()

    def popped(receiver: object) -> list[str]:
        queue = SimpleNamespace(
            queue=[SimpleNamespace(kv_receiver=receiver)], resolve_deferred_releases=lambda: steps.append("released")
        )
        return hook(lambda queue, names: steps.append("popped") or names, queue, ["r1"])

    assert popped(dialect.KVReceiver(manager(KVPoll.Failed))) == ["r1"]
    assert steps == ["popped", "released"]
    assert popped(object()) == ["r1"], "another backend's"
    assert steps == ["popped", "released", "popped"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"speculative_algorithm": "EAGLE"}, r"speculative_algorithm: SGLang 0\.5\.17 .*; 0\.5\.20 is the first"),
        ({"pp_size": 2}, r"pp_size: SGLang 0\.5\.17 .*; 0\.5\.23 is the first"),
        ({"enable_hierarchical_cache": True}, r"enable_hierarchical_cache: SGLang 0\.5\.17 .*; 0\.5\.23 is the first"),
    ],
)
def test_what_a_version_lacks_is_refused_by_name(dialect: Any, given: dict[str, Any], text: str) -> None:
    dialect.check_features(ServerArgs())
    with pytest.raises(ConfigError, match=text) as refused:
        dialect.check_features(ServerArgs(**given))
    assert "docs/troubleshooting.md" in "".join(traceback.format_exception(refused.value))


def test_a_drafter_without_kv_needs_nothing_of_a_version(dialect: Any) -> None:
    dialect.check_features(ServerArgs("NGRAM"))
    assert dialect.draft_runners(None, ServerArgs("NGRAM")) == ()


def test_names_of_sglangs_own_are_not_guessed(dialect: Any) -> None:
    """A worker whose runners are not known would have its caches where no peer can write them, and a stage whose first
    layer is not known would have another's layers."""
    text = r"^speculative_algorithm: EAGLE: object of SGLang 0\.5\.17 has no _draft_model_runners: leave"
    with pytest.raises(ConfigError, match=text):
        dialect.draft_runners(object(), ServerArgs("EAGLE"))
    with pytest.raises(ConfigError, match=r"^pp_size: object of SGLang 0\.5\.17 has no start_layer"):
        dialect.first_layer(object())
    assert dialect.first_layer(SimpleNamespace(start_layer=7)) == 7


def test_what_kv_args_of_later_versions_have_is_there(dialect: Any) -> None:
    args = SimpleNamespace()
    dialect.complete(args)
    assert vars(args) == {"num_draft_entries": 0, "swa_kv_cache_layout": "nhd"}


@pytest.mark.parametrize("never", [0.0, 1.0])
def test_requests_land_on_the_host_above_a_threshold_that_is_set(
    dialect: Any, never: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.21 means never by 0, later versions by 1, and earlier ones have no threshold."""
    assert not dialect.receives_on_host(SimpleNamespace())
    dialect.HAS |= {"destinations"}

    class Newer:
        def __init__(self, disaggregation_decode_host_receive_threshold: float = never) -> None:
            self.disaggregation_decode_host_receive_threshold = disaggregation_decode_host_receive_threshold

    monkeypatch.setattr(dialect, "ServerArgs", Newer)
    assert [dialect.receives_on_host(Newer(*given)) for given in ((), (0.5,))] == [False, True]


def check_rank(monkeypatch: pytest.MonkeyPatch, mode: str = "prefill", **more: Any) -> None:
    """Checks a rank with these sizes and options."""
    rank = {"attn_cp_size": 1, "dcp_size": 1, "enable_dsa_cache_layer_split": False} | more
    dialect = with_stand_ins("dialect", monkeypatch, **rank)
    dialect.check_context_parallelism(SimpleNamespace(**rank, disaggregation_mode=SimpleNamespace(value=mode)))


def test_ranks_of_context_parallelism_that_have_the_same_may_send(monkeypatch: pytest.MonkeyPatch) -> None:
    check_rank(monkeypatch)
    check_rank(monkeypatch, attn_cp_size=4, kv_shard_size=1)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"dcp_size": 2}, "dcp_size: a cache whose tokens are spread over ranks is not supported"),
        ({"kv_shard_size": 2}, "enable_kv_cache_sharding: a cache whose pages are spread"),
        ({"enable_dsa_cache_layer_split": True}, "enable_dsa_cache_layer_split: a cache whose layers are"),
        ({"enable_cp_tp_group_sharing": True}, "enable_prefill_cp: a cache whose heads of its states are"),
        ({"mode": "decode"}, "attn_cp_size: SGLang's decode engines receive on one rank"),
    ],
)
def test_what_ranks_do_not_all_have_is_refused(
    option: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=text):
        check_rank(monkeypatch, **{"attn_cp_size": 2} | option)
