"""Packed logprobs of generated tokens and packed logit biases, as Tokens and Sampling carry them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import RemoteProtocolError
from .messages import Sampling

_PAIR = np.dtype([("id", "<u4"), ("value", "<f4")])


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The logprob of one generated token, and `top` ids with theirs, the likeliest first."""

    own: float
    top: tuple[tuple[int, float], ...] = ()

    def pack(self) -> bytes:
        """Encodes it as Tokens has it."""
        flat = [value for pair in self.top for value in pair]
        return struct.pack("<f" + "If" * len(self.top), self.own, *flat)


def logprob_bytes(sampling: Sampling) -> int:
    """Bytes of one token's packed logprobs; 0 where they are not asked for."""
    return 4 + 8 * sampling.top_logprobs if sampling.logprobs else 0


def unpack_logprobs(field: str, data: bytes, sampling: Sampling, count: int) -> list[Logprobs]:
    """Decodes the logprobs of `count` tokens; none where they are not asked for. Raises RemoteProtocolError for a wrong
    length, and for what is not finite or above 0."""
    stride = logprob_bytes(sampling)
    if len(data) != stride * count:
        raise RemoteProtocolError(field, f"{len(data)} bytes for {count} tokens of {stride} bytes each")
    if not stride:
        return []
    row = np.dtype([("own", "<f4"), ("top", _PAIR, (sampling.top_logprobs,))])
    rows = np.frombuffer(data, row)
    for values in (rows["own"], rows["top"]["value"]):
        wrong = values[~(np.isfinite(values) & (values <= 0.0))]
        if wrong.size:
            raise RemoteProtocolError(field, f"a logprob of {wrong.flat[0]}, must be finite and at most 0")
    tops = rows["top"].tolist()
    return [Logprobs(value, tuple(map(tuple, top))) for value, top in zip(rows["own"].tolist(), tops, strict=True)]


def pack_biases(biases: dict[int, float]) -> bytes:
    """Encodes logit biases by token id."""
    return np.array(list(biases.items()), _PAIR).tobytes()


def unpack_biases(field: str, data: bytes) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Decodes ids and what is added to their logits. Raises RemoteProtocolError for a wrong length, for what is not
    finite, and for an id that is named twice."""
    if len(data) % _PAIR.itemsize:
        raise RemoteProtocolError(field, f"{len(data)} bytes, expected pairs of u32 and f32")
    pairs = np.frombuffer(data, _PAIR)
    ids, values = pairs["id"].astype(np.int64), pairs["value"].astype(np.float32)
    if not np.isfinite(values).all():
        raise RemoteProtocolError(field, "a bias is not finite")
    if len(set(ids.tolist())) < len(ids):
        raise RemoteProtocolError(field, "an id is named twice")
    return ids, values
