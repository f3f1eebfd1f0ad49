"""Requests to a pair of SGLang's servers, some of which are given up."""

from __future__ import annotations

import random
import time
from typing import Any, TypeAlias

from tests.support.sglang_engine import ANSWER_S, SglangPair, SglangServer
from tests.support.vllm_engine import prompts

Family: TypeAlias = tuple[SglangPair, SglangServer]
"""A prefill and a decode server, and one that does both, of one model."""


def mixed_requests(pair: SglangPair, single: SglangServer) -> None:
    """200 of them, some given up at any time: on one side first, and then, as a router does, on the other. Nothing is
    left behind, and the others have the tokens of one server."""
    draw = random.Random(16)
    asked = prompts(*(draw.randrange(5, 300) for _ in range(200)), seed=16)
    kept: list[tuple[list[int], Any]] = []
    given_up: list[tuple[Any, SglangServer, str, Any]] = []
    for at, prompt in enumerate(asked):
        room, fate = pair.room(), draw.choice(["", "", "", "decode", "prefill"])
        names = f"p{at:03}", f"d{at:03}"  # an abort ends every request whose name begins with its own
        sent = pair.prefill.add(prompt, tokens=8, rid=names[0], **room)
        received = pair.decode.add(prompt, tokens=8, rid=names[1], **room)
        if not fate:
            kept.append((prompt, received))
            continue
        time.sleep(draw.choice([0.0, 0.02, 0.2]))
        if fate == "decode":
            pair.decode.abort(names[1])
            given_up.append((received, pair.prefill, names[0], sent))
        else:
            pair.prefill.abort(names[0])
            given_up.append((sent, pair.decode, names[1], received))
    for first, other, name, second in given_up:
        first.exception(4 * ANSWER_S)
        other.give_up(second, name)
    found = [received.result(4 * ANSWER_S) for _, received in kept]
    pair.settles()
    few = draw.sample(range(len(kept)), 24)
    assert [found[at] for at in few] == single.generate([kept[at][0] for at in few], tokens=8)
