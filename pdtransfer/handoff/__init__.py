"""The pure core of a hand-off: inputs go in, effects come out. No I/O, no clock, no random number."""
