"""Where rows of HBM components land whose writer does not reach HBM: in the staging buffer, as Register says."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ..errors import RemoteProtocolError
from ..layout.layout import Component, Layout
from ..wire import Register, StagedLayout


def staging_of(components: Sequence[Component], landing: Sequence[Component]) -> tuple[StagedLayout, ...]:
    """As Register names the places of HBM components in `landing`; none where these are the components' own."""
    return tuple(
        StagedLayout(landed.layout.slots, landed.layout.table[:, 3].astype("<u8").tobytes())
        for landed in (landing if landing is not components else ())
        if landed.memory == "hbm"
    )


def landing_of(register: Register) -> tuple[Component, ...]:
    """The components as a writer that does not reach HBM writes them.

    Raises RemoteProtocolError that names the field, unless there is one entry for each HBM component, each a layout of
    its component within the arena.
    """
    in_hbm = [component for component in register.components if component.memory == "hbm"]
    if not register.staging:
        return register.components
    if len(register.staging) != len(in_hbm):
        text = f"{len(register.staging)} entries for {len(in_hbm)} HBM components"
        raise RemoteProtocolError("Register.staging", text)
    landed = [
        _landed(f"Register.staging[{index}]", component, staging, register.reach.arena_bytes)
        for index, (component, staging) in enumerate(zip(in_hbm, register.staging, strict=True))
    ]
    rest = iter(landed)
    return tuple(next(rest) if component.memory == "hbm" else component for component in register.components)


def _landed(field: str, component: Component, staging: StagedLayout, arena_bytes: int) -> Component:
    planes, page_size = component.layout.planes, component.layout.page_size
    if len(staging.bases) != 8 * len(planes):
        raise RemoteProtocolError(f"{field}.bases", f"{len(staging.bases)} bytes for {len(planes)} planes, 8 each")
    bases = np.frombuffer(staging.bases, "<u8").tolist()
    try:
        moved = [msgspec.structs.replace(plane, base=base) for plane, base in zip(planes, bases, strict=True)]
        layout = Layout(tuple(moved), page_size, staging.slots)
        layout.check_within(arena_bytes, "Register.reach.arena_bytes")
    except ValueError as error:
        raise RemoteProtocolError(field, str(error)) from None
    return msgspec.structs.replace(component, layout=layout)
