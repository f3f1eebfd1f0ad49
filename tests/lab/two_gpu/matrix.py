"""Fleets of a prefill and a decode on two devices: what each is made of, what it is asked, and what is true of it then.

A fleet serves dense and HiSparse requests side by side where its decode is one rank: the KV of a dense one lands in the
HBM of decode's card, that of the others in its arena, the index of either in HBM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pdtransfer_lab.models.factory import Generation, generate_many

from pdtransfer.errors import TransportError
from pdtransfer.serve.engine_api import EngineConfig
from pdtransfer.serve.settings.node import REFERENCE
from pdtransfer.serve.settings.ranks import device_of
from pdtransfer.transports.select import taken
from pdtransfer.wire import Ranks, Sampling
from tests.support.fleets import LIMITS, SLOTS, TOKENS, Site, equal, prompts

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
PAGES = (1, 16, 64)
CHUNKS = (256, 96, 64)
TEXTS = prompts(1, 1, 20, 48, 49, 130, 400)  # with HOT tokens on the device of each, some fit and some do not
HOT = 48
LAYERS = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fleet. `here` are the few that run wherever there is no card, too."""

    attention: str
    source: tuple[str, int] = ("layer_first", 64)  # layout and page size of prefill's pool
    target: tuple[str, int] = ("page_first", 1)  # and of decode's arena
    chunk: int = 96
    cell: int = 0  # layers; 0: all of a chunk at once
    transport: str = "shm"
    tp: int = 1
    pp: int = 1
    decode_tp: int = 1
    spread: bool = False  # ranks on both devices, in turn
    verify: bool = False
    here: bool = False

    def __str__(self) -> str:
        sides = ["_".join(map(str, side)) for side in (self.source, self.target)]
        ranks = [f"tp{self.tp}pp{self.pp}to{self.decode_tp}"] if self.ranks > 2 else []
        how = ["spread"] * self.spread + ["verify"] * self.verify
        return "-".join(
            [self.attention, self.transport, *sides, f"chunk{self.chunk}", f"cell{self.cell}", *ranks, *how]
        )

    @property
    def ranks(self) -> int:
        return self.tp * self.pp + self.decode_tp

    @property
    def sparse(self) -> bool:
        """Whether its decode has a device for HiSparse: one rank alone."""
        return self.decode_tp == 1


def layouts() -> Iterator[Case]:
    """Each layout and page size of prefill's pool with each attention, and each pair of layouts with one of the two."""
    for shift, attention in enumerate(("mla", "gqa")):
        for index, layout in enumerate(LAYOUTS):
            for number, page in enumerate(PAGES):
                turn = index + number + shift
                yield Case(
                    attention=attention,
                    source=(layout, page),
                    target=(LAYOUTS[turn % 4], PAGES[turn % 3]),
                    chunk=CHUNKS[(index + number) % 3],
                    cell=(0, 1, 3)[(number + shift) % 3],
                    verify=turn == 5,
                    here=(attention, layout, page) == ("mla", "page_head", 64),
                )


def crossing() -> Iterator[Case]:
    """Over Mooncake, between two processes that could share memory just as well."""
    for shift, attention in enumerate(("mla", "gqa")):
        for index, page in enumerate((16, 64)):
            yield Case(
                attention=attention,
                source=(LAYOUTS[2 * index], page),
                target=(LAYOUTS[1 + index + shift], PAGES[index]),
                cell=index,
                transport="mooncake",
            )
    yield Case(attention="gqa", tp=2, transport="mooncake", spread=True)


def fanned() -> Iterator[Case]:
    """Workers of several ranks: heads split or held twice, layers split, on either side."""
    for attention in ("mla", "gqa"):  # of MLA each rank holds all of a latent, and one sends it
        yield Case(attention=attention, tp=2, cell=1)
        yield Case(attention=attention, tp=2, spread=True, source=("page_first", 16), target=("layer_first", 64))
        yield Case(attention=attention, pp=2, spread=True, cell=1, source=("page_head", 16))
        yield Case(attention=attention, decode_tp=2, source=("page_first_direct", 1), chunk=64)
        yield Case(attention=attention, tp=2, decode_tp=2, spread=True, target=("page_head", 16), verify=True)
    yield Case(attention="mla", pp=2, chunk=64, target=("page_first_direct", 64))
    yield Case(attention="gqa", tp=2, pp=2, decode_tp=2, spread=True, cell=1)
    yield Case(attention="gqa", decode_tp=2, spread=True, target=("page_head", 64))


MATRIX = (*layouts(), *crossing(), *fanned())


def missing(case: Case) -> str:
    """Why this fleet cannot be had here; empty where it can."""
    if case.transport == "mooncake":
        try:
            taken("mooncake")
        except TransportError as error:
            return str(error)
    return ""


def options(case: Case) -> dict[str, str]:
    """The engine's, on both sides."""
    return {"layers": str(LAYERS), "attention": case.attention} | (
        {"top_k": "16", "index_share": "1"} if case.sparse else {}
    )


def fleet_of(case: Case, devices: tuple[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Prefill's and decode's settings, as fleets.fleet takes them."""
    both = {"model": REFERENCE, "transport": case.transport}
    own = tuple(f"{name}={value}" for name, value in options(case).items())
    cell = (f"layers_per_cell={case.cell}",)
    prefill = both | {
        "engine_option": own + cell,
        "host_layout": case.source[0],
        "page_size": case.source[1],
        "chunk_tokens": case.chunk,
        "tp_size": case.tp,
        "pp_size": case.pp,
        "device": _device(devices, case, case.tp * case.pp),
    }
    decode = both | {
        "engine_option": own,
        "host_layout": case.target[0],
        "page_size": case.target[1],
        "tp_size": case.decode_tp,
        "verify": case.verify,
        "device": _device(devices[::-1], case, case.decode_tp),
    }
    if case.sparse:
        decode |= {
            "enable_hisparse": True,
            "hot_tokens": HOT,
            "device_slots": 2 * (HOT + 1),
            "dense_slots": SLOTS,
            "limits": replace(LIMITS, hisparse_wait_steps=1, hisparse_quantum_steps=2),
        }
    return {"prefills": [prefill], "decodes": [decode]}


def _device(devices: tuple[str, str], case: Case, ranks: int) -> str:
    own, other = devices
    return f"{own},{other}" if case.spread and ranks > 1 and own != "cpu" else own


def single(case: Case, devices: tuple[str, str]) -> EngineConfig:
    """The one process, on the device of decode's first rank, with every token resident."""
    device = device_of(_device(devices[::-1], case, case.decode_tp), Ranks())
    return EngineConfig(
        role="decode", slots=SLOTS, page_size=64, host_layout="layer_first", device=device,
        options=options(case),
    )  # fmt: skip


_made: dict[str, dict[str, Generation]] = {}


def expected(config: EngineConfig, texts: Sequence[str]) -> list[Generation]:
    """What a single process makes of them."""
    known = _made.setdefault(repr(config), {})
    missing = [text for text in texts if text not in known]
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    asked = [(np.frombuffer(text.encode(), np.uint8).astype(np.int64), sampling) for text in missing]
    known.update(zip(missing, generate_many(config, asked), strict=True))
    return [known[text] for text in texts]


async def answered(site: Site, case: Case, devices: tuple[str, str]) -> None:
    """Every prompt, of both kinds and all at once, is answered as by a single process on one device."""
    asked = [(text, kind) for text in TEXTS for kind in ((True, False) if case.sparse else (False,))]
    answers = await asyncio.gather(*(site.complete(text, enable_hisparse=kind) for text, kind in asked))
    wanted = expected(single(case, devices), [text for text, _ in asked])
    wrong = [
        (len(text), answer)
        for (text, kind), answer, one in zip(asked, answers, wanted, strict=True)
        if not equal(answer, one) or answer.facts["enable_hisparse"] is not kind
    ]
    assert not wrong, wrong
