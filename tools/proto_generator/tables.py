"""The generated blocks of the pages of proto/v1: messages, structs, limits, states, and figures within sentences."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pdtransfer.bus.limits import BusLimits
from pdtransfer.errors import Cause
from pdtransfer.handoff import states
from pdtransfer.layout.layout import DTYPE_BYTES
from pdtransfer.limits import LOAD_MS, ROUTERS_MAX, Limits
from pdtransfer.memory.mapping import UNBACKED_BYTES_MAX
from pdtransfer.serve.engines.shell import first_token
from pdtransfer.serve.engines.shell.first_token import FirstToken
from pdtransfer.serve.router.backends.daemons import router_rooms as routed
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from pdtransfer.serve.worker import service_rooms as served
from pdtransfer.transports.engines.child import CHUNK_BYTES
from pdtransfer.transports.shm.handover import PATH_BYTES_MAX

from .diagrams import diagram
from .schema import Json, choices, constants, table_of

_STATES = {
    "A room on the decode side": diagram(states.DECODE_ROOM, states.DecodeRoom.CONNECTING),
    "A room on the prefill side": diagram(states.PREFILL_ROOM, states.PrefillRoom.OPEN),
    "A grant on the decode side: its lease": diagram(states.LEASE, states.Lease.GRANTED),
    "A grant on the prefill side: its duty": diagram(states.WRITER_GRANT, states.WriterGrantState.WAITING),
    "A session on the decode side": diagram(states.SESSION, states.SessionState.OFFERING),
    "A room on a daemon, towards its router": diagram(served.SERVICE_ROOM, served.ServiceRoom.RUNNING),
    "A room on one worker, as its router sees it": diagram(routed.LEG, routed.Leg.BEGINNING),
}


def filled(pages: dict[Path, str], schema: Json) -> dict[Path, str]:
    """The pages with everything from `<!-- name -->` to `<!-- /name -->` made anew."""
    blocks = {
        "aux": _fields(table_of(FirstToken, first_token), first=0),
        "messages": "\n".join(_section(entry, first=2) for entry in schema["messages"]),
        "structs": "\n".join(_section(entry, first=0) for entry in schema["structs"]),
        "limits": _rows(("limit", "value", "reason"), constants()),
        "choices": _rows(("choice", "default", "reason"), choices()),
        "states": "\n".join(f"### {title}\n\n```mermaid\n{drawn}\n```\n" for title, drawn in _STATES.items()),
    }
    words = {"dtypes": ", ".join(DTYPE_BYTES), "causes": ", ".join(f'"{cause.value}"' for cause in Cause)}
    figures = {name: f"{value:,}" for name, value in _figures().items()}
    places = {name: f"\n\n{block}\n" for name, block in blocks.items()} | words | figures
    mark = re.compile(r"<!-- (\w+) -->.*?<!-- /\1 -->", re.DOTALL)
    unplaced = places.keys() - {name for page in pages.values() for name in mark.findall(page)}
    assert not unplaced, f"no page has a place for {unplaced}"
    return {
        file: mark.sub(lambda match: f"<!-- {match[1]} -->{places[match[1]]}<!-- /{match[1]} -->", page)
        for file, page in pages.items()
    }


def _figures() -> dict[str, int]:
    """What sentences state and the code decides."""
    bus, limits = BusLimits(), Limits()
    return {
        **{name: getattr(limits, name) for name in ("ping_ms", "slow_ms", "silence_ms", "session_silence_ms")},
        **{name: getattr(bus, name) for name in (
            "line_bytes_max", "line_queue_bytes", "line_queue_frames", "line_unread_ms", "same_max", "named_max",
            "stale_ms", "mute_ms", "costs_max", "ignored_max", "banned_ms", "unacknowledged_ms",
        )},
        "load_ms": LOAD_MS, "routers_max": ROUTERS_MAX, "path_bytes_max": PATH_BYTES_MAX,
        "unbacked_bytes_max": UNBACKED_BYTES_MAX, "chunk_bytes": CHUNK_BYTES,
        "prefill_page_size": PrefillConfig().page_size, "decode_page_size": DecodeConfig().page_size,
    }  # fmt: skip


def _section(entry: Json, *, first: int) -> str:
    """`first` is the place of the first field in its array: a message's come after version and kind."""
    title = f"### {entry['name']}"
    if "kind" in entry:
        title += f" ({entry['kind']}, {entry['way']})"
    return f"{title}\n\n{entry['meaning']}\n\n{_fields(entry, first=first)}\n"


def _fields(entry: Json, *, first: int) -> str:
    rows = [
        (first + index, f"`{field['name']}`", _type(field["type"]), _default(field), field["meaning"])
        for index, field in enumerate(entry["fields"])
    ]
    return _rows(("place", "field", "type", "default", "meaning"), rows)


def _rows(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _default(field: Json) -> str:
    """Nothing where the field must be there."""
    match field.get("default", ...):
        case builtins if builtins is ...:
            return ""
        case {"hex": ""} | "" | []:  # an empty tuple, too
            return "empty"
        case bool() as flag:
            return str(flag).lower()
        case tuple():
            return json.dumps(field["default"])  # an array, not the text in it
        case str() as text:
            return json.dumps(text)
        case value:
            return str(value)


def _type(model: Json) -> str:
    match model:
        case {"is": "int", "min": least, "max": most}:
            return f"int, {least} to {_power(most)}"
        case {"is": "float", "max": most}:
            return (
                f"float, above {model['above']} to {most}" if "above" in model else f"float, {model['min']} to {most}"
            )
        case {"is": "str", "one_of": values}:
            return "str, " + ", ".join(f'"{value}"' for value in values)
        case {"is": "str"}:
            form = f", `{model['pattern']}`" if "pattern" in model else ""
            return f"str of {model['length_min']} to {model['length_max']} characters{form}"
        case {"is": "bin"}:
            return f"bin of {model['length_min']} to {model['length_max']} bytes"
        case {"is": "struct", "struct": name}:
            return f"[{name}](#{name.lower()})"
        case {"is": "array", "of": item}:
            return f"array of {model['length_min']} to {model['length_max']}: {_type(item)}"
        case _:
            return model["is"]


def _power(value: int) -> str:
    for exact, suffix in ((value, ""), (value + 1, " - 1")):
        if value >= 1 << 16 and exact & (exact - 1) == 0:
            return f"2^{exact.bit_length() - 1}{suffix}"
    return str(value)
