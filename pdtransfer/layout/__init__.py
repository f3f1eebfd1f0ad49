"""The places of KV rows in a pool, and the copies from one pool to another. Pure: no I/O, no clock."""
