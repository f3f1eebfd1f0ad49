"""What every process of ours settles before it serves."""

from __future__ import annotations

import resource

from .port import share_the_interpreter


def prepare() -> None:
    """Short turns between threads, and as many descriptors as may be had.

    The soft limit is 1,024 on many hosts, for the sake of select(), which nothing here uses. A flood of connections
    would use them up, and the listeners would have none left for the peers that mean well.
    """
    share_the_interpreter()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
