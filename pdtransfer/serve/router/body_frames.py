"""The frames between a router and the processes that read large bodies for it."""

from __future__ import annotations

import struct

ASK = struct.Struct("<II")  # lengths of what to do, and of the body: both follow
ANSWER = struct.Struct("<BII")  # kind, length of what follows, and the number of parts behind it
PART = struct.Struct("<I")  # length of a part, which follows
READY, READ, REFUSED, FAILED = range(4)  # kinds of answers; READY comes once, before all others
