"""The engine with hybrid pools: one process and two agree in every layout, and a wrong byte is named by component."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch
from pdtransfer_lab.models.factory import create, generate_many

from pdtransfer.errors import ConfigError
from pdtransfer.layout.layout_builders import ITEM_LAYOUTS
from pdtransfer.serve.engine_api import Alone, Broken, EngineConfig, Finished, HiSparse, Request, Token
from pdtransfer.wire import Ranks, Sampling
from tests.support.component_pair import ComponentPair

OPTIONS = {"pools": "deepseek_v4", "requests": "4", "window_tokens": "48"}
LENGTHS = (1, 5, 47, 48, 130, 300)
SAMPLING = Sampling(max_tokens=9, ignore_eos=True)
PROMPTS = [np.random.default_rng(at).integers(0, 256, length) for at, length in enumerate(LENGTHS)]


def config(role: Any = "decode", **more: Any) -> EngineConfig:
    options = OPTIONS | more.pop("options", {})
    given = {"slots": 4_096, "page_size": 64, "chunk_tokens": 100, "host_layout": "layer_first"} | more
    return EngineConfig(role=role, options=options, **given)


def requests() -> list[Request]:
    return [Request(room=at, prompt=prompt, sampling=SAMPLING) for at, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def expected() -> Any:
    return generate_many(config(host_layout="page_first"), [(prompt, SAMPLING) for prompt in PROMPTS])


@pytest.mark.parametrize("page_tokens", ["1", "64", "256"])
@pytest.mark.parametrize("host_layout", ITEM_LAYOUTS)
def test_answers_digests_and_rows_are_a_single_processs(expected: Any, host_layout: str, page_tokens: str) -> None:
    index = "hbm" if page_tokens == "64" else "dram"
    options = {"page_tokens": page_tokens, "index_memory": index, "requests": "8"}
    both = ComponentPair(create(config("prefill")), create(config(host_layout=host_layout, options=options)))
    for request in requests():
        both.hand_over(request)
    events = both.run()
    for at, wanted in enumerate(expected):
        *tokens, end = events[at]
        assert all(isinstance(each, Token) for each in tokens)
        assert tuple(each.id for each in tokens) == wanted.tokens
        assert end == Finished(
            room=at, reason="length", tokens_digest=wanted.tokens_digest, logits_digest=wanted.logits_digest,
            kv_digest=wanted.kv_digest,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["c4", "c128", "window", "c4_state", "index_state", "c128_state", "index"])
def test_a_byte_that_did_not_arrive_breaks_its_room_alone_and_names_the_component(expected: Any, name: str) -> None:
    both = ComponentPair(create(config("prefill")), create(config(options={"requests": "8"})))
    for request in requests()[-2:]:
        both.hand_over(request)
    component = both.target[name]
    slot = int(both.slots[5][name][component.rows(LENGTHS[5]) // 2])
    at = component.layout.address(len(component.layout.planes) - 1, slot)
    both.memories["dram"][at] ^= 1
    events = both.run()
    assert [type(each) for each in events[5]] == [Broken]
    assert f"component {name!r}" in events[5][0].detail
    assert events[4][-1].kv_digest == expected[4].kv_digest


def test_a_row_that_changes_while_the_room_decodes_changes_its_digests(expected: Any) -> None:
    both = ComponentPair(create(config("prefill")), create(config(host_layout="page_first")))
    both.hand_over(requests()[4])
    both.decode.step()
    window = both.target["window"]
    both.memories["dram"][window.layout.address(0, int(both.slots[4]["window"][30]))] ^= 1
    (*_, end) = both.run()[4]
    assert end.kv_digest != expected[4].kv_digest
    assert end.logits_digest != expected[4].logits_digest


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_sets_its_card_on_the_thread_that_steps_it(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = create(config(role))
    engine._device, cards = torch.device("cuda", 1), list[torch.device]()
    monkeypatch.setattr(torch.cuda, "set_device", cards.append)
    assert engine.step() == []
    assert cards == [engine._device]


def test_pages_and_states_come_back_and_a_full_pool_waits() -> None:
    engine: Any = create(config("prefill"))
    rooms = requests()
    assert [engine.admit(each) for each in rooms] == [True] * 4 + [False] * 2  # states for four
    engine.free(0)
    assert engine.admit(rooms[4])
    assert not engine.admit(rooms[5])
    for room in range(1, 5):
        engine.free(room)
    assert engine.idle
    assert [engine.admit(replace(each, room=10 + each.room)) for each in rooms[:4]] == [True] * 4


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"options": {"pools": "deepseek_v9"}}, "engine_option pools: Invalid enum value 'deepseek_v9'"),
        ({"options": {"top_k": "16"}}, "engine_option = 'top_k=16': must be one of "),
        ({"options": {"ratios": "4,8"}}, "ratios: 8 of layer 1 must be one of 0, 4, 128"),
        ({"options": {"ratios": "4;8"}}, "engine_option ratios: "),
        ({"options": {"requests": "0"}}, "engine_option requests: "),
        ({"options": {"page_tokens": "24"}}, "page_size: 6 is not a power of two"),
        ({"host_layout": "page_head"}, "component 'c4': host layout of values, scale: 'page_head' must be one of"),
        (
            {"hisparse": HiSparse(device_slots=64, hot_tokens=16)},
            "pools = deepseek_v4: they are decoded from the arena",
        ),
        ({"group": Alone(Ranks(0, 2))}, "tp_size = 2, pp_size = 1: one process has the hybrid pools"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_makes_no_pools_is_refused_with_its_name(role: str, more: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        create(config(role, **more))


def test_an_aux_of_another_engine_or_prompt_is_refused() -> None:
    both = ComponentPair(create(config("prefill")), create(config()))
    request = requests()[1]
    aux, slots = both.land(request), both.slots[1]
    for wrong, text in ((b"\x90", "aux of 1 bytes"), (b"", "aux of 0 bytes")):
        with pytest.raises(ValueError, match=text):
            both.decode.admit(request, slots, wrong)
    with pytest.raises(ValueError, match="aux: for a prompt of 5 tokens, the room's has 47"):
        both.decode.admit(requests()[2], slots, aux)
    with pytest.raises(ValueError, match="slots of c4: 1, expected 4"):
        both.decode.admit(request, slots | {"c4": slots["c4"][:1]}, aux)
    with pytest.raises(ValueError, match="expected components"):
        both.decode.admit(request, {"c4": slots["c4"]}, aux)
    with pytest.raises(ValueError, match="4100 tokens, the arena has 4096 slots"):
        both.decode.check(replace(request, sampling=Sampling(max_tokens=4_095)))
