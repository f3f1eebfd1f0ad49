"""The checksum of a grant (section 5, Checksums): XXH64 of every head of every row, by its published specification."""

MASK = 2**64 - 1
P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def head_hash(component: str, kind: str, layer: int, head: int, row: int, text: bytes) -> int:
    """Of one head in one row; a checksum is the sum of these mod 2^64."""
    seed = xxh64(kind.encode(), xxh64(component.encode(), 0))
    seed = xxh64(layer.to_bytes(4, "little") + head.to_bytes(4, "little"), seed)
    return xxh64(text, xxh64(row.to_bytes(8, "little"), seed))


def xxh64(text: bytes, seed: int) -> int:
    """In whole numbers: a peer in earnest takes a library."""
    words = [int.from_bytes(text[offset : offset + 8], "little") for offset in range(0, len(text) - 7, 8)]
    whole = len(text) // 32 * 4
    found = seed + P5
    if whole:
        lanes = [seed + P1 + P2, seed + P2, seed, seed - P1]
        for index in range(whole):
            lanes[index % 4] = _step(lanes[index % 4], words[index])
        found = sum(_rotl(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            found = (found ^ _step(0, lane)) * P1 + P4 & MASK
    found = found + len(text) & MASK
    for word in words[whole:]:
        found = _rotl(found ^ _step(0, word), 27) * P1 + P4 & MASK
    index = 8 * len(words)
    if len(text) - index >= 4:
        found = _rotl(found ^ int.from_bytes(text[index : index + 4], "little") * P1 & MASK, 23) * P2 + P3 & MASK
        index += 4
    for byte in text[index:]:
        found = _rotl(found ^ byte * P5 & MASK, 11) * P1 & MASK
    for by, prime in ((33, P2), (29, P3)):
        found = (found ^ found >> by) * prime & MASK
    return found ^ found >> 32


def _rotl(value: int, by: int) -> int:
    value &= MASK
    return (value << by | value >> 64 - by) & MASK


def _step(lane: int, word: int) -> int:
    return _rotl(lane + word * P2, 31) * P1 & MASK
