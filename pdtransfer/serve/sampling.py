"""Checks requests, picks tokens reproducibly from logits and digests both: the same for every engine, without torch.

Logits are float32 (vocabulary,). Nothing is kept between two tokens. A pick depends on the logits, the request, the ids
generated so far, and on a hash of the seed and the index. So no state goes from prefill to decode, and every rank of a
worker picks the same. A request that goes on in another room has its earlier ids at the end of that room's prompt, and
`Sampling.generated` counts them. Each pick is the one that the first room would have made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite

import numpy as np
from msgspec.structs import fields
from numpy.typing import NDArray

from ..errors import RemoteProtocolError
from ..wire import Logprobs, Sampling, unpack_biases, unpack_logprobs

# Beyond this vocabulary, only this many of the likeliest tokens are sorted where the rest cannot change the draw.
SORTED_MAX = 2_048
LOGPROB_MIN = -9_999.0  # what OpenAI's API writes for a token that is very unlikely
_LOGIT_MAX = float(np.finfo(np.float32).max)
DIGEST_BYTES = 16  # of tokens and logits
_NAMES = tuple(field.name for field in fields(Sampling))
BASIC = frozenset(_NAMES[: _NAMES.index("ignore_eos") + 1])  # what every engine has: the fields of v1.0


@dataclass(frozen=True, slots=True)
class Picked:
    """A generated token, with its logprobs where the request asks for them."""

    id: int
    logprobs: Logprobs | None = None

    def pack_logprobs(self) -> bytes:
        """The logprobs as an aux carries them to decode; empty without them."""
        return b"" if self.logprobs is None else self.logprobs.pack()

    @classmethod
    def of_aux(cls, token: int, logprobs: bytes, sampling: Sampling) -> Picked:
        """The first token out of an aux. Raises ValueError for logprobs other than the request asks for."""
        try:
            of_token = unpack_logprobs("logprobs", logprobs, sampling, 1)
        except RemoteProtocolError as error:
            raise ValueError(f"aux: {error}") from None
        return cls(token, of_token[0] if of_token else None)


def beyond_basic(sampling: Sampling) -> str | None:
    """The first field of a request that an engine without `EngineDescription.full_sampling` would ignore."""
    for field in fields(Sampling):
        if field.name not in BASIC and getattr(sampling, field.name) != field.default:
            return field.name
    return None


def is_argmax(sampling: Sampling) -> bool:
    """True if every pick is the first highest logit and nothing else is asked for, so that an engine may pick on its
    device."""
    changed = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
    return sampling.temperature == 0.0 and not (
        changed or sampling.logit_bias or sampling.min_tokens or sampling.logprobs
    )


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Raises ValueError, with the field and its value, for what no pick could follow."""
    ranges = {"temperature": (0.0, float("inf")), "min_p": (0.0, 1.0), "presence_penalty": (-2.0, 2.0)}
    ranges["frequency_penalty"] = ranges["presence_penalty"]
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens: {sampling.max_tokens}, at least 1 is needed")
    for name, (low, high) in ranges.items():
        value: float = getattr(sampling, name)
        if not isfinite(value) or not low <= value <= high:
            raise ValueError(f"{name}: {value} is not finite and within [{low}, {high}]")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p: {sampling.top_p} is not within (0, 1]")
    if not isfinite(sampling.repetition_penalty) or sampling.repetition_penalty <= 0:
        raise ValueError(f"repetition_penalty: {sampling.repetition_penalty} is not finite and above 0")
    if not 0 <= sampling.seed < 1 << 64:
        raise ValueError(f"seed: {sampling.seed} is not within [0, 2**64)")
    if sampling.generated < 0:
        raise ValueError(f"generated: {sampling.generated} is below 0")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise ValueError(f"min_tokens: {sampling.min_tokens}, max_tokens is {sampling.max_tokens}")
    if sampling.top_logprobs > vocabulary:
        raise ValueError(f"top_logprobs: {sampling.top_logprobs}, the vocabulary has {vocabulary} ids")
    try:
        ids, _ = unpack_biases("logit_bias", sampling.logit_bias)
    except RemoteProtocolError as error:
        raise ValueError(str(error)) from None
    if len(ids) and int(ids.max()) >= vocabulary:
        raise ValueError(f"logit_bias: id {int(ids.max())} is not within [0, {vocabulary})")


def check_asked(prompt: NDArray[np.int64], sampling: Sampling, *, vocabulary: int, context_tokens: int) -> None:
    """Raises ValueError, with both values, for a request that no model of these sizes can serve."""
    if prompt.ndim != 1 or prompt.dtype != np.int64:
        raise ValueError(f"prompt: {prompt.dtype} of shape {prompt.shape}, expected int64 (tokens,)")
    if len(prompt) == 0:
        raise ValueError("prompt: 0 tokens, at least 1 is needed")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= vocabulary:
        raise ValueError(f"prompt: id {low if low < 0 else high} is not within [0, {vocabulary})")
    check_sampling(sampling, vocabulary)
    if sampling.generated >= len(prompt):
        raise ValueError(f"generated: {sampling.generated}, the prompt with them has {len(prompt)} tokens")
    total = len(prompt) + sampling.max_tokens
    if total > context_tokens:
        raise ValueError(
            f"prompt of {len(prompt)} tokens and max_tokens {sampling.max_tokens} are {total} tokens, "
            f"the context has {context_tokens}"
        )


def pick(
    logits: NDArray[np.float32],
    sampling: Sampling,
    *,
    prompt: NDArray[np.int64],
    ids: Sequence[int],
    eos: Sequence[int] = (),
) -> Picked:
    """Picks the token after `ids`, which this room generated from `prompt`; `eos` are the ids that end a sequence."""
    chosen = draw(adjusted(logits, sampling, prompt=prompt, ids=ids, eos=eos), sampling, len(ids))
    return Picked(chosen, logprobs_of(logits, chosen, sampling.top_logprobs) if sampling.logprobs else None)


def adjusted(
    logits: NDArray[np.float32],
    sampling: Sampling,
    *,
    prompt: NDArray[np.int64],
    ids: Sequence[int],
    eos: Sequence[int] = (),
) -> NDArray[np.float32]:
    """The logits after bias, minimum length and penalties; the same array where the request has none of them."""
    if is_argmax(sampling) or beyond_basic(sampling) in (None, "generated"):
        return logits
    logits = logits.copy()
    if sampling.logit_bias:
        biased, values = unpack_biases("logit_bias", sampling.logit_bias)
        logits[biased] += values
    generated = np.concatenate((prompt[len(prompt) - sampling.generated :], np.asarray(ids, np.int64)))
    if sampling.repetition_penalty != 1.0:
        seen = np.concatenate((prompt, generated))  # twice or once is the same
        penalty = np.float32(max(sampling.repetition_penalty, np.finfo(np.float32).tiny))
        with np.errstate(over="ignore"):
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = np.bincount(generated, minlength=len(logits))
        logits -= (sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)).astype(np.float32)
    np.clip(logits, -_LOGIT_MAX, _LOGIT_MAX, out=logits)  # the shares of a draw are relative to the highest
    if len(ids) < sampling.min_tokens:
        logits[list(eos)] = -np.inf
    return logits


def draw(logits: NDArray[np.float32], sampling: Sampling, index: int) -> int:
    """The id that a room generates at `index`: the first highest logit at temperature 0, else a draw by (seed, index in
    the request). It is from the tokens that min_p, then top_k, then top_p leave. Of equally likely tokens the lower id
    comes first."""
    highest = float(logits.max())
    if sampling.temperature == 0.0 or not isfinite(highest):  # of NaN and infinities there are no shares
        return int(logits.argmax())
    shares = np.exp((logits.astype(np.float64) - highest) / sampling.temperature)
    if sampling.min_p:
        shares[shares < sampling.min_p] = 0.0  # the likeliest has 1
    most = min(sampling.top_k or len(shares), len(shares))
    first = most if sampling.top_k else min(most, SORTED_MAX)
    for count in (first, most):
        order = _likeliest(shares, count)
        running: NDArray[np.float64] = np.cumsum(shares[order])
        total = float(running[-1] if count == most else shares.sum())
        # The nucleus is the fewest tokens that reach top_p; the most likely token is always in it.
        edge = np.count_nonzero(running < sampling.top_p * total)
        if edge == len(order) and sampling.top_p < 1.0:
            continue  # the nucleus is longer
        mass = total if edge == len(order) else running[edge]
        chosen = np.count_nonzero(running[: edge + 1] <= _uniform(sampling.seed, sampling.generated + index) * mass)
        if chosen <= edge and chosen < len(order):
            return int(order[chosen])
        if count == most:
            break
    return int(order[min(edge, len(order) - 1)])


def logprobs_of(logits: NDArray[np.float32], chosen: int, top: int) -> Logprobs:
    """The logprob of `chosen` and of the `top` likeliest ids, of the logits as the model gave them. At least
    LOGPROB_MIN, also of ids that the model excludes and of what is not a number."""
    wide = np.nan_to_num(logits.astype(np.float64), nan=-np.inf, posinf=_LOGIT_MAX, neginf=-np.inf)
    highest = max(float(wide.max()), -_LOGIT_MAX)
    total = highest + float(np.log(max(np.exp(wide - highest).sum(), 1.0)))

    def logprob(token_id: int) -> float:
        return max(LOGPROB_MIN, min(0.0, float(wide[token_id]) - total))  # rounding may not lift it above 0

    likeliest = [(int(token_id), logprob(int(token_id))) for token_id in _likeliest(wide, top)] if top else []
    return Logprobs(logprob(chosen), tuple(likeliest))


def chain(before: bytes, logits: NDArray[np.float32]) -> bytes:
    """The logits' digest after one more token. Prefill begins with b""; decode continues."""
    return blake2b(before + logits.tobytes(), digest_size=DIGEST_BYTES).digest()


def tokens_digest(ids: list[int]) -> bytes:
    """The digest of generated ids, as little-endian u32."""
    return blake2b(np.array(ids, dtype="<u4").tobytes(), digest_size=DIGEST_BYTES).digest()


def _likeliest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The ids of the `count` highest values, highest first, then by id."""
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    least = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= least)
    return candidates[np.argsort(-values[candidates], kind="stable")[:count]]


def _uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 bits, from a hash of seed and index."""
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
