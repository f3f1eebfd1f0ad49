"""What a bootstrap server answers: a wrong answer is refused with the field's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdtransfer.adapters.kit.peers import Reachable, Remembered, RequestError
from pdtransfer.adapters.sglang.peers import check_room, dp_ranks, rank_fields, server_fields, sources_of
from tests.support.json_values import spoiled

LOCAL = {"rank_ip": "127.0.0.1", "rank_port": 7801}


@pytest.mark.parametrize("room", [0, -1, 2**63, 2**64 - 1, -(10**30), True, "7", None, 1.0, 10**300])
def test_a_room_that_cannot_be_is_refused_with_its_field(room: object) -> None:
    check_room(1)
    check_room(2**63 - 1)
    with pytest.raises(RequestError, match=r"^bootstrap_room: .*expected int"):
        check_room(room)


def test_ranks_are_endpoints_in_their_order() -> None:
    ranks = [LOCAL, {"rank_ip": "::1", "rank_port": 1, "pp_rank": 3}]
    assert sources_of(ranks, Reachable()) == ["tcp://127.0.0.1:7801", "tcp://[::1]:1"]


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("10.0.0.1", "bootstrap_host: 10.0.0.1 is another host"),
        ("k@127.0.0.1", "k@tcp://127.0.0.1:7801"),
        ("127.0.0.1/x", "127.0.0.1/x"),
    ],
)
def test_a_rank_that_must_not_be_dialled_is_refused(host: str, text: str) -> None:
    with pytest.raises(RequestError) as raised:
        sources_of([LOCAL, LOCAL | {"rank_ip": host}], Reachable(field="bootstrap_host"))
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


SIZES = "attn_tp_size", "attn_cp_size", "dp_size", "pp_size"
SERVER: dict[str, Any] = {
    **dict.fromkeys(SIZES, 1), "follow_bootstrap_room": True, "page_size": 16, "kv_cache_dtype": "auto",
    "kv_layout": None, "enable_dsa_cache_layer_split": False, "enable_kv_cache_sharding": False,
    "dsv41_spec_layout": {"block": 16}, "decode_allocation_policy": "early", "prefill_http_port": 30_000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("edge", "right"),
    [(server_fields, SERVER), (rank_fields, LOCAL), (dp_ranks, {"7": 0})],
    ids=["server", "rank", "data parallel ranks"],
)
def test_any_value_of_any_field_of_an_answer_is_taken_or_refused_by_name(
    edge: Callable[[Any], dict[str, Any]], right: dict[str, Any]
) -> None:
    assert edge(right) == right
    for case, answer in spoiled(right):
        why = ""
        try:
            known = edge(answer)
        except RequestError as error:
            why = str(error)
        else:
            for name, value in known.items():
                kinds = {type(right.get(name, 0)), type(None)} if edge is server_fields else {type(right.get(name, 0))}
                assert type(value) in kinds or name == "kv_layout", case
        field = case.partition(" ")[0]
        assert not why or field in why or field in ("answer", "7", "unknown"), (case, why)
        assert "\n" not in why


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [-1, 0, 65, 10**12])
def test_a_wrong_number_of_ranks_is_refused_with_its_field(name: str, size: int) -> None:
    server_fields(SERVER | {name: 64})
    with pytest.raises(RequestError, match=f"^{name}: {size}, expected int"):
        server_fields(SERVER | {name: size})


def test_more_ranks_than_a_room_can_have_are_refused() -> None:
    server_fields(SERVER | {"attn_tp_size": 64, "pp_size": 4})
    with pytest.raises(RequestError, match="attn_tp_size: 320 ranks"):
        server_fields(SERVER | {"attn_tp_size": 64, "pp_size": 5})


def test_the_oldest_entries_are_forgotten() -> None:
    table = Remembered[str, str](2)
    for key, value in (("a", "one"), ("b", "one"), ("a", "two"), ("c", "one")):
        table.keep(key, value)
    assert dict(table) == {"a": "two", "c": "one"}
