"""Prefill's writes: what a cell and a grant have in common, in flight until the shell says how it ended."""

from __future__ import annotations

from ..effects import Write
from .cells import Cell
from .writer_grants import DutyEntry, WriterSession


def started(duty: DutyEntry, cell: Cell) -> list[Write]:
    """Puts in flight what this cell and an active grant have in common: one write for each part that it meets."""
    session, orders = duty.session, list[Write]()
    assert duty.room is not None
    for share in duty.shares:
        component = session.components[share.component]
        if component.name != cell.component:
            continue
        low = max(share.first_row, cell.first_row)
        high = min(share.first_row + share.rows, cell.first_row + len(cell.source_slots))
        layers = component.layout.layer_range
        first, end = max(layers[0], cell.layers[0]), min(layers[1], cell.layers[1])
        slot_bytes = component.layout.row_bytes
        if (first, end) != layers:
            slot_bytes = component.layout.row_bytes_of(first, end)
        if low >= high or not slot_bytes:
            continue
        write = session.next_write
        session.next_write += 1
        session.writes[write] = duty, (high - low) * slot_bytes
        duty.in_flight += 1
        order = Write(
            session=session.id, grant=duty.number, room=duty.room, write=write,
            component=share.component, layers=(first, end), first_row=low, verify=duty.verify, after=cell.after,
            urgent=high == share.first_row + share.rows and layers[1] - end <= end - first,
            source_slots=cell.source_slots[low - cell.first_row : high - cell.first_row],
            target_slots=share.target_slots[low - share.first_row : high - share.first_row],
        )  # fmt: skip
        orders.append(order)
    return orders


def ended(session: WriterSession, write: int) -> tuple[DutyEntry, int]:
    """Takes a write out of flight: its grant, and the bytes that it was of."""
    duty, byte_count = session.writes.pop(write)
    duty.in_flight -= 1
    return duty, byte_count
