"""A GPU's memory for other processes, without a GPU: whose handles are refused, and which GPU it is opened for."""

from __future__ import annotations

import msgspec
import pytest

from pdtransfer.errors import TransportError
from pdtransfer.memory import cuda_ipc


@pytest.mark.parametrize(
    "packed",
    [
        b"", b"\x90", cuda_ipc.Handle("gpu", 8, 0, b"x" * 16, b"").packed,
        cuda_ipc.Handle("gpu", 8, -1, b"x" * 16, b"h" * 64).packed,
        msgspec.msgpack.encode(("memfd", 8, 0, b"x" * 16, b"h" * 64)),
    ],
)  # fmt: skip
def test_what_is_no_handle_is_refused(packed: bytes) -> None:
    with pytest.raises(TransportError, match="handle of exported memory"):
        cuda_ipc.Handle.unpack(packed)


def test_a_handle_of_an_older_release_has_more_fields() -> None:
    fields = "gpu", 8, 0, b"x" * 16, b"h" * 64
    assert cuda_ipc.Handle.unpack(msgspec.msgpack.encode((*fields, 0, 0, 0))) == cuda_ipc.Handle(*fields)


def test_memory_of_a_card_that_is_not_seen_here_is_opened_for_one_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's engines are given a GPU each with CUDA_VISIBLE_DEVICES, and write each other's."""
    log: list[tuple[object, ...]] = []

    class Seen:
        uuid = b"\xdd" * 16

        def ipc_open(self, handle: bytes, flags: int) -> int:
            log.append(("open", handle))
            return 1 << 20

        def ipc_close(self, base: int) -> None:
            log.append(("close", base))

        def range_of(self, address: int) -> tuple[int, int]:
            return address, 4_096

    monkeypatch.setattr(cuda_ipc.gpus, "gpu_at", lambda ordinal: {0: Seen()}[ordinal])
    handle = cuda_ipc.Handle("gpu", 1_024, 256, b"\xee" * 16, b"h" * 64)
    opened = cuda_ipc.Opened(handle, 0)
    assert (opened.address, opened.byte_count) == ((1 << 20) + 256, 1_024)
    assert not opened.same_gpu
    opened.close()
    Seen.uuid = handle.gpu
    own, again = cuda_ipc.Opened(handle, 0), cuda_ipc.Opened(msgspec.structs.replace(handle, byte_count=3_840), 0)
    assert own.same_gpu
    with pytest.raises(TransportError, match=r"bytes 256\+3841 of an allocation of 4096"):
        cuda_ipc.Opened(msgspec.structs.replace(handle, byte_count=3_841), 0)
    own.close()
    assert log.count(("close", 1 << 20)) == 1, "the driver has a handle open once, for all that use it"
    again.close()
    assert log == [("open", b"h" * 64), ("close", 1 << 20)] * 2
