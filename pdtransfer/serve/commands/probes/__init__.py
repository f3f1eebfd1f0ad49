"""What doctor checks on every host; each transport brings probes of its own."""
