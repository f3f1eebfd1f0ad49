"""Transports carry rows into a peer's arena; `base` says what each of them promises."""
