"""Connectors for inference engines of others, a package each. Engines load them by name; nothing here imports them."""
