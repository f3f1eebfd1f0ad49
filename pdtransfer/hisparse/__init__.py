"""Decode with the whole KV in host DRAM and the hot tokens on the device."""
