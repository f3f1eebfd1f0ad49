/* Assigns a row of the hot pool's tables to a request, or frees it. Slots are read from the host's pinned memory. */
#ifndef PDTRANSFER_HOT_ROW_H
#define PDTRANSFER_HOT_ROW_H

#include "device.h"

struct HotRow {
    const int32_t *sent;                         /* arena slots, then the places' device slots */
    int32_t *host_slots, *hot_slots, *own_slots; /* (rows, host_stride), (rows, hot), (rows) */
    int32_t *held, *order;                       /* (groups, rows, hot) */
    uint32_t *refused;                           /* (rows) */
    int64_t host_stride;
    int32_t groups, rows, hot, row;
    int32_t host_count, places; /* in `sent`; 0 frees the row and keeps `held` and `refused` */
    int32_t own, direct;        /* direct: position p is in place p; otherwise the buffer is empty */
};

CODE void set_row(const HotRow &set, int64_t thread, int64_t threads) {
    for (int64_t at = thread; at < set.host_stride; at += threads)
        set.host_slots[set.row * set.host_stride + at] = at < set.host_count ? set.sent[at] : -1;
    for (int64_t at = thread; at < set.hot; at += threads)
        set.hot_slots[(int64_t)set.row * set.hot + at] = at < set.places ? set.sent[set.host_count + at] : -1;
    if (thread == 0) set.own_slots[set.row] = set.own;
    if (!set.host_count) return;
    if (thread == 0) set.refused[set.row] = 0;
    for (int64_t at = thread; at < (int64_t)set.groups * set.hot; at += threads) {
        int64_t group = at / set.hot, place = at % set.hot, to = (group * set.rows + set.row) * set.hot + place;
        set.held[to] = set.direct && place < set.places ? (int32_t)place : -1;
        set.order[to] = (int32_t)place;
    }
}

#endif
