"""The hand-off itself, sans I/O: inputs go in, effects come out.

Rooms are `decode`'s and `prefill`'s. Below them decode has `places` (rooms that wait for their sources), `links` (peers
and sessions) and `leases` (grants), over its `ledger`; prefill has `writers` (peers and sessions), `grants` and
`writes`, over its `duties` and `cells`.
"""
