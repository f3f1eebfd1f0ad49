"""Strangers that stand in for daemons which run the engine of examples/engine.py."""

from typing import Any

from tests.serve.stranger import model, mooncake, shm
from tests.serve.stranger.decode import Decode
from tests.serve.stranger.prefill import Prefill

SLOTS = 512
WAYS = {"shm": shm, "mooncake": mooncake}


def identity(transport: str) -> dict[str, Any]:
    return {"transports": [transport], "place": " ".join(shm.place())}


def decode(transport: str, *, sparse: bool = False, **more: Any) -> Decode:
    """With HiSparse its KV is there twice: in DRAM, and as a GPU's memory, which is a range of the arena here."""
    size = model.component_bytes(SLOTS)
    components = [model.component("dram", SLOTS)]
    hbm = {}
    if sparse:
        components.append(model.component("hbm", SLOTS, base=size))
        hbm = {"hbm_base": size, "hbm_bytes": size}
    made = {"node": "strange-decode", "model": model.NAME, "weights": model.WEIGHTS, "identity": identity(transport)}
    arena = WAYS[transport].Arena(size * len(components), **hbm)
    return Decode(arena, components, model.generate, **(made | more))


def prefill(transport: str, **more: Any) -> Prefill:
    made = {
        "target": WAYS[transport].Target,
        "row": model.row,
        "aux": model.aux,
        "node": "strange-prefill",
        "model": model.NAME,
        "weights": model.WEIGHTS,
        "identity": identity(transport),
    }
    return Prefill(**(made | more))
