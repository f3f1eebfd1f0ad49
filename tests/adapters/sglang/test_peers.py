"""What a bootstrap server answers: a wrong answer is refused with the field's name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdtransfer.adapters.reachable import Reachable, RequestError
from pdtransfer.adapters.sglang.peers import ADDRESSES_MAX, SIZES, Refusals, check_room, check_sizes, sources_of

LOCAL = {"rank_ip": "127.0.0.1", "rank_port": 7801}


def sizes(**more: int) -> Any:
    return SimpleNamespace(**(dict.fromkeys(SIZES, 1) | more))


@pytest.mark.parametrize("room", [0, -1, 2**63, 2**64 - 1, -(10**30)])
def test_a_room_that_cannot_be_is_refused_with_its_field(room: int) -> None:
    check_room(1)
    check_room(2**63 - 1)
    with pytest.raises(RequestError, match=f"bootstrap_room: {room}, from 1 to 9223372036854775807 can be"):
        check_room(room)


def test_ranks_are_endpoints_in_their_order() -> None:
    ranks = [LOCAL, {"rank_ip": "::1", "rank_port": 1, "pp_rank": 3}]
    assert sources_of(ranks, Reachable()) == ["tcp://127.0.0.1:7801", "tcp://[::1]:1"]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"rank_ip": None}, "rank_ip: 'None' is not a host"),
        ({"rank_ip": ["127.0.0.1"]}, "rank_ip: "),
        ({"rank_ip": ""}, "rank_ip: '' is not a host"),
        ({"rank_ip": "1" * 513}, "rank_ip: '1111"),
        ({"rank_ip": "10.0.0.1"}, "bootstrap_host: 10.0.0.1 is another host"),
        ({"rank_ip": "k@127.0.0.1"}, "k@tcp://127.0.0.1:7801"),
        ({"rank_ip": "127.0.0.1/x"}, "127.0.0.1/x"),
        ({"rank_port": "7801"}, "rank_port: '7801' is not a port"),
        ({"rank_port": True}, "rank_port: 'True' is not a port"),
        ({"rank_port": 0}, "rank_port: '0' is not a port"),
        ({"rank_port": 65_536}, "rank_port: '65536' is not a port"),
    ],
)
def test_a_wrong_rank_is_refused_with_its_field(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError) as raised:
        sources_of([LOCAL, LOCAL | wrong], Reachable(field="bootstrap_host"))
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_rank_without_its_fields_is_refused() -> None:
    with pytest.raises(RequestError, match="rank_ip"):
        sources_of([{}], Reachable())


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [-1, 0, 65, 10**12])
def test_a_wrong_number_of_ranks_is_refused_with_its_field(name: str, size: int) -> None:
    check_sizes(sizes(**{name: 64}))
    with pytest.raises(RequestError, match=f"{name}: {size}, from 1 to 64 can be"):
        check_sizes(sizes(**{name: size}))


def test_more_ranks_than_a_room_can_have_are_refused() -> None:
    check_sizes(sizes(attn_tp_size=64, pp_size=4))
    with pytest.raises(RequestError, match="attn_tp_size: 320 ranks"):
        check_sizes(sizes(attn_tp_size=64, pp_size=5))


def test_why_a_server_was_refused_is_known_until_it_fits() -> None:
    refusals = Refusals()
    refusals.add("127.0.0.1:1", "one")
    refusals.add("127.0.0.1:1", "two")
    assert (refusals.reason("127.0.0.1:1"), refusals.reason("127.0.0.1:2")) == ("two", "")
    refusals.discard("127.0.0.1:1")
    refusals.discard("127.0.0.1:1")
    assert refusals.reason("127.0.0.1:1") == ""


def test_reasons_are_bounded() -> None:
    refusals = Refusals()
    for at in range(ADDRESSES_MAX + 1):
        refusals.add(str(at), "why")
    assert (refusals.reason("0"), refusals.reason("1"), refusals.reason(str(ADDRESSES_MAX))) == ("", "why", "why")
