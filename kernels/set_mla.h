/* Scatters a step's new MLA rows into their pages: row i of nope, followed by row i of rope, to slot loc[i]. */
#ifndef PDTRANSFER_SET_MLA_H
#define PDTRANSFER_SET_MLA_H

#include "device.h"

struct SetMla {
    char *buffer;
    const char *nope, *rope;
    const void *loc; /* int32, or int64 if `wide` */
    int64_t buffer_stride, nope_stride, rope_stride; /* bytes between rows */
    int64_t slots;                                   /* rows with loc outside [0, slots) are skipped */
    int64_t skip;                                    /* a loc that is skipped; -1: none */
    int32_t rows, nope_units, units, wide;           /* of one row: units of nope, units of both parts */
};

CODE int64_t slot_of(const SetMla &set, int32_t row) {
    return set.wide ? ((const int64_t *)set.loc)[row] : (int64_t)((const int32_t *)set.loc)[row];
}

/* Thread `column` of a row's threads copies one unit of row block * together + down. All that the argument says is
 * settled before the previous launch ends, and the next one may start when this one's loads have ended. */
template <class Unit> CODE void set_row(const SetMla &set, uint32_t block, uint32_t column, uint32_t down, uint32_t together) {
    int32_t row = (int32_t)(block * together + down);
    int64_t unit = (int32_t)column, size = (int64_t)sizeof(Unit);
    const char *source = unit < set.nope_units ? set.nope + row * set.nope_stride + unit * size
                                               : set.rope + row * set.rope_stride + (unit - set.nope_units) * size;
    const char *slot_from = (const char *)set.loc + (int64_t)row * (set.wide ? 8 : 4);
    char *target = set.buffer + unit * size;
    int64_t stride = set.buffer_stride, slots = set.slots, skip = set.skip;
    bool wide = set.wide;
    settle(source), settle(slot_from), settle(target), settle(stride), settle(slots), settle(skip);
    if (row >= set.rows) return;
    follow();
    int64_t slot = wide ? *(const int64_t *)slot_from : (int64_t) * (const int32_t *)slot_from;
    Unit held = load<Unit>(source);
    lead();
    if (slot >= 0 && slot < slots && slot != skip) store<Unit>(target + slot * stride, held);
}

/* Thread (across, down) of a block of (columns, together) copies ROWS_HELD rows. A row's slot is loaded while the row
 * itself is loaded. */
template <class Unit, int32_t ROWS_HELD>
CODE void set_rows(const SetMla &set, uint32_t block, uint32_t across, uint32_t down, uint32_t columns, uint32_t together_) {
    int32_t size = (int32_t)sizeof(Unit), together = (int32_t)together_;
    int32_t first = (int32_t)block * together * ROWS_HELD + (int32_t)down;
    for (int32_t column = (int32_t)across; column < set.units; column += (int32_t)columns) {
        bool is_nope = column < set.nope_units;
        const char *source = is_nope ? set.nope + (int64_t)column * size : set.rope + (int64_t)(column - set.nope_units) * size;
        int64_t stride = is_nope ? set.nope_stride : set.rope_stride;
        Unit held[ROWS_HELD];
        int64_t slots[ROWS_HELD];
        UNROLLED for (int32_t at = 0; at < ROWS_HELD; at++) {
            int32_t row = first + at * together;
            slots[at] = -1;
            if (row < set.rows) {
                held[at] = load<Unit>(source + row * stride);
                slots[at] = slot_of(set, row);
            }
        }
        UNROLLED for (int32_t at = 0; at < ROWS_HELD; at++)
            if (slots[at] >= 0 && slots[at] < set.slots && slots[at] != set.skip)
                store<Unit>(set.buffer + slots[at] * set.buffer_stride + (int64_t)column * size, held[at]);
    }
}

#endif
