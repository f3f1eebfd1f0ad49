"""The KV of the reference model through strangers alone, as reference.md describes it: a decode takes it from a real
prefill, and a prefill hands it to a real decode, whose HiSparse answers as a single process does."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import msgpack
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

from pdtransfer_lab.models.factory import Generation, create, generate_many

from pdtransfer.serve.engine_api import EngineConfig
from pdtransfer.serve.settings.node import REFERENCE
from pdtransfer.wire import Sampling
from tests.serve.stranger import cast, shm
from tests.serve.stranger.decode import Decode
from tests.serve.stranger.messages import ROOT
from tests.serve.stranger.peer import Fields
from tests.serve.stranger.router import Router
from tests.support.fleets import SLOTS, decode_config, prefill_config, prompts
from tests.support.lone_daemons import lone_daemons

OPTIONS = {"layers": "2", "top_k": "16", "index_share": "1"}
OPTION = tuple(f"{name}={value}" for name, value in OPTIONS.items())
TEXTS = prompts(20, 40, 130)
TOKENS = 6
TEXT = (ROOT / "reference.md").read_text()
# The cells of each line of the text's tables.
CELLS = [[cell.strip(" `") for cell in line.strip("| ").split(" | ")] for line in TEXT.splitlines() if line[:1] == "|"]
PLANES_OF_TEXT = [
    (cells[0].replace("`", ""), *cells[1:5], int(cells[5]), int(cells[6].replace(",", "")))
    for cells in CELLS
    if len(cells) == 7 and cells[6][0].isdigit()
]
AUX_OF_TEXT = [cells[1].strip("`") for cells in CELLS if cells[0].isdigit()]
FORMAT = re.findall(r'The format is "([^"]+)"', TEXT)[0]
# Kind, dtype and bytes of each plane of a layer of reference-mla.
PLANES = {
    name: [(kind, dtype, size) for of, _, _, kind, dtype, _, size in PLANES_OF_TEXT if of.startswith(start)]
    for name, start in (("kv", "kv of reference-mla"), ("index", "index"))
}


def expected(count: int) -> list[Generation]:
    """Of a single process, with every token resident."""
    config = EngineConfig(role="decode", slots=SLOTS, page_size=64, host_layout="layer_first", options=OPTIONS)
    sampling = Sampling(max_tokens=count, ignore_eos=True)
    return generate_many(
        config, [(np.frombuffer(text.encode(), np.uint8).astype(np.int64), sampling) for text in TEXTS]
    )


def component(name: str, memory: str, base: int) -> tuple[Fields, int]:
    """A component of the reference model in an arena, plane after plane, and where it ends."""
    planes = []
    for layer in range(2):
        for kind, dtype, size in PLANES[name]:
            place = {"layer": layer, "kind": kind, "dtype": dtype, "head_start": 0, "head_count": 1}
            strides = {"base": base, "page_stride": size, "row_stride": size, "row_bytes": size}
            planes.append(place | strides)
            base += size * cast.SLOTS
    layout = {"planes": planes, "page_size": 1, "slots": cast.SLOTS}
    span = {"kind": "all", "tokens": 0}
    return {"name": name, "memory": memory, "tokens_per_row": 1, "span": span, "layout": layout}, base


class Copied:
    """The KV of each prompt, as it has landed once, and the aux that the text says of its `first` token."""

    def __init__(self, first: list[Generation]) -> None:
        self.first = {tuple(text.encode()): single for text, single in zip(TEXTS, first, strict=True)}
        self.rows: dict[tuple, bytes] = {}
        self.logprobs = b""  # of the next aux

    def generate(self, ids: list[int], read: Callable[..., bytes], aux: bytes, count: int) -> list[int]:
        """Keeps what has landed. The answer is the token that prefill has picked."""
        for name, kinds in PLANES.items():
            for kind, _, _ in kinds:
                for layer in range(2):
                    for index in range(len(ids)):
                        self.rows[tuple(ids), name, kind, layer, index] = read(name, kind, layer, index)
        assert aux == self.aux(ids)
        return [self.first[tuple(ids)].tokens[0]]

    def row(self, ids: list[int], name: str, plane: Fields, at: int) -> bytes:
        return self.rows[tuple(ids), name, plane["kind"], plane["layer"], at]

    def aux(self, ids: list[int]) -> bytes:
        single = self.first[tuple(ids)]
        fields = {
            "format": FORMAT, "prompt_tokens": len(ids), "id": single.tokens[0], "logits_digest": single.logits_digest,
            "logprobs": self.logprobs, "rows_digest": b"",
        }  # fmt: skip
        return msgpack.packb([fields[name] for name in AUX_OF_TEXT])

    def digest(self, ids: list[int]) -> bytes:
        """As decode's End names what it holds, when no row has been generated yet."""
        found = b""
        for name in ("index", "kv"):
            of_one = blake2b(digest_size=16)
            for layer in range(2):
                for kind, _, _ in PLANES[name]:
                    for index in range(len(ids)):
                        of_one.update(self.rows[tuple(ids), name, kind, layer, index])
            found += of_one.digest()
        return blake2b(found, digest_size=16).digest()


def taking(copied: Copied, weights: bytes) -> Decode:
    """A decode that could do HiSparse, and keeps what lands."""
    components, end = [], 0
    for name, memory in (("kv", "dram"), ("kv", "hbm"), ("index", "hbm")):
        if memory == "hbm" and len(components) == 1:
            hbm_base = end
        made, end = component(name, memory, end)
        components.append(made)
    arena = shm.Arena(end, hbm_base=hbm_base, hbm_bytes=end - hbm_base)
    identity = cast.identity("shm")
    return Decode(
        arena, components, copied.generate, node="taking", model="reference-mla", weights=weights, identity=identity
    )


@pytest.mark.slow
def test_kv_of_the_reference_model_goes_through_strangers_and_comes_out_as_it_was(
    tmp_path: Path, directory: Path
) -> None:
    first, whole = expected(1), expected(TOKENS)
    copied = Copied(first)
    sparse = {"hot_tokens": 48, "device_slots": 98, "dense_slots": 1_024, "enable_hisparse": True}
    configs = (
        prefill_config(model=REFERENCE, engine_option=OPTION),
        decode_config(
            directory, model=REFERENCE, engine_option=OPTION, verify=True, host_layout="layer_first", **sparse
        ),
    )
    with lone_daemons(tmp_path, *configs) as (prefill, decode):
        with Router(node="asking", prefill=prefill.ready["endpoint"], decode=decode.ready["endpoint"]) as router:
            router.wait(router.usable["prefill"], "prefill")
            weights = router.links["prefill"].identity["weights"]
        with (
            taking(copied, weights) as stranger,
            Router(node="taking-router", prefill=prefill.ready["endpoint"], decode=stranger.endpoint) as router,
        ):
            for text, single in zip(TEXTS, first, strict=True):
                room = router.complete(text.encode(), 1, enable_hisparse=True)
                assert room.tokens == [*single.tokens]
                assert copied.digest([*text.encode()]) == single.kv_digest
        handing = cast.prefill(
            "shm", node="handing", model="reference-mla", weights=weights, row=copied.row, aux=copied.aux
        )
        with (
            handing as stranger,
            Router(node="handing-router", prefill=stranger.endpoint, decode=decode.ready["endpoint"]) as router,
        ):
            for text, single in zip(TEXTS, whole, strict=True):
                for kind in (True, False):
                    end = router.complete(text.encode(), TOKENS, enable_hisparse=kind).ends["decode"]
                    names = ("tokens_digest", "logits_digest", "kv_digest")
                    assert [end[name] for name in names] == [getattr(single, name) for name in names]
            copied.logprobs = struct.pack("<f", -0.5)
            sampling = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": True}
            room = router.complete(TEXTS[0].encode(), TOKENS, enable_hisparse=True, sampling=sampling)
            assert room.tokens == [*whole[0].tokens]


@pytest.mark.parametrize("attention", ["mla", "gqa"])
def test_the_text_has_the_components_of_the_reference_engine(attention: str) -> None:
    layers = range(int(re.findall(r"Of L layers \((\d+),", TEXT)[0]))
    groups = layers[:: int(re.findall(r"the first of each `?index_share`? \((\d+)\)", TEXT)[0])]
    config = EngineConfig(
        role="prefill", slots=SLOTS, page_size=64, host_layout="layer_first",
        options={"attention": attention, "top_k": "16"},
    )  # fmt: skip
    description = create(config).description
    assert (description.model, len(description.weights)) == (f"reference-{attention}", 16)
    of_text = [plane for plane in PLANES_OF_TEXT if plane[0].startswith((f"kv of {description.model}", "index"))]
    assert {(each[0].split(",")[0].split(" ")[0], each[1], *each[3:]) for each in of_text} == {
        (component.name, component.memory, plane.kind, plane.dtype, plane.head_count, plane.head_bytes)
        for component in description.components
        for plane in component.layout.planes
    }
    for component, of in zip(description.components, (layers, groups), strict=True):
        assert {plane.layer for plane in component.layout.planes} == {*of}, component.name
    assert description.components[1].layout.page_size == int(re.findall(r"`index` has pages of (\d+)", TEXT)[0])
