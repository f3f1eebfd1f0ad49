"""What an inference engine embeds: a client for prefill and a client for decode, each around a node on its own thread.

`api` has every name that their calls take, which are importable from `pdtransfer`. A node is the only loop and the only
clock. It passes inputs to its sans-I/O core, and carries out the effects that come back, on the thread of one event
loop. `core_driver` and `transports.device_events` carry out effects.
"""
