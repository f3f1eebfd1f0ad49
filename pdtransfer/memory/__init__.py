"""Memory that KV lies in: the arena, HBM components, and what a peer may map of them."""
