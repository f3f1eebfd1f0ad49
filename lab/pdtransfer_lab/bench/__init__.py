"""What a user sizes a host with: `pdtransfer bench PART`.

A part's `measure` returns figures, and its docstring is the method. Whatever is compared, a memcpy or a DMA, is timed
in the same run, in turn with what it is compared with: a busy host is busy for both.
"""
