"""The hand-off itself, sans I/O: inputs go in, effects come out. `links` keeps peers and sessions, `decode` and `prefill` keep rooms."""
