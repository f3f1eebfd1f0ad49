"""Connectors for other projects' inference engines, one package each. Engines load them by name; nothing here imports
them."""
