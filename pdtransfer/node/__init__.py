"""The only loop and the only clock: a node passes inputs to its core, and carries out the effects that come back.

Everything here runs on the thread of one event loop. `core_driver` and `transports.device_events` carry out effects.
"""

from .decode import DecodeNode as DecodeNode
from .prefill import PrefillNode as PrefillNode
from .settings import NodeSettings as NodeSettings
from .settings import Others as Others
