"""Decode's side of a hand-off: rooms are expected, leased, granted, landed and released."""
