"""One full example of each message as the array that it is on the wire, and variants that show its extremes."""

from __future__ import annotations

from typing import Any

_SESSION, _ROOM = 0x1122334455667788, 0x8877665544332211
_LED = [["prefill-0", "tcp://10.0.0.7:9310"], ["prefill-1", "tcp://10.0.0.7:9312"]]
_PLACE = "3f1c6d1e-8f0b-4d0e-9c53-0d4f5f1f9a77 net:[4026531840] mnt:[4026531841] 1000"
_PREFILL = [
    "prefill-0", "prefill", 0xFFEEDDCCBBAA9988, [1, 2, 0, 1, 0, 1], "demo-mla", bytes(range(32)), 256, 4 << 20,
    [["latent", 0, 2, 0, 1, 1, 2]], _LED, ["shm", "mooncake"], _PLACE, 131072,
    [["block_size", "16"], ["kv_dtype", "bfloat16"]],
]  # fmt: skip
_DECODE = [
    "decode-0", "decode", 0x0123456789ABCDEF, [0, 1, 0, 1, 0, 1], "demo-mla", bytes(range(32)), 256, 4 << 20,
    [["latent", 0, 2, 0, 1, 0, 1]], [["decode-0", ""], ["decode-1", ""]],
    ["mooncake"], _PLACE, 131072, [["block_size", "32"]],
]  # fmt: skip
_KEY = "bB<^>b]T&ncT)k#p?RRdw@gKR9<g&@=K7ynK0gc5"  # a Z85 key may hold an @ itself: it ends by length
_TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
_DIGEST = bytes(range(64, 96))
_SAMPLING = [
    128, 0.7, 0.95, 42, True, 40, 0.05, 1.0, -0.5, 1.25, 4, bytes.fromhex("410000000000c8c2"), True, 1, 1,
]  # fmt: skip
# Two tokens, with one alternative each: -0.5 and id 65 with -0.5, -2.0 and id 67 with -0.25.
_LOGPROBS = bytes.fromhex("000000bf 41000000 000000bf 000000c0 43000000 000080be")

# layer, kind, dtype, head_start, head_count, base, page_stride, row_stride, row_bytes
_LATENT = [0, "latent", "bfloat16", 0, 1, 0, 2304, 1152, 1152]
_NEXT_LATENT = [1, "latent", "bfloat16", 0, 1, 1152, 2304, 1152, 1152]
_LAYOUT = [[_LATENT, _NEXT_LATENT], 1, 4096]
_COMPONENT = ["latent", "dram", 1, ["all", 0], _LAYOUT]
_REACH = ["shm", "3f1c6d1e-8f0b-4d0e-9c53-0d4f5f1f9a77", "@pdtransfer-decode-0", bytes(range(16)), 0, 9437184]
_HBM = [*_REACH, bytes(range(128, 192)), 9437184 - (1 << 20), 1 << 20]
_PART = [0, 0, 1000, bytes.fromhex("00000000e8030000")]

SPECIMENS: dict[str, list[Any]] = {
    "Hello": [1, 1, 1, 1, _DECODE, [[_ROOM, "refused: block_size: prefill-0 has '16', decode-0 '32'"]]],
    "Welcome": [1, 2, 1, _PREFILL],
    "Reject": [1, 3, _SESSION, "refused", ["model: demo-gqa, this side has demo-mla"]],
    "Register": [1, 4, _SESSION, [_COMPONENT], _HBM, True, [[512, (65536).to_bytes(8, "little")]]],
    "Registered": [1, 5, _SESSION, 9437184, True],
    "Grant": [1, 6, _SESSION, 1, _ROOM, 1000, 0, [_PART], True, 60000, True, True, 1000],
    "Granted": [1, 7, _SESSION, 1],
    "Landed": [1, 8, _SESSION, 1, 2304000, b"first token and the like", bytes(range(8))],
    "Released": [1, 9, _SESSION, 1],
    "Failed": [1, 10, _SESSION, 1, "engine", "the model ran out of pages", True],
    "Abort": [1, 11, _SESSION, 1, _ROOM, "deadline: not ready in time"],
    "Drained": [1, 12, _SESSION, 1],
    "Begin": [
        1, 13, _ROOM, bytes.fromhex("680000006900000021000000"), _SAMPLING,
        [f"{_KEY}@tcp://10.0.0.7:9310"], 60000, True, b"tenant-7", "req-42", _TRACE, True, 1024,
    ],
    "Begun": [1, 14, _ROOM],
    "Tokens": [1, 15, _ROOM, 3, bytes.fromhex("4100000042000000"), _LOGPROBS],
    "TokensAcked": [1, 16, _ROOM, 5],
    "End": [
        1, 17, _ROOM, "stop", "", 5, 1000, 2304000, 412, 81234567890, _DIGEST, _DIGEST[::-1], _DIGEST[:16], 3,
        1500, 48000, 900, 2100, _DIGEST[8:24],
    ],
    "Ended": [1, 18, _ROOM],
    "Cancel": [1, 19, _ROOM, "aborted"],
    "Load": [
        1, 20, True, False, 12, 3, 60000, 65536, 128, True, 130000, 131072,
        [["tcp://prefill-3:7101", "transport: p3 takes mooncake, this node shm"]], 1024,
    ],
    "Ping": [1, 21, 0x0123456789ABCDEF, [f"{_KEY}@tcp://10.0.0.7:9310"]],
    "Pong": [1, 22, 0xFFEEDDCCBBAA9988, [[
        81_234_567, [["queued", 2], ["ready", 12]], [["shm", 3], ["mooncake", 1]],
        98_765, 43, 12_345_678, 234_567_890_123, 56_789_012, 4_194_304, 7_654_321, 5_432_109,
        88_776_655, 4_433_221, 9_876_543_210, 12, 3, 321,
    ]]],
    "Goodbye": [1, 23, 0xFFEEDDCCBBAA9988, "shutdown"],
    "RankJoin": [1, 32, [1, 2, 0, 1, 0, 1], "prefill-0-tp1", [["page_size", "64"]], "tcp://10.0.0.7:31008"],
    "RankMeet": [1, 33, 31007, ["tcp://10.0.0.7:31008"], bytes(range(32))],
    "RankBound": [1, 34, f"{_KEY}@tcp://10.0.0.7:9312", "10.0.0.7:7104"],
    "RankRoom": [1, 35, 1, 7, [
        _ROOM, bytes.fromhex("680000006900000021000000"), _SAMPLING,
        [f"{_KEY}@tcp://10.0.0.7:9310"], 60000, True, b"tenant-7", "req-42", _TRACE, True, 1024,
    ]],
    "StepOrders": [1, 36, 2, [["generate", 7, b"first token and the like"]]],
    "RankFailed": [1, 37, 3, 7, "engine", "the model ran out of pages", 1000],
    "RankReload": [1, 38, 4],
    "RankReady": [1, 39, 1, 7, 2304000, 3],
    "RankLanded": [1, 40, 1, 7, 2304000, 412, 81234567890, _DIGEST[8:24]],
    "RankDrained": [1, 41, 2, 7],
    "RankPicked": [1, 42, 3, 7, b"first token and the like"],
}  # fmt: skip


def register(*components: list[Any], reach: list[Any] = _REACH) -> list[Any]:
    """A Register of these components."""
    return [1, 4, _SESSION, list(components), reach, False]


def component(planes: list[list[Any]], page_size: int, slots: int) -> list[Any]:
    """A component with this layout."""
    return ["latent", "dram", 1, ["all", 0], [planes, page_size, slots]]


def plane(**changes: Any) -> list[Any]:
    """The first plane of the specimen, with other values."""
    names = "layer", "kind", "dtype", "head_start", "head_count", "base", "page_stride", "row_stride", "row_bytes"
    assert changes.keys() <= set(names), changes
    return [changes.get(name, value) for name, value in zip(names, _LATENT, strict=True)]


def _index_page(layer: int) -> list[list[Any]]:
    """A DSA indexer page of 64 slots: 64 x 128 B of fp8, then 64 x 4 B of scales."""
    base = layer * 8448
    return [
        [layer, "index", "float8_e4m3", 0, 1, base, 2 * 8448, 128, 128],
        [layer, "scale", "float32", 0, 1, base + 8192, 2 * 8448, 4, 4],
    ]


_HEADS = [[layer, kind, "float16", head, 1, ((layer * 2 + index) * 4 + head) * 4096, 65536, 256, 256]
          for layer in range(2) for index, kind in enumerate("kv") for head in range(4)]  # fmt: skip

_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2", "uint8", "int8", "int32", "int64",
)  # fmt: skip

# What one changed value cannot show: layouts, whose bounds depend on one another, and other ways to fill a message.
VARIANTS: dict[str, list[Any]] = {
    "Register of no component": register(),
    "Register of a page_head layout, one plane a head": register(component(_HEADS, 16, 1024)),
    "Register of an indexer page, values and scales, in hbm": register(
        ["index", "hbm", 1, ["all", 0], [[*_index_page(0), *_index_page(1)], 64, 4096]]
    ),
    "Register of a component in hbm, and of its staging buffer": [
        *register(["latent", "hbm", 1, ["all", 0], [[[*_LATENT[:5], 9437184, *_LATENT[6:]]], 1, 4096]]),
        [[512, (65536).to_bytes(8, "little")]],
    ],
    "Register of a sliding window": register(["window", "dram", 1, ["last", 4096], _LAYOUT]),
    "Register of a sliding window, one token": register(["window", "dram", 1, ["last", 1], _LAYOUT]),
    "Register of a sliding window, the longest": register(["window", "dram", 1, ["last", 2**32 - 1], _LAYOUT]),
    "Register of a state": register(["state", "dram", 1, ["once", 0], _LAYOUT]),
    "Register of one name in both memories": register(
        _COMPONENT, ["latent", "hbm", 1, ["all", 0], [[[*_LATENT[:5], 9437184, *_LATENT[6:]]], 1, 4096]],
        reach=[*_REACH[:5], 18874368],
    ),
    "Register of rows of 128 tokens": register(["c128", "dram", 128, ["all", 0], _LAYOUT]),
    "Register over mooncake": register(
        _COMPONENT, reach=["mooncake", "10.0.0.9:15201", "", b"", 0x7F0000000000, 9437184]
    ),
    "Register over mooncake, by several engines": register(
        _COMPONENT, reach=["mooncake", "10.0.0.9:15201", "15203,15210,15207", b"", 0x7F0000000000, 9437184]
    ),
    "Plane.layer most": register(component([plane(layer=0xFFFF)], 1, 4096)),
    "Plane.kind shortest": register(component([plane(kind="k")], 1, 4096)),
    "Plane.kind longest": register(component([plane(kind="k" * 16)], 1, 4096)),
    "Plane.head_start most": register(component([plane(head_start=0xFFFF)], 1, 4096)),
    "Plane.head_count most": register(
        component([plane(head_count=0xFFFF, row_bytes=0xFFFF * 2, page_stride=0xFFFF * 2)], 1, 4096)
    ),
    "Plane.base most": register(component([plane(base=2**62 - 1152)], 1, 1)),
    "Plane.page_stride most": register(component([plane(page_stride=2**62 - 1152)], 1, 2)),
    "Plane.row_bytes least": register(component([plane(dtype="uint8", row_bytes=1, page_stride=1)], 1, 4096)),
    "Plane.row_bytes most": register(component([plane(row_bytes=1 << 30, page_stride=1 << 30)], 1, 4096)),
    "Layout.page_size most": register(component([plane(page_stride=1152 << 20)], 1 << 20, 1 << 20)),
    "Layout.slots least": register(component([plane()], 1, 1)),
    "Layout.slots most": register(component([plane()], 1, 1 << 40)),
    **{f'Plane.dtype "{dtype}"': register(component([plane(dtype=dtype)], 1, 4096)) for dtype in _DTYPES},
    "Grant to a rank that sends no rows": [1, 6, _SESSION, 2, _ROOM, 1000, 0, [], False, 60000, False],
    "Grant of a piece that has no rows": [1, 6, _SESSION, 2, _ROOM, 1000, 488, [], False, 60000, False, False, 488],
    "Grant of a piece": [
        1, 6, _SESSION, 3, _ROOM, 1000, 488, [[0, 488, 256, bytes.fromhex("0010000000010000")]], False, 60000, False,
        False, 744,
    ],
    "Grant after a prefix, in two extents": [
        1, 6, _SESSION, 3, _ROOM, 1000, 488,
        [[0, 488, 512, bytes.fromhex("0010000000010000ffff00ff00010000")]], True, 1, False,
    ],
    "Begin of a room without prefill": [
        1, 13, _ROOM, bytes.fromhex("680000006900000021000000"), [1], ["tcp://10.0.0.8:9320"], 1000, False, b"", "", "",
        False, 256,
    ],
    "Begin to prefill, peers by name": [1, 13, _ROOM, b"", [1], ["decode-0", "decode-1"], 1000],
    "Welcome of a rank that is alone and holds all": [1, 2, 1, _PREFILL[:8]],
    "Failed and not quiescent": [1, 10, _SESSION, 1, "transfer", "a write has timed out", False],
    "Pong of a peer that reports no figures": [1, 22, 0xFFEEDDCCBBAA9988],
    "Reject of a Hello": [1, 3, 0, "version", ["version: the peer speaks 2 to 3, this side 1 to 1"]],
    "Reject of an unknown session": [1, 3, _SESSION, "unknown_session", []],
}  # fmt: skip
