"""Arguments of kernels, as the headers in kernels/ have them, and the shape of kv_copy's launches."""

from __future__ import annotations

import ctypes

THREADS = 512  # of a block, as in kernels/kv_copy.cu
BLOCKS_PUSH = 4  # to host memory: they saturate the bus and leave the other multiprocessors to the model


class SlotsArgument(ctypes.Structure):
    """Slots of kernels/kv_copy.h."""

    _fields_ = (
        ("entries", ctypes.c_uint64), ("first", ctypes.c_int64), ("entry_limit", ctypes.c_int64),
        ("wide", ctypes.c_int32), ("granule_shift", ctypes.c_int32), ("page_shift", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )  # fmt: skip


class CopyArgument(ctypes.Structure):
    """Copy of kernels/kv_copy.h."""

    _fields_ = (
        ("pairs", ctypes.c_uint64), ("source", SlotsArgument), ("target", SlotsArgument), ("count_at", ctypes.c_uint64),
        ("cancel", ctypes.c_uint64), ("progress", ctypes.c_uint64), ("tally", ctypes.c_uint64),
        ("count", ctypes.c_int64), ("pair_count", ctypes.c_uint32), ("ticket", ctypes.c_uint32),
        ("group_shift", ctypes.c_int32), ("pair_major", ctypes.c_int32), ("by_source", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )  # fmt: skip


class SetMlaArgument(ctypes.Structure):
    """SetMla of kernels/set_mla.h."""

    _fields_ = (
        ("buffer", ctypes.c_uint64), ("nope", ctypes.c_uint64), ("rope", ctypes.c_uint64), ("loc", ctypes.c_uint64),
        ("buffer_stride", ctypes.c_int64), ("nope_stride", ctypes.c_int64), ("rope_stride", ctypes.c_int64),
        ("slots", ctypes.c_int64), ("skip", ctypes.c_int64), ("rows", ctypes.c_int32), ("nope_units", ctypes.c_int32),
        ("units", ctypes.c_int32), ("wide", ctypes.c_int32),
    )  # fmt: skip
