"""Rows: how many a component has, where each lies, and which slots a part names (sections 2 and 4)."""

import struct
from collections.abc import Iterator
from typing import Any

from tests.serve.stranger.checksum import MASK, head_hash

Fields = dict[str, Any]


def row_count(component: Fields, tokens: int) -> int:
    """Rows of a room of this many tokens."""
    span = component["span"]
    if span["kind"] == "once":
        return 1
    if span["kind"] == "last":
        tokens = min(tokens, span["tokens"])
    return -(-tokens // component["tokens_per_row"])


def piece_rows(component: Fields, grant: Fields) -> tuple[int, int]:
    """The rows [first, end) that a grant may ask for: those whose last token is in [prefix, stop), and with the room's
    end its last row, its window and its state."""
    first = grant["prefix"] // component["tokens_per_row"] if component["span"]["kind"] == "all" else 0
    if grant["stop"] >= grant["tokens"]:
        return first, row_count(component, grant["tokens"])
    return first, grant["stop"] // component["tokens_per_row"] if component["span"]["kind"] == "all" else 0


def landing(register: Fields) -> list[Fields]:
    """The components as a writer that does not reach HBM writes them: those in HBM where `staging` says."""
    staging, components = iter(register["staging"]), []
    for component in register["components"]:
        if component["memory"] == "hbm" and register["staging"]:
            entry, layout = next(staging), component["layout"]
            bases = struct.unpack(f"<{len(layout['planes'])}Q", entry["bases"])
            planes = [plane | {"base": base} for plane, base in zip(layout["planes"], bases, strict=True)]
            component = component | {"layout": layout | {"planes": planes, "slots": entry["slots"]}}
        components.append(component)
    return components


def offset(layout: Fields, plane: Fields, slot: int) -> int:
    """Of a slot's row in a plane, from the beginning of the arena."""
    page, row = divmod(slot, layout["page_size"])
    return plane["base"] + page * plane["page_stride"] + row * plane["row_stride"]


def packed(slots: list[int]) -> bytes:
    """Slots in the order of their rows as extents: start and count of each run."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and sum(runs[-1]) == slot:
            runs[-1][1] += 1
        else:
            runs.append([slot, 1])
    return b"".join(struct.pack("<2I", *run) for run in runs)


def slots_of(extents: bytes) -> list[int]:
    return [slot for start, count in struct.iter_unpack("<2I", extents) for slot in range(start, start + count)]


def places(component: Fields, part: Fields) -> Iterator[tuple[Fields, int, int]]:
    """Plane, row of the room, and byte offset in the arena, of all that a part covers."""
    layout = component["layout"]
    for index, slot in enumerate(slots_of(part["extents"])):
        for plane in layout["planes"]:
            yield plane, part["first_row"] + index, offset(layout, plane, slot)


def fault(components: list[Fields], grant: Fields) -> str:
    """What is wrong with a grant (section 4, Grants), as one line that names the field; empty: nothing."""
    if grant["stop"] < grant["prefix"]:
        return f"Grant.stop: {grant['stop']}, the prefix is {grant['prefix']}"
    if grant["send_aux"] and grant["stop"] < grant["tokens"]:
        return f"Grant.send_aux: true, of tokens up to {grant['stop']} of {grant['tokens']}"
    for index, part in enumerate(grant["parts"]):
        name = f"Grant.parts[{index}]"
        if part["component"] >= len(components):
            return f"{name}.component = {part['component']}: {len(components)} are registered"
        component, slots = components[part["component"]], slots_of(part["extents"])
        if len(slots) != part["rows"] or len({*slots}) != len(slots):
            return f"{name}.extents: {len({*slots})} slots, and rows = {part['rows']}"
        if slots and max(slots) >= component["layout"]["slots"]:
            return f"{name}.extents: slot {max(slots)} of {component['layout']['slots']}"
        first, end = piece_rows(component, grant)
        if part["first_row"] < first:
            return f"{name}.first_row: decode holds {first} rows"
        if part["first_row"] + part["rows"] > end:
            return f"{name}.rows: beyond those of {min(grant['stop'], grant['tokens'])} tokens"
    return ""


def row_sum(component: Fields, plane: Fields, row: int, content: bytes) -> int:
    """What a row adds to its grant's checksum: one hash for each of its heads."""
    size = plane["row_bytes"] // plane["head_count"]
    heads = [content[offset : offset + size] for offset in range(0, plane["row_bytes"], size)]
    found = [
        head_hash(component["name"], plane["kind"], plane["layer"], plane["head_start"] + index, row, head)
        for index, head in enumerate(heads)
    ]
    return sum(found) & MASK


def checksum(total: int) -> bytes:
    """As Landed carries it."""
    return (total & MASK).to_bytes(8, "little")
