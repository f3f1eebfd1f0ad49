"""Inference engines behind the daemons: `base` is what a daemon asks of one, the rest is the reference model."""
