"""The only loop and the only clock: a node hands inputs to its core and performs the effects that come back, in order.

Everything here runs on one event loop's thread. What it performs effects with are `turn` and `events`.
"""

from .decode import DecodeNode as DecodeNode
from .prefill import PrefillNode as PrefillNode
from .settings import NodeSettings as NodeSettings
from .settings import Others as Others
