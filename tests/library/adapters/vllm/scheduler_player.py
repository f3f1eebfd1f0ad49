"""Plays scenarios (tests/support/scenarios.py) of a vLLM engine's scheduler side: its requests, steps, and orders.

    engine groups=page16,window20@2     KV cache groups with their index, where it is not their place; roles=sends
    request a 40 sends transfer_id=x    a request of 40 tokens; `receives`: of p0's request x; none: without a hand-off
    matched a cached=16                 what comes from a peer, where 16 tokens are cached
    blocks a 23 7,3,5/8,2               it has these blocks, by group, for 23 tokens from a peer
    step new=a:0+24@7,3;c:0+9@4 more=b:40+1 preempted=d resumed=e:0+40@9
                                        computes 24 tokens of a, none before; 1 of b, without a new block
    failed a 7,3                        loads of these requests, or into these blocks, have failed
    sent a                              nothing reads its blocks any more
    end a aborted                       the request ends
    prefill a 40 7,3,5                  `request a 40 sends` and `step new=a:0+40@7,3,5`
    load a 40 7,3,5 cached=16           `request a 40 receives`, `matched a cached=16` and `blocks`

A request is followed by the tokens that are to come from a peer, unless there are none. An order has its request, and
each field that is not its default; rows are GROUP[rows]@blocks. Behind the effects: whether a peer waits for the next
orders, and the blocks that are kept for it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from pdtransfer import room_id
from pdtransfer.adapters.vllm import scheduler
from pdtransfer.adapters.vllm.kinds import PAGED, STATE
from pdtransfer.adapters.vllm.orders import KVGroup, Orders, RankRuns, Rows
from pdtransfer.adapters.vllm.scheduler import SchedulerSide
from tests.support.scenarios import Player

ADDRESS = "tcp://127.0.0.1:7801"
PARAMS: dict[str, Any] = {
    "": {}, "sends": {"do_remote_decode": True, "do_remote_prefill": False},
    "receives": {
        "do_remote_prefill": True, "remote_engine_id": "p0", "remote_request_id": "x", "remote_host": "127.0.0.1",
        "remote_port": 7801, "tp_size": 1,
    },
}  # fmt: skip
ANSWERED = PARAMS["receives"] | {
    "do_remote_decode": False, "pp_size": 1, "transfer_mode": "push", "remote_endpoints": [ADDRESS]
}  # fmt: skip
STATUS = {"": "FINISHED_LENGTH_CAPPED", "aborted": "FINISHED_ABORTED", "failed": "FINISHED_ERROR"}
SHORT = {ADDRESS: "p0", -1: "-"}
_GROUP = re.compile(r"(page|window|chunk|state)(\d+)(?:@(\d+))?(?:/(\d)/(\d))?")
_COMPUTED = re.compile(r"(.+):(\d+)\+(\d+)(?:@(.*))?")
_KINDS = {
    "page": PAGED.of, "state": STATE.of, "window": lambda size: PAGED.of(16, window=size),
    "chunk": lambda size: PAGED.of(16, chunk=size),
}  # fmt: skip


class Pool:
    """vLLM's: how often each block is counted."""

    def __init__(self) -> None:
        self.blocks, self.counts = range(64), Counter[int]()

    def touch(self, blocks: Iterable[int]) -> None:
        self.counts.update(blocks)

    def free_blocks(self, ordered_blocks: Iterable[int]) -> None:
        self.counts.subtract(ordered_blocks)
        assert min(self.counts.values()) == 0


class SchedulerPlayer(Player):
    """One engine's scheduler side."""

    makes = "engine"

    def effects(self, verb: str, words: list[str]) -> list[str]:
        named = dict(word.split("=", 1) for word in words if "=" in word)
        with patch.object(scheduler, "log") as log:
            done = [*getattr(self, f"do_{verb}")(*(word for word in words if "=" not in word), **named)]
        logged = ((level, json.dumps(text % tuple(arguments))) for level, (text, *arguments), _ in log.method_calls)
        return done + [f"{level} {text}" for level, text in logged]

    def state(self) -> dict[str, str]:
        counts = self.side.block_pool.counts if self.side.block_pool else Counter[int]()
        return {
            "": "a peer waits" if self.side.has_word_for_peers else "no peer waits",
            "kept": ",".join(map(str, counts.elements())) or "none",
        }

    def do_engine(
        self, groups: str = "page16", roles: str = "sends,receives", pool: str = "true", labels: str = "99"
    ) -> list[str]:
        """A group may have /DCP_SIZE/STRIPES; `labels` are remembered."""
        found = [
            KVGroup(int(index or place), _KINDS[kind](int(size)), *map(int, filter(None, stripes)))
            for place, (kind, size, index, *stripes) in enumerate(
                _GROUP.fullmatch(each).groups() for each in groups.split(",")
            )
        ]
        able = {role: role in roles for role in ("sends", "receives")}
        with patch.object(scheduler, "LABELS_MAX", int(labels)):
            self.side = SchedulerSide(found, engine_id="p0", **able)
        self.side.on_ranks({(0, 0): RankRuns(ADDRESS, {"facts": {}}, (1_000,) * len(found))})
        self.side.block_pool = Pool() if pool == "true" else None
        self.requests = dict[str, Any]()
        self.labels = dict[int, str]()
        return []

    def do_request(self, name: str, tokens: str, kind: str = "", **more: str) -> Iterator[str]:
        """`prompt` are token ids, `skip` has its whole prompt computed, `params` are no object; others are parameters
        of the hand-off."""
        prompt, skips = more.pop("prompt", ""), "skip" in more and bool(more.pop("skip"))
        ids = [*map(int, prompt.split(","))] if prompt not in ("", "none") else [*range(int(tokens))]
        params = PARAMS[kind] | {key: _json(text) for key, text in more.items()}
        asked = self.requests[name] = SimpleNamespace(
            request_id=name, num_prompt_tokens=int(tokens), kv_transfer_params=params.get("params", params),
            prompt_token_ids=None if prompt == "none" else ids, skip_reading_prefix_cache=skips, max_tokens=16,
            _all_token_ids=ids.copy(),
        )  # fmt: skip
        labels = [params.get("transfer_id"), params.get("abort_transfer_id"), f"p0/{name}"]
        for label in map(str, [*labels, f"p0/{params.get('remote_request_id')}"]):
            self.labels[room_id(label)] = label
        self.side.on_new_request(asked)
        left = asked.num_prompt_tokens
        assert asked.prompt_token_ids in (None, ids[:left])
        assert asked._all_token_ids == ids[:left]
        if (left, asked.max_tokens) != (int(tokens), 16):
            yield f"{name} of {left} tokens generates {asked.max_tokens}"
        if (found := self.side.matched_tokens(asked, 0)) != 0:
            yield "ask again" if found is None else f"{found} tokens"

    def do_matched(self, *names: str, cached: str = "0") -> Iterator[str]:
        for name in names:
            found = self.side.matched_tokens(self.requests[name], int(cached))
            yield "ask again" if found is None else f"{found} tokens"

    def do_blocks(self, name: str, tokens: str, table: str) -> list[str]:
        self.side.on_blocks(self.requests[name], _table(table), int(tokens))
        return []

    def do_load(self, name: str, tokens: str, table: str, cached: str = "0", **more: str) -> Iterator[str]:
        yield from self.do_request(name, tokens, "receives", **more)
        external = self.side.matched_tokens(self.requests[name], int(cached))
        yield from [f"{external} tokens"] * (cached != "0")
        self.do_blocks(name, str(external), table)

    def do_prefill(
        self, name: str, tokens: str, table: str, count: str = "", before: str = "0", **more: str
    ) -> Iterator[str]:
        """It computes all that is left of the prompt, or `count` tokens."""
        yield from self.do_request(name, tokens, "sends", **more)
        yield from self.do_step(new=f"{name}:{before}+{count or int(tokens) - int(before)}@{table}")

    def do_step(self, **given: str) -> Iterator[str]:
        orders = self.orders(**given)
        for kind in fields(orders):
            for order in getattr(orders, kind.name):
                yield f"{kind.name.title()} {order}" if isinstance(order, str) else self._shown(order)

    def orders(self, new: str = "", more: str = "", resumed: str = "", preempted: str = "") -> Orders:
        def computed(text: str) -> list[tuple[str, int, int, Any]]:
            found = [_COMPUTED.fullmatch(each).groups() for each in text.split(";") if each]
            return [(name, int(before), int(count), table and _table(table)) for name, before, count, table in found]

        again, going_on, first = computed(resumed), computed(more), computed(new)
        cached = SimpleNamespace(
            req_ids=[name for name, *_ in again + going_on], resumed_req_ids={name for name, *_ in again},
            num_computed_tokens=[before for _, before, *_ in again + going_on],
            new_block_ids=[blocks for *_, blocks in again + going_on],
        )  # fmt: skip
        return self.side.orders(SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, block_ids=blocks, num_computed_tokens=before)
                for name, before, _, blocks in first
            ],
            scheduled_cached_reqs=cached, preempted_req_ids=preempted.split(",") if preempted else None,
            num_scheduled_tokens={name: count for name, _, count, _ in first + again + going_on},
        ))  # fmt: skip

    def do_failed(self, requests: str = "none", blocks: str = "none") -> list[str]:
        names, failed = ({*text.split(",")} - {"none"} for text in (requests, blocks))
        self.side.on_failed_loads(names, {*map(int, failed)})
        return []

    def do_sent(self, name: str) -> list[str]:
        self.side.on_sent([name])
        return []

    def do_end(self, name: str, status: str = "") -> Iterator[str]:
        keeps, params = self.side.on_finished(self.requests[name], STATUS[status])
        yield "keeps its blocks" if keeps else "frees its blocks"
        if params is not None:
            stated = ANSWERED if "do_remote_prefill" in params else {}
            shown = {key: json.dumps(value).strip('"') for key, value in params.items() if stated.get(key) != value}
            yield " ".join(["answers", *(f"{key}={text}" for key, text in shown.items())])

    def _shown(self, order: Any) -> str:
        """With each field that is not its default."""
        first, *others = fields(order)
        found = {each.name: getattr(order, each.name) for each in others if getattr(order, each.name) != each.default}
        texts = (f"{name}={self._text(value, name)}" for name, value in found.items())
        return " ".join([type(order).__name__, getattr(order, first.name), *texts])

    def _text(self, value: Any, name: str) -> str:
        match value:
            case Rows(group, first, end, blocks):
                return f"{group}[{first}:{end}]@{self._text(blocks, name)}"
            case int() if name == "room":
                return self.labels[value]
            case tuple():
                between = "," if all(isinstance(each, int | str) for each in value) else "/"
                return between.join(self._text(each, name) for each in value)
            case _:
                return SHORT.get(value, str(value).lower())


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _table(text: str) -> list[list[int]]:
    """A block table, by group."""
    return [[int(block) for block in group.split(",") if block] for group in text.split("/")]
