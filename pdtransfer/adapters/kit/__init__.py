"""What the connectors share: settings, memory of an engine's cache, heads, reachable addresses, facts of a model."""
