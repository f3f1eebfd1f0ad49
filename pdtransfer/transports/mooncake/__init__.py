"""Mooncake's TransferEngine, for arenas of other hosts: a process of engines a session, on either side.

No return code of the engine says for certain that a write has stopped. What says so is the death of decode's process:
it alone has the arena registered, and what has not been copied by then is in sockets that are gone with it.
"""

from .arena import MooncakeArena as MooncakeArena
from .process import environment as environment
from .process import why_not as why_not
from .writer import MooncakeWriter as MooncakeWriter
