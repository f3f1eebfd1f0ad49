"""Where KV rows lie in a pool, and the copies from one pool to another. Pure: no I/O, no clock."""
