"""The program that keeps a firewall table: it runs what it is sent through libnftables, and the table ends with it.

It is a process of its own because libnftables ends its process on some errors. Besides, the kernel ties a table with an
owner to the socket that made it. It is started by its path and imports nothing of the package. `table` is the parent's
half.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time

PACKET_BYTES = 65_536
DONE, FAILED = b"+", b"-"  # the first byte of an answer; output or an error's text follows
LIBRARY = "libnftables.so.1"

_PR_SET_PDEATHSIG = 1
_JSON = 1 << 4
_LINGER_S = 0.5  # engines die with the same parent: the ports are closed as long as one may listen


def main() -> None:
    """child.py PARENT SOCKET"""
    parent, number = map(int, sys.argv[1:])
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the parent, which drains first
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, _on_orphaned)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
    if os.getppid() != parent:
        return  # it died before prctl
    pipe = socket.socket(fileno=number)
    try:
        nft = ctypes.CDLL(LIBRARY)
    except OSError as error:
        pipe.send(FAILED + f"{error}".encode()[: PACKET_BYTES - 1])
        return
    nft.nft_ctx_new.restype = ctypes.c_void_p
    nft.nft_ctx_new.argtypes = (ctypes.c_uint32,)
    nft.nft_run_cmd_from_buffer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    nft.nft_ctx_output_set_flags.argtypes = (ctypes.c_void_p, ctypes.c_uint)
    for name in ("nft_ctx_buffer_error", "nft_ctx_buffer_output"):
        getattr(nft, name).argtypes = (ctypes.c_void_p,)
    for name in ("nft_ctx_get_error_buffer", "nft_ctx_get_output_buffer"):
        getattr(nft, name).argtypes = (ctypes.c_void_p,)
        getattr(nft, name).restype = ctypes.c_char_p
    context = nft.nft_ctx_new(0)
    nft.nft_ctx_output_set_flags(context, _JSON)
    nft.nft_ctx_buffer_error(context)
    nft.nft_ctx_buffer_output(context)
    pipe.send(DONE)
    while packet := pipe.recv(PACKET_BYTES):
        if nft.nft_run_cmd_from_buffer(context, packet) == 0:
            answer = DONE + (nft.nft_ctx_get_output_buffer(context) or b"")
        else:
            answer = FAILED + (nft.nft_ctx_get_error_buffer(context) or b"")
        pipe.send(answer[:PACKET_BYTES])
    _leave()


def _on_orphaned(_signal: int, _frame: object) -> None:
    _leave()


def _leave() -> None:
    time.sleep(_LINGER_S)
    os._exit(0)


if __name__ == "__main__":
    main()
