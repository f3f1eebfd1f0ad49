"""What measures or attacks this project itself: `python -m benchmarks PART` in a checkout; no part of the package.

A part's `measure` returns figures, and its docstring is the method. Whatever is compared, a bare round trip or a
memcpy, is timed in the same run, in turn with what it is compared with: a busy host is busy for both.
"""
