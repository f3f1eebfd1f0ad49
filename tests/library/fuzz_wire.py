"""A fuzzer with one invariant: any bytes give a message or a RemoteProtocolError, never anything else.

python -m tests.library.fuzz_wire --count 1000000            # any number by hand
python -m tests.library.fuzz_wire --seed 7 --case 1234       # one case again: what a failure prints
"""

import argparse
import copy
import random
import struct
import sys
import time
from collections import Counter

import msgpack

from pdtransfer import limits
from pdtransfer.errors import RemoteProtocolError
from pdtransfer.wire import MESSAGES, decode, encode
from tests.serve.stranger.messages import unhex, vectors

_LENGTH_MAX = 4096  # longer vectors are cases of their own
_HEADS = [
    (b"\xdd", ">I"), (b"\xdc", ">H"), (b"\xc6", ">I"), (b"\xc5", ">H"), (b"\xc4", ">B"), (b"\xdb", ">I"),
    (b"\xda", ">H"), (b"\xd9", ">B"), (b"\xdf", ">I"), (b"\xde", ">H"), (b"\xc9", ">I"), (b"\xc7", ">B"),
]  # fmt: skip
_ODD = [
    None, True, False, -1, 0, 1, 2, 15, 16, 17, 255, 256, 257, 2**16 - 1, 2**16, 2**24, 2**24 + 1, 2**31, 2**32 - 1,
    2**32, 2**40, 2**53, 2**53 + 1, 2**62, 2**62 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63),
    0.0, -0.0, 0.5, 1.0, 100.0, 5e-324, 1e308, float("inf"), float("-inf"), float("nan"),
    "", "x", "AAAA", "all", "last", "once", "dram", "hbm", "shm", "prefill", "x" * 33, "x" * 129, "x" * 513, "\0",
    "\n - at `$[0]`", "` - at `$[9][9]`", "\u2028", "\U0001f600" * 16, "\U000e0001" * 200, "{}", "%s",
    b"", b"\0", b"x" * 7, b"x" * 8, b"x" * 65,
    [], [[]], [[[]]], [None] * 17, [[]] * 65, [0] * 257, [b""] * 3, ["all", 0], [0, 0, 0, b""],
    {}, {1: 1}, {"a": []}, msgpack.ExtType(1, b""), msgpack.ExtType(5, b"abcd"), msgpack.Timestamp(1, 1),
]  # fmt: skip


def corpus():
    """Valid frames to start from, short ones."""
    frames = [unhex(vector["frame"]) for vector in vectors("valid")]
    return sorted({frame for frame in frames if len(frame) <= _LENGTH_MAX})


def _odd_value(random_):
    return copy.deepcopy(random_.choice(_ODD))


def _noise(random_, frames):
    return random_.randbytes(random_.choice((0, 1, 2, 5, 20, 200, 2000)))


def _noise_in_a_message(random_, frames):
    kind = random_.choice(list(MESSAGES))
    return bytes([0x90 + random_.randrange(16), 1, kind]) + random_.randbytes(random_.randrange(60))


def _flips(random_, frames):
    frame = bytearray(random_.choice(frames))
    for _ in range(random_.choice((1, 1, 2, 8))):
        frame[random_.randrange(len(frame))] ^= 1 << random_.randrange(8)
    return bytes(frame)


def _cut(random_, frames):
    frame = random_.choice(frames)
    return frame[: random_.randrange(len(frame))]


def _splice(random_, frames):
    choice, other = random_.choice(frames), random_.choice(frames)
    return choice[: random_.randrange(len(choice) + 1)] + other[random_.randrange(len(other)) :]


def _edit(random_, frames):
    """A slice gone, doubled, or replaced by noise."""
    frame = random_.choice(frames)
    start = random_.randrange(len(frame))
    stop = min(len(frame), start + random_.choice((1, 2, 3, 8, 40)))
    middle = random_.choice((b"", frame[start:stop] * 2, random_.randbytes(stop - start)))
    return frame[:start] + middle + frame[stop:]


def _promise(random_, frames):
    """A head that promises more than there is, somewhere."""
    frame = random_.choice(frames)
    start = random_.randrange(len(frame) + 1)
    head, form = random_.choice(_HEADS)
    most = 256 ** struct.calcsize(form) - 1
    length = random_.choice((0, 1, len(frame), most // 2, most // 2 + 1, most - 1, most))
    times = random_.choice((1, 1, 1, 40, 600, 1100))
    return frame[:start] + (head + struct.pack(form, min(length, most))) * times + frame[start:]


def _odd(random_, frames):
    """Any values of the tree replaced by others, whatever their type."""
    array = msgpack.unpackb(random_.choice(frames))
    for _ in range(random_.choice((1, 1, 1, 2, 5))):
        spot = array
        while True:
            if not spot:
                break
            index = random_.randrange(len(spot))
            if isinstance(spot[index], list) and random_.random() < 0.8:
                spot = spot[index]
                continue
            spot[index] = _odd_value(random_)
            break
    return msgpack.packb(array, use_bin_type=True)


def _lengths(random_, frames):
    """Arrays of the tree with elements more, fewer, doubled or exchanged."""
    array = msgpack.unpackb(random_.choice(frames))
    arrays, left = [], [array]
    while left:
        spot = left.pop()
        arrays.append(spot)
        left += [value for value in spot if isinstance(value, list)]
    spot = random_.choice(arrays)
    match random_.randrange(5):
        case 0:
            del spot[random_.randrange(len(spot) + 1) :]
        case 1:
            spot += [_odd_value(random_) for _ in range(random_.choice((1, 2, 300)))]
        case 2:
            spot *= random_.choice((2, 17, 100))
        case 3:
            random_.shuffle(spot)
        case _:
            spot.insert(random_.randrange(len(spot) + 1), _odd_value(random_))
    return msgpack.packb(array, use_bin_type=True)


def _nest(random_, frames):
    """Deep arrays in any place, some of them closed."""
    depth = random_.choice((1, 2, 16, 200, 400, 900, 1020, 1024, 1025, 5000))
    deep = b"\x91" * depth + random_.choice((b"\x90", b"\xc0", b""))
    frame = random_.choice(frames)
    start = random_.randrange(len(frame) + 1)
    return frame[:start] + deep + frame[start + random_.choice((0, 1)) :]


def _numbers(random_, frames):
    """A Register with the numbers of its layout at and about their edges: the rules of layouts, not of fields."""
    planes = []
    for _ in range(random_.choice((1, 1, 2, 3))):
        edge = (0, 1, 2, 3, 64, 1152, 65535, 2**30, 2**31, 2**32, 2**53, 2**61, 2**62 - 1152, 2**62 - 1, 2**62)
        row_bytes = random_.choice((1, 2, 4, 1152, 65535, 2**30))
        names = random_.choice(("k", "v", "latent")), random_.choice(("uint8", "bfloat16", "int64"))
        heads = random_.choice((0, 1, 65535)), random_.choice((0, 1, 2, 65535))
        planes.append([random_.choice((0, 1, 65535)), *names, *heads, *random_.choices(edge, k=3), row_bytes])
    sizes = random_.choice((1, 2, 3, 64, 2**20)), random_.choice((1, 2, 64, 4096, 2**20, 2**32, 2**40))
    span = [random_.choice(("all", "last", "once")), random_.choice((0, 1, 2**32 - 1))]
    component = ["latent", "dram", random_.choice((1, 4, 65535)), span, [planes, *sizes]]
    reach = ["shm", "host", "@socket", b"", 0, 2**62]
    return msgpack.packb([1, 4, 1, [component] * random_.choice((1, 2, 16)), reach], use_bin_type=True)


MUTATORS = [
    _noise, _noise_in_a_message, _flips, _flips, _cut, _splice, _edit, _promise, _odd, _odd, _lengths, _nest, _numbers,
]  # fmt: skip


def case(seed, number, frames):
    """(mutator's name, frame): the same for the same seed, number and corpus, whatever ran before."""
    random_ = random.Random(f"{seed}:{number}")
    mutate = random_.choice(MUTATORS)
    return mutate.__name__.strip("_"), mutate(random_, frames)


def check(frame):
    """The message's name or "refused"; raises AssertionError for whatever else comes of the frame."""
    try:
        message = decode(frame)
    except RemoteProtocolError as refusal:
        return _check_refusal(refusal)
    except BaseException as error:
        raise AssertionError(f"neither a message nor a RemoteProtocolError: {error!r}") from error
    assert type(message) in MESSAGES.values(), message
    again = encode(message)
    assert decode(again) == message, "encoded again it is another message"
    return type(message).__name__


def _check_refusal(refusal):
    assert refusal.field, "an error that names no field"
    assert len(str(refusal)) <= limits.TEXT_LENGTH_MAX, "an error that no Reject can carry"
    assert str(refusal).isprintable(), "an error that a peer can write control characters with"
    return "refused"


def run(seed, count, *, first=0):
    """How often each mutator's frames were which message; the first failure raises, with how to replay it."""
    frames = corpus()
    seen = Counter()
    for number in range(first, first + count):
        name, frame = case(seed, number, frames)
        try:
            seen[name, check(frame)] += 1
        except AssertionError as error:
            replay = f"python -m tests.library.fuzz_wire --seed {seed} --case {number}"
            raise AssertionError(f"{error}\n{replay}\n{name}, {len(frame)} bytes: {frame[:256].hex()}") from error
    return seen


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--case", type=int, help="only this one")
    options = parser.parse_args(argv)
    if options.case is not None:
        name, frame = case(options.seed, options.case, corpus())
        print(f"{name}: {frame.hex()}")
        print(check(frame))
        return 0
    started, slowest, seen = time.monotonic(), (0.0, -1), Counter()
    step = 1000
    for first in range(0, options.count, step):
        before = time.monotonic()
        seen += run(options.seed, min(step, options.count - first), first=first)
        slowest = max(slowest, (time.monotonic() - before, first))
    accepted = sum(times for (_, outcome), times in seen.items() if outcome != "refused")
    print(f"{options.count} frames, {accepted} accepted, {time.monotonic() - started:.1f} s; slowest {step}: {slowest}")
    for name in sorted({name for name, _ in seen}):
        print(f"  {name}: {sum(v for (n, o), v in seen.items() if n == name and o != 'refused')} of "
              f"{sum(v for (n, _), v in seen.items() if n == name)} accepted")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
