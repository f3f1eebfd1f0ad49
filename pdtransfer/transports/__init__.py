"""Transports carry rows into a peer's arena. `base` is what each has to promise, `registry` the list of them."""
