"""The rooms of a request that SGLang numbers by its `bootstrap_room`.

A room of ours is used once, and clients may use a bootstrap_room again: after a failure, or to have a prompt computed
anew. So decode numbers the uses. Its room has the hash of the bootstrap_room in the upper bits, and the use in the
lower ones. Prefill opens the room that decode asks for: it knows the request by the upper bits.
"""

from __future__ import annotations

from hashlib import sha256

USE_BITS = 20


def tag_of(bootstrap_room: int) -> int:
    """The upper bits of the rooms of a bootstrap_room."""
    return int.from_bytes(sha256(b"%d" % bootstrap_room).digest()[:8], "little") >> USE_BITS or 1  # no room is 0


def room_of(bootstrap_room: int, use: int) -> int:
    """A room of a bootstrap_room, by the lower bits of the number of its use."""
    return tag_of(bootstrap_room) << USE_BITS | use % (1 << USE_BITS)
