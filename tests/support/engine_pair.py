"""A prefill and a decode engine side by side, between them a copy that knows nothing but addresses."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pdtransfer.layout.layout import Layout, expand_pages
from pdtransfer.serve.engine_api import Broken, Computed, EngineConfig, Finished, Prefilled, Request, Token
from pdtransfer.serve.engines.generation import Generation
from pdtransfer.wire import Sampling

SMALL = {"layers": "2"}  # every mechanism is there with two layers


def config(
    role="prefill", *, attention="", slots=2048, page_size=16, host_layout="layer_first", options=SMALL, **more
):  # fmt: skip
    options = options | ({"attention": attention} if attention else {})
    return EngineConfig(role=role, slots=slots, page_size=page_size, host_layout=host_layout, options=options, **more)


def create(made: EngineConfig):
    """The reference engine, where a test names no other; torch is imported with it."""
    from pdtransfer_lab.models.factory import create

    return create(made)


def request(room, prompt, max_tokens=6, sparse=False, **sampling):
    sampling.setdefault("ignore_eos", True)
    sampling = Sampling(max_tokens=max_tokens, **sampling)
    return Request(room=room, prompt=prompt, sampling=sampling, enable_hisparse=sparse)


def prompts(seed, lengths):
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, length) for length in lengths]


def places(layout: Layout, kind, layer, head, slots):
    """float32 indices (slots, elements of a head) of one head's rows in the flat pool, from the table's addresses."""
    for number, plane in enumerate(layout.planes):
        at = head - plane.head_start
        if (plane.kind, plane.layer) == (kind, layer) and 0 <= at < plane.head_count:
            head_bytes = plane.row_bytes // plane.head_count
            starts = (layout.address(number, slots) + at * head_bytes) // 4
            return starts[:, None] + np.arange(head_bytes // 4)
    raise AssertionError((kind, layer, head))


def copy_index(source, source_slots, target, target_slots):
    """Rows of an index component, (flat float32, layout) to another, of every plane that the source has."""
    held, others = target[0].view(np.uint8), source[0].view(np.uint8)
    ours = {(plane.layer, plane.kind): index for index, plane in enumerate(target[1].planes)}
    for number, plane in enumerate(source[1].planes):
        row = np.arange(plane.row_bytes)
        place = target[1].address(ours[plane.layer, plane.kind], target_slots)[:, None] + row
        held[place] = others[source[1].address(number, source_slots)[:, None] + row]


def heads_of(layout: Layout):
    return sorted(
        (plane.kind, plane.layer, head)
        for plane in layout.planes
        for head in range(plane.head_start, plane.head_start + plane.head_count)
    )


def copy_rows(source, source_slots, target, target_slots, heads=None):
    """Rows of (flat float32, layout) to rows of another; all (kind, layer, head) that the source has, or these."""
    for kind, layer, head in heads_of(source[1]) if heads is None else heads:
        target[0][places(target[1], kind, layer, head, target_slots)] = source[0][
            places(source[1], kind, layer, head, source_slots)
        ]


@dataclass
class Prefill:
    """Runs prompts through a prefill engine to the end."""

    engine: object
    cells: dict[int, list[Computed]] = field(default_factory=dict)
    aux: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, *, factory=create, **more):
        return cls(factory(config("prefill", **more)))

    @property
    def layout(self):
        return self.engine.description.components[0].layout

    @property
    def index_layout(self):
        return self.engine.description.components[1].layout

    @property
    def memory(self):
        return np.frombuffer(self.engine.pool.view, np.float32)

    def step(self):
        for event in self.engine.step():
            match event:
                case Computed():
                    self.cells.setdefault(event.room, []).append(event)
                case Prefilled():
                    self.aux[event.room] = event.aux
                case Broken():
                    raise AssertionError(event)

    def run(self, *requests):
        for request in requests:
            assert self.engine.admit(request)
        while not self.engine.idle:
            self.step()
        return self

    def offered(self, one: Request):
        """Each cell with a head's place of it in the pool, and the rows that are there when it is offered."""
        assert self.engine.admit(one)
        found = []
        while not self.engine.idle:
            known = len(self.cells.get(one.room, ()))
            self.step()
            for cell in self.cells[one.room][known:]:
                slots = expand_pages(cell.pages, self.layout.page_size, cell.rows[1])[cell.rows[0] :]
                own = [head for head in heads_of(self.layout) if cell.layers[0] <= head[1] < cell.layers[1]]
                where = [places(self.layout, *head, slots) for head in own]
                found += [(cell, place, self.memory[place].copy()) for place in where]
        return found

    def slots(self, one: Request, component="kv", page_size=None):
        pages = [cell.pages for cell in self.cells[one.room] if cell.component == component][-1]
        return expand_pages(pages, page_size or self.layout.page_size, len(one.prompt))


@dataclass
class Decode:
    """A decode engine with memory of NaN, so that a row read before it was written shows; slots in random order.

    `memory` is the arena, `hbm` what is on the device, where the engine has components there.
    """

    engine: object
    memory: np.ndarray
    hbm: np.ndarray
    free: list[list[int]]  # of each component
    slots: dict[int, np.ndarray] = field(default_factory=dict)
    index_slots: dict[int, np.ndarray] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, Finished | Broken] = field(default_factory=dict)

    @classmethod
    def of(cls, *, page_size=1, host_layout="page_first", seed=0, factory=create, **more):
        made = factory(config("decode", page_size=page_size, host_layout=host_layout, **more))
        memory, hbm = (
            np.full(count // 4, np.nan, np.float32)
            for count in (made.description.memory_bytes, made.description.hbm_bytes)
        )
        made.attach(memory.data.cast("B"), **({"hbm": hbm.data.cast("B")} if len(hbm) else {}))
        random = np.random.default_rng(seed)
        return cls(
            made, memory, hbm,
            [list(random.permutation(component.layout.slots)) for component in made.description.components],
        )  # fmt: skip

    @property
    def layout(self):
        return self.engine.description.components[0].layout

    @property
    def index_layout(self):
        return self.engine.description.components[-1].layout

    def of_memory(self, component):
        return self.hbm if component.memory == "hbm" else self.memory

    def take(self, number, one: Request):
        count = len(one.prompt) + one.sampling.max_tokens
        return np.array([self.free[number].pop() for _ in range(count)], np.int64)

    def land(self, one: Request, source: Prefill):
        components = self.engine.description.components
        number = 1 if len(components) == 3 and not one.enable_hisparse else 0
        kept = components[number]
        self.slots[one.room] = self.take(number, one)
        target = self.of_memory(kept), kept.layout
        copy_rows((source.memory, source.layout), source.slots(one), target, self.slots[one.room][: len(one.prompt)])
        self.land_index(one, source)

    def land_index(self, one: Request, *sources: Prefill):
        """Nothing for a model without an index."""
        index = self.engine.description.components[-1]
        if index.name != "index":
            return
        self.index_slots[one.room] = own = self.take(-1, one)
        for source in sources:
            if len(source.engine.description.components) > 1:
                rows = source.slots(one, "index", source.index_layout.page_size)
                target = self.of_memory(index), index.layout
                copy_index((source.memory, source.index_layout), rows, target, own[: len(one.prompt)])

    def held(self, room):
        """The room's slots, as the engine is given them."""
        index = {"index": self.index_slots[room]} if room in self.index_slots else {}
        return {"kv": self.slots[room]} | index

    def admit(self, one: Request, source: Prefill):
        self.land(one, source)
        self.engine.admit(one, self.held(one.room), source.aux[one.room])

    def step(self):
        for event in self.engine.step():
            match event:
                case Token():
                    mine = self.tokens.setdefault(event.room, [])
                    assert event.index == len(mine)
                    mine.append(event.id)
                case Finished() | Broken():
                    assert event.room not in self.ends
                    self.ends[event.room] = event

    def run(self):
        while not self.engine.idle:
            self.step()
        return self

    def served(self, rooms, source: Prefill) -> list[Generation]:
        """What becomes of rooms that are admitted together."""
        for room in rooms:
            self.admit(room, source)
        self.run()
        return [self.outcome(room.room) for room in rooms]

    def outcome(self, room) -> Generation:
        end = self.ends[room]
        assert isinstance(end, Finished), end
        return Generation(
            tokens=tuple(self.tokens[room]), reason=end.reason, tokens_digest=end.tokens_digest,
            logits_digest=end.logits_digest, kv_digest=end.kv_digest,
        )  # fmt: skip
