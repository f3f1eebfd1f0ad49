"""Prefill's side of a hand-off: rooms are opened, their cells meet grants, and each byte is written once."""
