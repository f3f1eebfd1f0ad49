"""The message structs of protocol v1, their msgpack encoding, and version negotiation."""

from __future__ import annotations

from .codec import KEY_LENGTH as KEY_LENGTH
from .codec import decode as decode
from .codec import encode as encode
from .codec import negotiate as negotiate
from .codec import pack_extents as pack_extents
from .codec import pack_ids as pack_ids
from .codec import split_key as split_key
from .codec import unpack_extents as unpack_extents
from .codec import unpack_ids as unpack_ids
from .logprobs import Logprobs as Logprobs
from .logprobs import logprob_bytes as logprob_bytes
from .logprobs import pack_biases as pack_biases
from .logprobs import unpack_biases as unpack_biases
from .logprobs import unpack_logprobs as unpack_logprobs
from .messages import *
