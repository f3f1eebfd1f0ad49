"""Shared memory on one host: prefill maps decode's arena and copies into it; the fence is a lock its mapping holds.

For each writer the arena's memfd is reopened, an open-file-description lock is taken on a byte of that writer's own,
and that descriptor is handed over and closed here. The lock is gone when the last mapping and descriptor of it is,
whoever forked, froze or was killed: then, and only then, nobody can write.
"""

from .arena import ShmArena as ShmArena
from .writer import ShmWriter as ShmWriter
