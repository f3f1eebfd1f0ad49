/* Finds the slots of each request's new token: its place in the hot buffer while the request fits, else the request's
 * own slot; and its slot in the arena, for the backup. One thread for each request. */
#ifndef PDTRANSFER_NEWEST_H
#define PDTRANSFER_NEWEST_H

#include "device.h"

struct Newest {
    const int32_t *positions;  /* (requests): the new token's position */
    const int32_t *rows;       /* (requests): each request's row of the tables below */
    const int32_t *real;       /* the number of requests without padding; null: all */
    const int32_t *host_slots; /* (rows, host_stride) */
    const int32_t *hot_slots;  /* (rows, hot) */
    const int32_t *own_slots;  /* (rows): the slot for a token without a place */
    int32_t *device, *host;    /* out, (requests): slots on both sides; host is -1 for none */
    uint32_t *refused;         /* (rows): incremented if a request has no slots for the token */
    int64_t host_stride;
    int32_t requests, hot, row_count;
    int32_t spare; /* the device slot for padding and refused requests */
};

CODE void find_newest(const Newest &newest, uint32_t request) {
    if (request >= (uint32_t)newest.requests) return;
    int32_t row = newest.rows[request], position = newest.positions[request];
    bool real = (!newest.real || (int32_t)request < *newest.real) && (uint32_t)row < (uint32_t)newest.row_count;
    int32_t device = -1, host = -1;
    if (real && position >= 0 && position < newest.host_stride) {
        host = newest.host_slots[row * newest.host_stride + position];
        device = position < newest.hot ? newest.hot_slots[(int64_t)row * newest.hot + position] : newest.own_slots[row];
    }
    bool found = device >= 0 && host >= 0;
    if (real && !found) add(&newest.refused[row], 1);
    newest.device[request] = found ? device : newest.spare;
    newest.host[request] = found ? host : -1;
}

#endif
