"""Golden vectors of checksums: a few heads of a few rows, of every length that the hash treats in a way of its own."""

from __future__ import annotations

import hashlib

import numpy as np

from pdtransfer.layout.checksum import CHECKSUM_BYTES, MASK, hashes, lines_of, row_seeds
from pdtransfer.layout.layout import Layout, Plane

from .schema import Json

_CASES: tuple[tuple[str, str, tuple[tuple[str, int, int, int, int], ...]], ...] = (
    # component, then kind, layer, head, row and length in bytes
    ("one head of one row", "kv", (("latent", 0, 0, 0, 64),)),
    ("the same head of two rows", "kv", (("latent", 0, 0, 0, 64), ("latent", 0, 0, 1, 64))),
    ("keys and values of two heads in two layers", "kv", tuple(
        (kind, layer, head, row, 32) for kind in "kv" for layer in (3, 4) for head in (8, 9) for row in (0, 500)
    )),
    ("every length of tail", "index", tuple(("scale", 1, 0, row, row + 1) for row in range(66))),
    ("large numbers", "état", (("values", 65_535, 65_535, (1 << 32) - 1, 576),)),
    ("no parts", "kv", ()),
)  # fmt: skip


def cases() -> list[Json]:
    """Each with its heads, the hash of each, and their sum as Landed carries it."""
    return [_case(*case) for case in _CASES]


def _case(name: str, component: str, heads: tuple[tuple[str, int, int, int, int], ...]) -> Json:
    cases: list[Json] = []
    for kind, layer, head, row, length in heads:
        text = hashlib.shake_128(f"{kind} {layer} {head} {row}".encode()).digest(length)
        plane = Plane(layer, kind, "uint8", head, 1, 0, length, length, length)
        (head_seed,) = lines_of(component, Layout((plane,), 1, 1)).seeds
        hashed = hashes(np.frombuffer(text, np.uint8)[None], row_seeds(int(head_seed), np.array([row])))
        entry = {"kind": kind, "layer": layer, "head": head, "row": row, "bytes": text.hex()}
        cases.append(entry | {"hash": f"{int(hashed[0]):016x}"})
    total = sum(int(case["hash"], 16) for case in cases) & MASK
    return {
        "name": name, "component": component, "heads": cases,
        "checksum": total.to_bytes(CHECKSUM_BYTES, "little").hex(),
    }  # fmt: skip
