/* Copies one row with the lanes of a group: any size, any alignment, and no other byte. */
#ifndef PDTRANSFER_ROWS_H
#define PDTRANSFER_ROWS_H

#include "device.h"

enum { LINE_BYTES = 128 }; /* one transaction of the bus */

/* Copies a row in units, aligned on both sides. Lane 0 starts `phase` units before the row, at the start of a line, so
 * that each line is written in one access. Each lane loads up to HELD units before its first store. */
template <class Unit, int32_t HELD>
CODE void copy_units(char *target, const char *source, int32_t units, int32_t phase, int32_t lane, int32_t lanes) {
    for (int32_t first = lane - phase; first < units; first += HELD * lanes) {
        Unit held[HELD];
        UNROLLED for (int32_t at = 0; at < HELD; at++) {
            int32_t unit = first + at * lanes;
            if (unit >= 0 && unit < units) held[at] = load<Unit>(source + (int64_t)unit * (int64_t)sizeof(Unit));
        }
        UNROLLED for (int32_t at = 0; at < HELD; at++) {
            int32_t unit = first + at * lanes;
            if (unit >= 0 && unit < units) store<Unit>(target + (int64_t)unit * (int64_t)sizeof(Unit), held[at]);
        }
    }
}

/* Copies head and tail by bytes, the body by units. Target and source differ by a multiple of the unit. */
template <class Unit, int32_t HELD>
CODE void copy_aligned(char *target, const char *source, int32_t bytes, bool by_source, int32_t lane, int32_t lanes) {
    const int32_t size = (int32_t)sizeof(Unit);
    int32_t head = (int32_t)(-(uintptr_t)target & (uintptr_t)(size - 1));
    if (head > bytes) head = bytes;
    for (int32_t at = lane; at < head; at += lanes) target[at] = source[at];
    target += head, source += head, bytes -= head;
    int32_t units = bytes / size;
    uintptr_t lined = by_source ? (uintptr_t)source : (uintptr_t)target;
    int32_t phase = lanes * size < LINE_BYTES ? 0 : (int32_t)(lined & (LINE_BYTES - 1)) / size;
    copy_units<Unit, HELD>(target, source, units, phase, lane, lanes);
    for (int32_t at = units * size + lane; at < bytes; at += lanes) target[at] = source[at];
}

/* Copies `lines` lines with eight lanes, each of which loads its part of all of them before its first store. */
template <int32_t LINES> CODE void copy_lines(char *target, const char *source, int32_t lines) {
    if constexpr (LINES == 0) return;
    else if (lines < LINES) return copy_lines<LINES - 1>(target, source, lines);
    else {
        Bytes16 held[LINES];
        UNROLLED for (int32_t at = 0; at < LINES; at++) held[at] = load<Bytes16>(source + at * LINE_BYTES);
        UNROLLED for (int32_t at = 0; at < LINES; at++) store<Bytes16>(target + at * LINE_BYTES, held[at]);
    }
}

/* Copies `bytes` with `lanes` lanes, a power of two. Accesses are aligned to lines of the target or, with `by_source`,
 * of the source: the side across the bus. */
template <int32_t HELD>
CODE void copy_row(char *target, const char *source, int32_t bytes, bool by_source, int32_t lane, int32_t lanes) {
    uintptr_t differ = (uintptr_t)target ^ (uintptr_t)source, lined = by_source ? (uintptr_t)source : (uintptr_t)target;
    if ((differ & 15) == 0 && ((lined | (uintptr_t)bytes) & (LINE_BYTES - 1)) == 0 && lanes == LINE_BYTES / 16) {
        target += lane * 16, source += lane * 16;
        for (; bytes > HELD * LINE_BYTES; bytes -= 8 * LINE_BYTES, target += 8 * LINE_BYTES, source += 8 * LINE_BYTES)
            copy_lines<8>(target, source, 8);
        return copy_lines<HELD>(target, source, bytes / LINE_BYTES);
    }
    if ((differ & 15) == 0) return copy_aligned<Bytes16, HELD>(target, source, bytes, by_source, lane, lanes);
    if ((differ & 7) == 0) return copy_aligned<uint64_t, HELD>(target, source, bytes, by_source, lane, lanes);
    if ((differ & 3) == 0) return copy_aligned<uint32_t, HELD>(target, source, bytes, by_source, lane, lanes);
    for (int32_t at = lane; at < bytes; at += lanes) target[at] = source[at];
}

#endif
