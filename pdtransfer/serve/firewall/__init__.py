"""Admits only the hosts of peers with a live session to the ports that a node's transports open.

A transport whose engines check no keys listens before it can report its ports. So a session's engines first report
their ports, then the ports are closed to all but the session's peer, and only then do they serve memory. Addresses are
those of the bus's connections, where the peer has proven its key.
"""

from .ruleset import HostNetwork, admit_networks
from .table import Firewall, FirewallMode, Guarded, firewall_for, why_no_table

__all__ = ["Firewall", "FirewallMode", "Guarded", "HostNetwork", "admit_networks", "firewall_for", "why_no_table"]
