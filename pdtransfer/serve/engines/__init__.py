"""Engines of the daemons, a package each. Daemons load one by the name of its factory; nothing here imports them."""
