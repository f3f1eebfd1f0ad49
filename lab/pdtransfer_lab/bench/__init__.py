"""What a user sizes a host with: `pdtransfer bench PART`.

A part's `measure` returns figures, and its docstring is the method. What a figure is compared with, a memcpy or a DMA,
is timed in the same run, in turn with it: a busy host is busy for both.
"""
