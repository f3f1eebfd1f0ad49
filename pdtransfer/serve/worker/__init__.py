"""The prefill and decode daemons: an engine on one thread, a node on the loop, and the link to the router."""
