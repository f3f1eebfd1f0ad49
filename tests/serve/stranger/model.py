"""What examples/engine.py computes, in whole numbers: an engine's business, and no part of the protocol.

The KV of a position in a layer is a stamp of all tokens up to it, plus the layer, repeated over the row. A token of
the answer follows from the stamp of the prompt's last position, so a decode that reads it out of its arena answers
rightly only if it landed.
"""

from typing import Any

from tests.serve.stranger.peer import require

NAME, WEIGHTS = "plain", b"plain"
LAYERS, ROW_BYTES = 2, 64
MASK = 2**64 - 1


def stamps(ids: list[int]) -> list[int]:
    factor, total, found = 1, 0, []
    for token in ids:
        factor = factor * 0x9E3779B97F4A7C15 & MASK
        total = total + (token + 1) * factor & MASK
        found.append(total | 1)
    return found


def row(ids: list[int], component: str, plane: dict[str, Any], at: int) -> bytes:
    """The KV of position `at` in a plane."""
    word = (stamps(ids[: at + 1])[-1] + plane["layer"] & MASK).to_bytes(8, "little")
    return word * (plane["row_bytes"] // 8)


def aux(ids: list[int]) -> bytes:
    return stamps(ids)[-1].to_bytes(8, "little")


def token(last: bytes, index: int) -> int:
    """The answer's token at `index`, by the row of the prompt's last position in layer 0."""
    return 97 + ((int.from_bytes(last[:8], "little") >> 8) + index * 7_919) % 26


def component(memory: str, slots: int, base: int = 0) -> dict[str, Any]:
    """This model's KV in an arena: slot by slot, both layers of a slot together."""
    planes = [
        {
            "layer": layer,
            "kind": "latent",
            "dtype": "uint8",
            "head_start": 0,
            "head_count": 1,
            "base": base + layer * ROW_BYTES,
            "page_stride": LAYERS * ROW_BYTES,
            "row_stride": ROW_BYTES,
            "row_bytes": ROW_BYTES,
        }
        for layer in range(LAYERS)
    ]
    layout = {"planes": planes, "page_size": 1, "slots": slots}
    return {"name": "kv", "memory": memory, "tokens_per_row": 1, "span": {"kind": "all", "tokens": 0}, "layout": layout}


def component_bytes(slots: int) -> int:
    return slots * LAYERS * ROW_BYTES


def generate(ids: list[int], read: Any, made: bytes, count: int) -> list[int]:
    """An answer of `count` tokens from what has landed: `read` takes component, kind, layer and row."""
    require(made == aux(ids), f"aux = {made.hex()}: not this prompt's")
    last = read("kv", "latent", 0, len(ids) - 1)
    return [token(last, index) for index in range(count)]
