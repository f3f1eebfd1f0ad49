"""Messages to and from authenticated peers over ZMQ on one event loop; it never blocks, and drops instead."""

from .bus import Bus as Bus
from .limits import BusLimits as BusLimits
