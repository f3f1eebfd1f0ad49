"""Connectors for inference engines of others, one package each. Engines load them by name; nobody inside imports them."""
