"""The decode side: continuous batching, with each next token picked by a digest of the request's bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ....errors import CapacityError, ConfigError
from ....kernels.stream import DeviceSpans, span_of
from ....layout.geometry import Int64s
from ....layout.layout import Component, check_slots
from ...engine_api import Broken, CardMemory, EngineConfig, EngineDescription, Finished, HotFigures, Request, Token
from ...sampling import DIGEST_BYTES, Picked, chain, pick, tokens_digest
from .digests import RowDigest, read, total
from .handoff import StampHandoff
from .hot import StampHot
from .options import KV, StampOptions, check_config, check_request, describe
from .positions import last_tokens, row_of
from .rows import StampRows
from .stamps import Stamper, Words, stamps_of
from .tokens import logits_of
from .units import Units, picked

Events = list[Token | Finished | Broken]


@dataclass(slots=True, eq=False)
class _Answer:
    """A landed request. The arena has the rows of its tokens but the last id's, which has `stamp`."""

    request: Request
    slots: Mapping[str, Int64s]
    digests: list[RowDigest]  # of each component
    hot: bool
    handoff: StampHandoff
    logits_digest: bytes
    last: Picked
    stamper: Stamper = field(default_factory=Stamper)
    ids: list[int] = field(default_factory=list[int])
    stamp: Words = field(default_factory=lambda: np.empty(0, np.uint64))
    reported: bool = False  # whether step() has returned the first id, which came with aux
    spoilt: int | None = None  # how the rows that landed differ from those that prefill wrote; None until they are read

    @property
    def position(self) -> int:
        """Of the last id."""
        return len(self.request.prompt) + len(self.ids) - 1

    def append(self, picked: Picked) -> None:
        self.last = picked
        self.ids.append(picked.id)
        self.stamp = self.stamper.extend(np.array([picked.id]))

    def end(self, eos: int) -> Literal["stop", "length"] | None:
        """The reason why the last id ends the request, or None."""
        if self.ids[-1] == eos and not self.request.sampling.ignore_eos:
            return "stop"
        return "length" if len(self.ids) == self.request.sampling.max_tokens else None


class StampDecode:
    """A DecodeEngine. Rooms beyond batch_max take turns. HiSparse rooms first wait for a place on the device."""

    def __init__(self, config: EngineConfig, options: StampOptions) -> None:
        check_config(config)
        if config.group.ranks.pp_size > 1:
            raise ConfigError(f"pp_size = {config.group.ranks.pp_size}: only prefill is split into stages")
        self._config, self._options = config, options
        self.card: EngineDescription = describe(config, options)
        # If a component has two variants, the second, in HBM, is for requests without HiSparse.
        self._dense = {component.name: component for component in self.card.components}
        self._sparse = dict(self._dense)
        if KV in self._dense:
            self._sparse[KV] = self.card.components[0]
        self.hot = None if config.hisparse is None else StampHot(config, options, self._sparse[KV])
        self._rows: dict[tuple[str, str], StampRows] = {}  # by component and memory
        self._answers: dict[int, _Answer] = {}
        self._spans = DeviceSpans(config.spans, None)
        self._units = Units(options, self._dense, config.group)

    @property
    def idle(self) -> bool:
        return not self._answers and (self.hot is None or self.hot.requests.idle)

    @property
    def figures(self) -> HotFigures:
        return HotFigures() if self.hot is None else self.hot.figures

    def attach(self, arena: memoryview, *, device_address: int = 0, hbm: memoryview | CardMemory | None = None) -> None:
        if arena.nbytes < self.card.memory_bytes or arena.readonly:
            kind = "read-only" if arena.readonly else "writable"
            text = f"arena: {arena.nbytes} {kind} bytes, expected {self.card.memory_bytes} writable ones"
            raise ValueError(text)
        if device_address or isinstance(hbm, CardMemory):
            raise ValueError("hbm: memory of a GPU, the stamp engine runs on cpu alone")
        memories = {"dram": arena} | ({} if hbm is None else {"hbm": hbm})
        for component in self.card.components:
            memory = memories[component.memory]
            rows = StampRows(memory, component.layout, component.name, self._options.seed)
            self._rows[component.name, component.memory] = rows
        if self.hot is not None:
            self.hot.attach(arena, self._spans)

    def check(self, request: Request) -> None:
        check_request(request, self._options)
        tokens = len(request.prompt) + request.sampling.max_tokens
        for component in self._components_of(request).values():
            if component.rows(tokens) > component.layout.slots:
                raise ValueError(f"{tokens} tokens, the arena has {component.layout.slots} slots of {component.name}")
        if request.enable_hisparse and self.hot is not None:
            try:
                self.hot.capacity.check(tokens=len(request.prompt), growth=request.sampling.max_tokens)
            except CapacityError as error:
                raise ValueError(str(error)) from error

    def admit(self, request: Request, slots: dict[str, Int64s], aux: bytes) -> None:
        self.check(request)
        if request.room in self._answers:
            raise ValueError(f"room {request.room:016x} exists already")
        handoff = StampHandoff.unpack(aux, len(request.prompt))
        first = handoff.first(request.sampling)
        components = self._components_of(request)
        _check_slots(request, slots, components)
        hot = self.hot if request.enable_hisparse else None
        if hot is not None:
            hot.offer(request, slots[KV])
        digests = [
            RowDigest(self._rows[name, component.memory], component, slots[name], len(request.prompt))
            for name, component in components.items()
        ]
        answer = _Answer(request, slots, digests, hot is not None, handoff, handoff.logits_digest, first)
        answer.stamper.extend(request.prompt)
        answer.append(first)
        self._answers[request.room] = answer

    def step(self) -> Events:
        if self.hot is not None:
            self.hot.requests.turn()
        events: Events = []
        running: list[_Answer] = []
        ready = (number for number, answer in self._answers.items() if not answer.reported or self._placed(answer))
        for number in list(islice(ready, self._config.batch_max)):
            # Moved to the end of the queue, so that rooms take turns.
            answer = self._answers[number] = self._answers.pop(number)
            if (answer.reported or not self._report(answer, events)) and self._placed(answer):
                running.append(answer)
        if running:
            name, alone = span_of([answer.request.room for answer in running])
            with self._spans.span("step", name, room=alone):
                self._step(running, events)
        self._spans.report()
        if self.hot is not None:
            self.hot.requests.count(exact=any(isinstance(event, Finished | Broken) for event in events))
        return events

    def cancel(self, room: int) -> None:
        self._release(room, drop=True)

    def _step(self, running: list[_Answer], events: Events) -> None:
        """Writes the rows of each room's last id, reads, and picks the next id."""
        self._read_landed([answer for answer in running if answer.spoilt is None])
        hot = [answer for answer in running if answer.hot]
        if self.hot is not None and hot:
            rooms = [answer.request.room for answer in hot]
            self.hot.write(rooms, [answer.position for answer in hot], _joined(hot))
        self._write([answer for answer in running if not answer.hot], self._dense)
        self._write(hot, {name: each for name, each in self._sparse.items() if name != KV})
        digests = self._read_picks(running, self._read(running))
        if self.hot is not None and hot:
            self.hot.requests.stepped()
        refused = self.hot.requests.refused() if self.hot is not None else ()
        errors = self._wrong(running) if self._options.check else {}
        for answer, digest in zip(running, digests, strict=True):
            request = answer.request
            error = "the device has no place for its picks" if request.room in refused else errors.get(request.room)
            if error:
                self._release(request.room, drop=True)
                events.append(Broken(room=request.room, detail=f"at position {answer.position}: {error}"))
                continue
            logits, eos = logits_of(digest), (self._options.eos,)
            answer.logits_digest = chain(answer.logits_digest, logits)
            answer.append(pick(logits, request.sampling, prompt=request.prompt, ids=answer.ids, eos=eos))
            self._report(answer, events)

    def _write(self, answers: Sequence[_Answer], components: Mapping[str, Component]) -> None:
        """Writes the rows of each room's last id where it landed."""
        if not answers:
            return
        stamps = _joined(answers)
        for name, component in components.items():
            rows = [row_of(component, answer.position, len(answer.request.prompt)) for answer in answers]
            slots = [answer.slots[name][row] for answer, row in zip(answers, rows, strict=True)]
            self._rows[name, component.memory].write(np.array(slots), stamps)

    def _read_landed(self, answers: Sequence[_Answer]) -> None:
        """Reads the rows of prompts before anything is written: a step may write over them."""
        if answers:
            for answer, digest in zip(answers, self._digests(answers, newest=False), strict=True):
                answer.spoilt = _number(digest) ^ _number(answer.handoff.kv_digest)

    def _read(self, answers: Sequence[_Answer], *, whole: bool = False) -> list[bytes]:
        """The digest of each room's rows on all ranks, changed for good if other bytes landed than prefill wrote.
        `whole`: all rows are read anew, without the last id's."""
        digests = self._digests(answers, newest=not whole, whole=whole)
        return [
            (_number(digest) ^ (answer.spoilt or 0)).to_bytes(DIGEST_BYTES, "little")
            for answer, digest in zip(answers, digests, strict=True)
        ]

    def _digests(self, answers: Sequence[_Answer], *, newest: bool, whole: bool = False) -> list[bytes]:
        """Reads the rows that are due; `newest`: with those of each room's last id."""
        due = [(digest, answer.position + newest) for answer in answers for digest in answer.digests]
        read(due, whole=whole)
        totals = [np.concatenate([digest.total for digest in answer.digests]) for answer in answers]
        return self._units.together(np.stack(totals))

    def _read_picks(self, answers: Sequence[_Answer], digests: list[bytes]) -> list[bytes]:
        """The digests with those of the rows that each room picks by its own, in every group of layers."""
        top = self._options.top_k
        if not top or self._options.pools:
            return digests
        rows = self._rows[KV, self._dense[KV].memory]
        totals = np.zeros((len(answers), rows.heads), np.uint64)
        hot = [at for at, answer in enumerate(answers) if answer.hot]
        for number, layers in enumerate(self._options.groups()):
            picks = [picked(digest, number, each.position, top) for digest, each in zip(digests, answers, strict=True)]
            if self.hot is not None and hot:
                totals[hot] += self.hot.read(number, layers, [picks[at] for at in hot])
            for at, answer in enumerate(answers):
                if not answer.hot:
                    totals[at] += total(rows.sums(answer.slots[KV][picks[at]], layers))
        found = self._units.together(totals, kv_alone=True)
        return [digest + more for digest, more in zip(digests, found, strict=True)]

    def _wrong(self, answers: Sequence[_Answer]) -> dict[int, str]:
        """By room, the name of a row on some rank whose bytes are not those of the request's tokens."""
        places = np.full((len(answers), 3), -1, np.int64)  # component, row, layer
        for place, answer in zip(places, answers, strict=True):
            prompt = answer.request.prompt
            stamps = stamps_of(np.concatenate((prompt, np.array(answer.ids))))
            for at, digest in enumerate(answer.digests):
                last = last_tokens(digest.component, len(stamps))
                rows = np.array([row_of(digest.component, int(token), len(prompt)) for token in last])
                if place[0] < 0 and (wrong := digest.rows.wrong(digest.slots[rows], stamps[last])) is not None:
                    place[:] = at, rows[wrong[0]], wrong[1]
        parts = self._units.gather(places)
        errors: dict[int, str] = {}
        for at, answer in enumerate(answers):
            for rank, part in enumerate(parts):
                index, row, layer = (int(value) for value in part[at])
                if index >= 0 and answer.request.room not in errors:
                    name = answer.digests[index].component.name
                    where = f"component {name!r}, row {row}, layer {layer}, rank {rank}"
                    errors[answer.request.room] = f"{where}: these bytes are not this room's"
        return errors

    def _report(self, answer: _Answer, events: Events) -> bool:
        """Reports the last id, and the end if it ends the request. Returns whether it does."""
        answer.reported = True
        number, ids = answer.request.room, answer.ids
        events.append(Token(room=number, index=len(ids) - 1, id=ids[-1], logprobs=answer.last.logprobs))
        reason = answer.end(self._options.eos)
        if reason is None:
            return False
        if answer.spoilt is None:
            self._read_landed([answer])
        (kv_digest,) = self._read([answer], whole=True)
        events.append(Finished(
            room=number, reason=reason, tokens_digest=tokens_digest(ids), logits_digest=answer.logits_digest,
            kv_digest=kv_digest,
        ))  # fmt: skip
        self._release(number, drop=False)
        return True

    def _placed(self, answer: _Answer) -> bool:
        """Whether a step may run the room."""
        return not answer.hot or (self.hot is not None and self.hot.requests.placed(answer.request.room))

    def _release(self, room: int, *, drop: bool) -> None:
        """Ends the room. When this returns, nothing reads or writes its slots."""
        if self._answers.pop(room, None) is not None and self.hot is not None:
            self.hot.requests.release(room, drop=drop)

    def _components_of(self, request: Request) -> dict[str, Component]:
        """The components in which this request has rows, by name."""
        return self._sparse if request.enable_hisparse else self._dense


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little")


def _joined(answers: Sequence[_Answer]) -> Words:
    return np.concatenate([answer.stamp for answer in answers])


def _check_slots(request: Request, slots: Mapping[str, NDArray[np.int64]], components: Mapping[str, Component]) -> None:
    if slots.keys() != components.keys():
        raise ValueError(f"slots: of components {sorted(slots)}, expected {sorted(components)}")
    tokens = len(request.prompt) + request.sampling.max_tokens
    for name, own in slots.items():
        rows = components[name].rows(tokens)
        if own.shape != (rows,) or own.dtype != np.int64:
            raise ValueError(f"slots of {name}: {own.dtype} of shape {own.shape}, expected int64 of {(rows,)}")
        check_slots(own, components[name].layout.slots, f"slots of {name}")
