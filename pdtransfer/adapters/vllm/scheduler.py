"""The scheduler's side of an engine: which requests are handed over, and what the workers do about it in each step.

It holds no memory and opens no socket. vLLM's own block tables are kept here, since a step reports only what is new.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from ...client.api import room_id
from ...errors import ConfigError
from ..kit.peers import Reachable, Remembered, RequestError
from .orders import Chunk, KVGroup, Open, Orders, RankRuns, Receive, Refuse, Rows, Withdraw, slots_of
from .params import GiveUp, Identify, ReceiveFrom, SendTo, Wanted, answer, own_label, parse, shared_id

log = logging.getLogger(__name__)

_GIVEN_UP = "FINISHED_ABORTED", "FINISHED_ERROR"  # of RequestStatus: nobody wants the request any more

BlockTable = Sequence[Sequence[int]]  # by group

LABELS_MAX = 8_192  # that are remembered: vLLM makes the requests of one label one after another


class VLLMRequest(Protocol):
    """What is read of vLLM's Request."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    prompt_token_ids: Sequence[int] | None
    num_prompt_tokens: int
    skip_reading_prefix_cache: bool  # it has to compute its whole prompt, for the prompt's logprobs


class _LoadState(Enum):
    WANTED = auto()  # it may still get blocks
    ORDERED = auto()  # its workers have it, or have had it
    NONE = auto()  # it needs nothing (any more)


@dataclass(slots=True)
class _Send:
    """A request of prefill."""

    tokens: int
    transfer_id: str | None
    request_id: str  # as decode gets it; another one for each attempt, since a room is used once
    attempts: int = 0
    opened: bool = False
    lost: bool = False  # its room has failed for good
    complete: bool = False  # the last chunk is ordered
    blocks: list[list[int]] = field(default_factory=list[list[int]])
    ordered: list[int] = field(default_factory=list[int])  # by group: the row from which nothing is ordered yet


@dataclass(slots=True)
class _Receive:
    """A request of decode; `source` is None where its parameters are wrong."""

    tokens: int
    source: ReceiveFrom | None
    state: _LoadState = _LoadState.WANTED
    declined: bool = False  # its room lands without a byte
    kv_bytes: int = 0  # that were asked for, of all ranks
    blocks: frozenset[int] = frozenset()  # that they were to land in
    failed: bool = False  # its KV was asked for, or could not be, and has not come
    prompt: Sequence[int] | None = None
    behind: _Receive | None = None  # of the same prompt and label, whose load serves this one as well


class SchedulerSide:
    """Answers vLLM's scheduler. `groups` are those whose KV is transferred; `engine_id` names this engine to peers.

    `endpoints` are where its prefill ranks listen, by their number, and `identity` what peers compare, known once the
    workers run.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        *,
        engine_id: str,
        tp_size: int = 1,
        sends: bool,
        receives: bool,
        reachable: Reachable | None = None,
    ) -> None:
        self._groups, self._engine_id, self._tp_size = tuple(groups), engine_id, tp_size
        self._has_states = any(group.state for group in groups)
        self._can_send, self._can_receive = sends, receives
        self._reachable = reachable or Reachable()
        self.endpoints: tuple[str, ...] = ()
        self.identity: dict[str, Any] = {}
        self._block_bytes = (0,) * len(self._groups)  # of all ranks together; those that share heads have them each
        self._identified: set[str] = set()  # requests that ask for it
        self.block_pool: Any = None  # vLLM's, once it is made: it frees a block that nobody counts any more
        self._kept: dict[str, list[Any]] = {}  # by request: blocks that vLLM frees before they are sent
        self._sends: dict[str, _Send] = {}
        self._receives: dict[str, _Receive] = {}
        self._sent = Remembered[str, str](LABELS_MAX)  # the first request of each transfer_id, oldest first
        self._shared = Remembered[str, str](LABELS_MAX)  # that of each id which decode may know without an answer
        self._received = Remembered[str, str](LABELS_MAX)  # that of each label
        self._orders = Orders()

    def on_ranks(self, announced: Mapping[tuple[int, int], RankRuns]) -> None:
        """What all ranks announce, by (stage, tensor parallel rank). Raises ConfigError where they would send or
        receive unequal rows: no request could be handed over."""
        ranks = sorted(announced)
        by_rows: dict[Any, tuple[int, int]] = {}
        for rank in ranks:
            by_rows.setdefault(announced[rank].identity["facts"].get("rows"), rank)
        if len(by_rows) > 1:
            raise ConfigError(
                "rows: "
                + ", ".join(f"{rows!r} of stage {stage} rank {rank}" for rows, (stage, rank) in by_rows.items())
                + ': all ranks of an engine need the same: set rows to "blocks"'
            )
        self.endpoints = tuple(announced[rank].endpoint for rank in ranks)
        self.identity = announced[ranks[0]].identity if ranks else {}
        self._block_bytes = tuple(
            sum(announced[rank].block_bytes[index] for rank in ranks) // group.stripes
            for index, group in enumerate(self._groups)
        )

    def on_new_request(self, request: VLLMRequest) -> None:
        """A request has come: its parameters are checked. A wrong one of decode fails its load, and no other."""
        name, tokens = request.request_id, self._transferred_tokens(request)
        try:
            wanted = parse(request.kv_transfer_params, self._reachable, name)
            self._check_role(wanted)
        except RequestError as error:
            log.warning("request %s: its hand-off is refused: %s", name, error)
            params = request.kv_transfer_params
            if self._can_receive and (not isinstance(params, dict) or params.get("do_remote_prefill")):
                self._receives[name] = _Receive(tokens, None)  # a load may be wanted, which fails
            return
        match wanted:
            case SendTo(transfer_id):
                self._send(request, tokens, transfer_id)
            case GiveUp(transfer_id):
                first = _first(self._sent, transfer_id, name)  # a request that comes later is not handed over
                if (send := self._sends.get(first)) is not None:
                    send.lost = True
                self._orders.withdrawals.append(Withdraw(first, room_id(transfer_id)))
            case ReceiveFrom(label):
                receive = self._receives[name] = _Receive(tokens, wanted, prompt=request.prompt_token_ids)
                if (first := _first(self._received, label, name)) != name:
                    receive.state, first_receive = _LoadState.NONE, self._receives.get(first)
                    if first_receive is not None and first_receive.prompt == receive.prompt is not None:
                        receive.behind = first_receive
                    else:
                        log.info("request %s: computed here, %s is received as %s", name, first, label)
            case Identify():
                self._identified.add(name)
            case None:
                pass

    def _send(self, request: VLLMRequest, tokens: int, transfer_id: str | None) -> None:
        name = request.request_id
        first = name if transfer_id is None else _first(self._sent, transfer_id, name)
        if first != name:
            log.info("request %s: not handed over, %s is, as transfer_id %s", name, first, transfer_id)
            return
        send = _Send(tokens, transfer_id, self._id_for_peers(name))
        if self.block_pool is None and self._loses_blocks(tokens):
            log.warning("request %s: not handed over: vLLM frees blocks of it before they are sent", name)
            self._orders.withdrawals.append(Withdraw(name, room_id(self._label(send))))
            return
        drop_last_tokens(request, request.num_prompt_tokens - tokens)
        self._sends[name] = send

    def matched_tokens(self, request: VLLMRequest, computed: int) -> int | None:
        """Tokens that come from a peer, beyond `computed` ones that this engine has: all but the prompt's last, which
        the engine computes in any case. If it took that one for computed as well, a window's blocks would be freed that
        the computation of it needs.

        None, to be asked again, while another request receives the same prompt: its blocks will be in the prefix cache.
        """
        receive = self._receives.get(request.request_id)
        if receive is None:
            return 0
        if receive.behind is not None and receive.behind.state is not _LoadState.NONE:
            return None
        return max(0, self._received_tokens(request) - computed) if receive.state is _LoadState.WANTED else 0

    def on_blocks(self, request: VLLMRequest, blocks: BlockTable, external_tokens: int) -> None:
        """A request has blocks, for `external_tokens` that come from a peer; called again without any, later."""
        name = request.request_id
        receive = self._receives.get(name)
        if receive is None:
            return
        if receive.state is not _LoadState.WANTED:
            receive.state = _LoadState.NONE  # its load is over: it runs
            return
        if external_tokens == 0:
            self._decline(name, receive)
            return
        receive.state = _LoadState.ORDERED
        prefix = self._received_tokens(request) - external_tokens
        slots = tuple(slots_of(group, blocks[group.index], receive.tokens, prefix) for group in self._groups)
        landing = [[slot for slot in group_slots if slot >= 0] for group_slots in slots]
        if receive.source is None:
            receive.failed = True
            self._orders.refusals.append(Refuse(name, tuple(landing[0])))
            return
        receive.blocks = frozenset(landing[0])
        receive.kv_bytes = sum(
            size * len(group_slots) for size, group_slots in zip(self._block_bytes, landing, strict=True)
        )
        self._orders.receives.append(
            Receive(name, receive.source.room(name), receive.source.sources, receive.tokens, prefix, slots)
        )

    def orders(self, step: Any) -> Orders:
        """What the workers do in this step, which is vLLM's SchedulerOutput; the next call begins another one."""
        orders, self._orders = self._orders, Orders()
        for name in step.preempted_req_ids or ():
            if (send := self._sends.get(name)) is not None:
                self._give_up(name, send, orders)
        if not self._sends:
            return orders
        computed = self._update_tables(step)
        for name, count in step.num_scheduled_tokens.items():
            if (send := self._sends.get(name)) is not None and not send.lost:
                self._order_chunk(name, send, computed[name], computed[name] + count, orders)
        return orders

    def on_failed_loads(self, requests: Collection[str], blocks: Collection[int]) -> None:
        """Loads have failed: of these requests, or into these blocks where vLLM has no failed requests."""
        for name, receive in self._receives.items() if requests or blocks else ():
            receive.failed |= name in requests or not receive.blocks.isdisjoint(blocks)

    def on_sent(self, requests: Collection[str]) -> None:
        """Nothing reads the blocks of these requests any more."""
        for name in requests:
            if (blocks := self._kept.pop(name, None)) is not None:
                self.block_pool.free_blocks(blocks)

    @property
    def has_word_for_peers(self) -> bool:
        """True if a peer waits for the next orders, although no request here may need a step."""
        return bool(self._orders.receives or self._orders.aborts or self._orders.withdrawals)

    def on_finished(self, request: VLLMRequest, status: str) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended, with the RequestStatus of this name. Returns whether its blocks stay until the workers
        report it, and what the client gets."""
        name = request.request_id
        if name in self._identified:
            self._identified.discard(name)
            return False, {"identity": self.identity}
        if (received := self._receives.pop(name, None)) is not None:
            if received.state is _LoadState.WANTED and received.source is not None:
                # It may be one that vLLM makes of a request that its server has refused, with another id.
                source, client_id = received.source, received.source.client_id
                shown = name if client_id in name else f"{client_id} ({name})"
                self._orders.withdrawals.append(Withdraw(shown, source.room(name), source.sources))
            elif received.state is _LoadState.ORDERED or (received.declined and status in _GIVEN_UP):
                self._orders.aborts.append(name)  # the workers know whether there is still something to give up
            received.state = _LoadState.NONE
            if received.kv_bytes or received.failed or received.declined:
                return False, {"kv_bytes": 0 if received.failed else received.kv_bytes, "kv_lost": received.failed}
            return False, None
        send = self._sends.pop(name, None)
        if send is None or not send.opened:
            if send is not None and not send.lost:
                self._orders.withdrawals.append(Withdraw(name, room_id(self._label(send))))
            return False, None
        if not send.complete or status in _GIVEN_UP:
            self._orders.aborts.append(name)
            return True, None
        return True, answer(
            self.endpoints, tp_size=self._tp_size, engine_id=self._engine_id, request_id=send.request_id,
            transfer_id=send.transfer_id, facts=self.identity.get("facts"), first_token=not self._has_states,
        )  # fmt: skip

    def _id_for_peers(self, name: str) -> str:
        """The id of a request as decode may know it; of several with the same one the first has it."""
        shared = shared_id(name)
        return shared if shared is not None and _first(self._shared, shared, name) == name else name

    def _label(self, send: _Send) -> str:
        return send.transfer_id or own_label(self._engine_id, send.request_id)

    def _transferred_tokens(self, request: VLLMRequest) -> int:
        """Tokens of a request's room: the prompt's. With states, all but the last one: decode computes that one from
        the state before it. No state is transferred of a prompt that decode computes whole, nor of the shortest ones.
        Some of vLLM's kernels compute a prompt of one token, as prefill would, from whatever state is in its block."""
        tokens = request.num_prompt_tokens
        return tokens - 1 if self._has_states and tokens > 2 and not request.skip_reading_prefix_cache else tokens

    def _received_tokens(self, request: VLLMRequest) -> int:
        """How many of a prompt vLLM takes for received: not the last one, unless a block begins with it. vLLM would not
        have allocated that block yet, and it has a row of the room."""
        tokens = request.num_prompt_tokens
        if self._has_states:
            return count if (count := self._transferred_tokens(request)) < tokens else 0
        return tokens if any((tokens - 1) % group.kind.page_size == 0 for group in self._groups) else tokens - 1

    def _check_role(self, wanted: Wanted | None) -> None:
        if isinstance(wanted, SendTo | GiveUp) and not self._can_send:
            field = "do_remote_decode: true" if isinstance(wanted, SendTo) else "abort_transfer_id"
            raise RequestError(f"{field}, and this engine's kv_role is kv_consumer")
        if isinstance(wanted, ReceiveFrom) and not self._can_receive:
            raise RequestError("do_remote_prefill: true, and this engine's kv_role is kv_producer")

    def _decline(self, name: str, receive: _Receive) -> None:
        """Has prefill's side of the room end at once."""
        receive.state = _LoadState.NONE
        if receive.source is None:
            return
        receive.declined, source = True, receive.source
        none = tuple((-1,) * group.kind.rows(receive.tokens) for group in self._groups)
        self._orders.receives.append(
            Receive(name, source.room(name), source.sources, receive.tokens, receive.tokens, none, awaited=False)
        )

    def _update_tables(self, step: Any) -> dict[str, int]:
        """Brings the block tables up to date; returns the tokens that each request has before this step."""
        computed: dict[str, int] = {}
        for new in step.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            if (send := self._sends.get(new.req_id)) is not None:
                send.blocks = [list(ids) for ids in new.block_ids]
        cached = step.scheduled_cached_reqs
        for name, more, before in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            computed[name] = before
            send = self._sends.get(name)
            if send is None or more is None:
                continue
            if name in cached.resumed_req_ids:
                send.blocks = [list(ids) for ids in more]
            else:
                for blocks, ids in zip(send.blocks, more, strict=True):
                    blocks.extend(ids)
        return computed

    def _order_chunk(self, name: str, send: _Send, before: int, after: int, orders: Orders) -> None:
        if send.complete:
            if self._has_states or any(
                group.kind.needed_from(before) > group.kind.needed_from(send.tokens - 1) for group in self._groups
            ):
                # It generates beyond its prompt: its states change, and its windows lose blocks that may still be read.
                self._give_up(name, send, orders)
                send.lost = True
            return
        if not send.opened:
            send.opened = True
            send.ordered = [group.kind.needed_from(send.tokens - 1) for group in self._groups]
            orders.opens.append(Open(name, self._label(send), send.tokens))
        send.complete = after >= send.tokens
        rows: list[Rows] = []
        for index, group in enumerate(self._groups):
            # Blocks that this engine's prefix cache has had count as computed by this chunk.
            end = group.kind.rows(send.tokens) if send.complete else group.kind.whole_rows(after)
            if (first := send.ordered[index]) < end:
                rows.append(Rows(index, first, end, group.blocks(send.blocks[group.index], send.tokens)[:end]))
                send.ordered[index] = end
        if rows:
            orders.chunks.append(Chunk(name, tuple(rows), send.complete))
        if send.complete and self._loses_blocks(send.tokens):
            kept = self._kept[name] = list[Any]()
            for group in self._groups:
                blocks = group.blocks(send.blocks[group.index], send.tokens)
                first, end = group.kind.needed_from(send.tokens - 1), group.kind.needed_from(send.tokens)
                kept += [self.block_pool.blocks[block] for block in blocks[first:end]]
            self.block_pool.touch(kept)

    def _loses_blocks(self, tokens: int) -> bool:
        """True if the token behind a prompt of this many does not see a block that its last one sees. vLLM frees that
        as the request ends, and decode needs it, as it computes the last token."""
        return any(group.kind.needed_from(tokens - 1) < group.kind.needed_from(tokens) for group in self._groups)

    def _give_up(self, name: str, send: _Send, orders: Orders) -> None:
        """The request loses blocks that were to be sent. Unless decode may know the room already, it gets another."""
        if not send.opened:
            return
        orders.quiesce.append(name)
        self.on_sent((name,))  # they are written again in a later step, and this one waits for their readers
        send.opened = send.complete = False
        if send.transfer_id is not None:
            send.lost = True
            log.warning("request %s: preempted, so its hand-off %s fails", name, send.transfer_id)
        else:
            send.attempts += 1
            send.request_id = f"{name}#{send.attempts}"


def drop_last_tokens(request: Any, count: int) -> None:
    """Has prefill compute all of a prompt but its last tokens, and generate one token that nobody needs."""
    if count == 0:
        return
    for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
        if (value := getattr(request, name, None)) is not None:
            setattr(request, name, value[:-count])
    del request._all_token_ids[-count:]  # noqa: SLF001 -- vLLM's own NIXL connector does the same: there is no other way
    request.num_prompt_tokens -= count
    request.max_tokens = 1


def _first(labels: Remembered[str, str], label: str, name: str) -> str:
    """The first request of a label, which is `name` if no other is remembered."""
    if label not in labels:
        labels.keep(label, name)
    return labels[label]
