"""pdtransfer carries the KV cache of a prefill worker straight into a decode worker's host DRAM."""

__version__ = "0.1.0"
