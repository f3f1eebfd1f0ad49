"""Messages to and from authenticated peers over ZMQ, on one event loop: never blocks it, loses rather than waits."""

from .bus import Bus as Bus
from .limits import BusLimits as BusLimits
