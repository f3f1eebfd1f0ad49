/* Which of a step's top-k positions are in a request's hot buffer, which are missing, and whom they replace: exact LRU.
 *
 * A block a request, in phases: threads of a phase touch nothing that another thread of it writes, but by atomics, and
 * between phases they synchronise. So the host's compiler runs a phase thread by thread.
 *
 * For each request the hot buffer holds `hot` tokens: held[i] is the position in place i, -1 where there is none, and
 * order[] names the places, the one that was used longest ago first. Let a step ask for d different positions of which h
 * are held. Its victims are the first d - h places of order[] that are not among the h: there are hot - h of these, so
 * hot >= d implies that there are enough. After the step order[] has first the places that were not used, then those that
 * were hit, both as they stood, then those that were filled, by first mention. */
#ifndef PDTRANSFER_SWAP_PLAN_H
#define PDTRANSFER_SWAP_PLAN_H

#include "device.h"

struct Swap {
    const int32_t *positions;  /* (requests, top): -1 is none, any may be there twice */
    const int32_t *lengths;    /* (requests): tokens; at most `hot`: every position p is in place p */
    const int32_t *rows;       /* (requests): each one's row of the tables below */
    const int32_t *real;       /* how many requests are no padding; null: all */
    const int32_t *host_slots; /* (rows, host_stride): where each position is in the arena */
    const int32_t *hot_slots;  /* (rows, hot): the device slot of each place */
    int32_t *held, *order;     /* (rows, hot) */
    int32_t *slots;            /* out, (requests, top): the device slot of each position; -1 for none */
    int32_t *sources, *targets; /* out, one list for all requests: arena slots, and device slots for them */
    int32_t *counts;           /* out: misses of all, positions refused; then misses, blocks and refusals of the running launch */
    int64_t host_stride;
    int32_t requests, top, hot, buckets; /* buckets: a power of two, at least twice `top` */
};

/* What the phases of one request share, all of it in shared memory. Hits of the order and mentions of the top-k are looked
 * up once, and kept as indices of buckets. */
struct Bucket {
    int32_t position; /* -1: free */
    int32_t first;    /* the least index in the top-k at which it is mentioned */
    int32_t place;    /* in the hot buffer; -1 until it is found or given one */
};

enum { REFUSED, BASE, WORDS };

struct Swapping {
    int32_t row, length;
    bool real, direct;
    int32_t *words;                    /* how many positions are refused, and where the request's part of the list starts */
    int32_t *order, *held, *hot_slots; /* [hot]: as they were, of this row */
    int32_t *asked;                    /* [top]: positions, then their buckets; -1 for none */
    int32_t *hits;                     /* [hot]: the bucket of what is in the place at this point of the order, or -1 */
    int32_t *counts;                   /* [threads + 1]: misses << 16 | places not hit, before each thread and in all */
    int32_t *victims;                  /* [top]: places, by rank of their miss */
    Bucket *buckets;                   /* [buckets] */
};

CODE int32_t claim(int32_t *at, int32_t expected, int32_t value) {
#if ON_DEVICE
    return atomicCAS(at, expected, value);
#else
    int32_t before = *at;
    if (before == expected) *at = value;
    return before;
#endif
}

CODE void lower(int32_t *at, int32_t value) {
#if ON_DEVICE
    atomicMin(at, value);
#else
    if (value < *at) *at = value;
#endif
}

CODE uint64_t add_wide(uint64_t *at, uint64_t value) {
#if ON_DEVICE
    return atomicAdd((unsigned long long *)at, (unsigned long long)value);
#else
    uint64_t before = *at;
    *at = before + value;
    return before;
#endif
}

CODE int32_t hashed(int32_t position, int32_t buckets) {
    return (int32_t)(((uint32_t)position * 0x9E3779B1u) >> 7) & (buckets - 1);
}

/* The bucket of a position, or -1: at least half of the buckets are free. */
CODE int32_t bucket_of(const Swapping &step, int32_t position, int32_t buckets) {
    for (int32_t at = hashed(position, buckets);; at = (at + 1) & (buckets - 1)) {
        int32_t here = step.buckets[at].position;
        if (here == position) return at;
        if (here < 0) return -1;
    }
}

/* The consecutive items that are one thread's, so that threads ascend as items do. */
struct Share {
    int32_t first, end;
};

CODE Share share_of(int32_t items, uint32_t thread, uint32_t threads) {
    int32_t each = (items + (int32_t)threads - 1) / (int32_t)threads;
    int32_t first = (int32_t)thread * each;
    Share share = {first < items ? first : items, first + each < items ? first + each : items};
    return share;
}

/* What the request is, and where its shared memory lies: the same for each thread. */
CODE Swapping start_step(const Swap &swap, uint32_t request, int32_t *memory, uint32_t threads) {
    Swapping step;
    int32_t row = swap.rows[request], length = swap.lengths[request];
    step.real = !swap.real || (int32_t)request < *swap.real;
    step.row = step.real ? row : 0;
    step.length = step.real ? length : 0;
    step.direct = step.length <= swap.hot;
    step.words = memory;
    step.order = step.words + WORDS;
    step.held = step.order + swap.hot;
    step.hot_slots = step.held + swap.hot;
    step.hits = step.hot_slots + swap.hot;
    step.asked = step.hits + swap.hot;
    step.victims = step.asked + swap.top;
    step.counts = step.victims + swap.top;
    step.buckets = (Bucket *)(step.counts + threads + 1);
    return step;
}

enum { FETCHED = 4 }; /* of each table, on their way to a thread at once */

/* Everything that is read of the card's memory, at once: the later phases wait for it no more. */
CODE void fetch(const Swap &swap, const Swapping &step, uint32_t request, uint32_t thread, uint32_t threads) {
    const int32_t *order = swap.order + (int64_t)step.row * swap.hot, *held = swap.held + (int64_t)step.row * swap.hot;
    const int32_t *slots = swap.hot_slots + (int64_t)step.row * swap.hot;
    const int32_t *positions = swap.positions + (int64_t)request * swap.top;
    for (int32_t first = (int32_t)thread; first < swap.hot || first < swap.top; first += FETCHED * (int32_t)threads) {
        int32_t got[FETCHED][4];
        UNROLLED for (int32_t at = 0; at < FETCHED; at++) {
            int32_t here = first + at * (int32_t)threads;
            if (here < swap.hot) got[at][0] = order[here], got[at][1] = held[here], got[at][2] = slots[here];
            if (here < swap.top) got[at][3] = positions[here];
        }
        UNROLLED for (int32_t at = 0; at < FETCHED; at++) {
            int32_t here = first + at * (int32_t)threads;
            if (here < swap.hot) step.order[here] = got[at][0], step.held[here] = got[at][1], step.hot_slots[here] = got[at][2];
            if (here < swap.top) step.asked[here] = got[at][3];
        }
    }
    for (int32_t at = (int32_t)thread; at < swap.buckets; at += (int32_t)threads) {
        Bucket empty = {-1, 0x7FFFFFFF, -1};
        step.buckets[at] = empty;
    }
}

/* Positions become buckets; one outside its request is refused. */
CODE void ask(const Swap &swap, const Swapping &step, uint32_t thread, uint32_t threads) {
    for (int32_t k = (int32_t)thread; k < swap.top; k += (int32_t)threads) {
        int32_t position = step.asked[k];
        bool inside = position >= 0 && position < step.length;
        if (!inside && position != -1) add((uint32_t *)&step.words[REFUSED], 1);
        step.asked[k] = -1;
        if (!inside) continue;
        int32_t at = hashed(position, swap.buckets);
        for (;;) {
            int32_t before = claim(&step.buckets[at].position, -1, position);
            if (before < 0 || before == position) break;
            at = (at + 1) & (swap.buckets - 1);
        }
        lower(&step.buckets[at].first, k);
        step.asked[k] = at;
    }
}

/* A short request has every position p in place p, and nothing moves. */
CODE void answer_direct(const Swap &swap, const Swapping &step, uint32_t request, uint32_t thread, uint32_t threads) {
    for (int32_t k = (int32_t)thread; k < swap.top; k += (int32_t)threads) {
        int32_t given = step.real ? swap.positions[(int64_t)request * swap.top + k] : -1;
        bool inside = given >= 0 && given < step.length;
        if (step.real && !inside && given != -1) add((uint32_t *)&step.words[REFUSED], 1);
        swap.slots[(int64_t)request * swap.top + k] = inside ? swap.hot_slots[(int64_t)step.row * swap.hot + given] : -1;
    }
}

/* Finds what is held, without an order among threads. */
CODE void find_held(const Swap &swap, const Swapping &step, uint32_t thread, uint32_t threads) {
    for (int32_t at = (int32_t)thread; at < swap.hot; at += (int32_t)threads) {
        int32_t place = step.order[at], position = step.held[place];
        int32_t bucket = position < 0 ? -1 : bucket_of(step, position, swap.buckets);
        step.hits[at] = bucket;
        if (bucket >= 0) step.buckets[bucket].place = place;
    }
}

CODE bool is_missing(const Swapping &step, int32_t k) {
    int32_t at = step.asked[k];
    return at >= 0 && step.buckets[at].first == k && step.buckets[at].place < 0;
}

/* Of this thread's share: positions that are missing, each where it is mentioned first, and places that are not hit. */
CODE int32_t count_share(const Swap &swap, const Swapping &step, uint32_t thread, uint32_t threads) {
    Share top = share_of(swap.top, thread, threads), hot = share_of(swap.hot, thread, threads);
    int32_t missing = 0, places = 0;
    for (int32_t k = top.first; k < top.end; k++) missing += is_missing(step, k);
    for (int32_t at = hot.first; at < hot.end; at++) places += step.hits[at] < 0;
    return missing << 16 | places;
}

/* How many positions are missing and have a victim; the others are refused, since hot < distinct(top-k). */
CODE int32_t misses_of(int32_t total) {
    int32_t missing = total >> 16, places = total & 0xFFFF;
    return missing < places ? missing : places;
}

/* One thread a block, whatever its request is: claims its part of the list of all misses. The last block to do so tells
 * their sum, and readies the counts for the next launch. */
CODE void claim_list(const Swap &swap, const Swapping &step, int32_t total, uint32_t blocks) {
    uint32_t *counts = (uint32_t *)swap.counts;
    uint32_t refused = (uint32_t)step.words[REFUSED] + (uint32_t)((total >> 16) - misses_of(total));
    if (refused) {
        add(&counts[4], refused);
#if ON_DEVICE
        __threadfence();
#endif
    }
    /* Blocks above, misses below: one addition says how many blocks have claimed, and how much. */
    uint64_t mine = (uint64_t)1 << 32 | (uint32_t)misses_of(total);
    uint64_t before = add_wide((uint64_t *)(counts + 2), mine);
    step.words[BASE] = (int32_t)(uint32_t)before;
    if ((uint32_t)(before >> 32) != blocks - 1) return;
    counts[0] = (uint32_t)(before + mine);
    counts[1] = glance(&counts[4]);
    counts[2] = counts[3] = counts[4] = 0;
}

/* The order after this step, for this thread's share of it as it was; victims go to a list by rank. */
CODE void reorder(const Swap &swap, const Swapping &step, int32_t before, int32_t total, uint32_t thread, uint32_t threads) {
    Share share = share_of(swap.hot, thread, threads);
    int32_t *after = swap.order + (int64_t)step.row * swap.hot;
    int32_t rank = before & 0xFFFF, places = total & 0xFFFF, misses = misses_of(total);
    for (int32_t at = share.first; at < share.end; at++) {
        int32_t place = step.order[at];
        if (step.hits[at] >= 0) after[places - misses + (at - rank)] = place;
        else {
            if (rank < misses) step.victims[rank] = place, after[swap.hot - misses + rank] = place;
            else after[rank - misses] = place;
            rank++;
        }
    }
}

/* Gives each miss of this thread's share its victim's place, and lists the copy that fills it. */
CODE void fill(const Swap &swap, const Swapping &step, int32_t before, int32_t total, uint32_t thread, uint32_t threads) {
    Share share = share_of(swap.top, thread, threads);
    int32_t rank = before >> 16, misses = misses_of(total);
    for (int32_t k = share.first; k < share.end; k++) {
        if (!is_missing(step, k)) continue;
        if (rank < misses) {
            Bucket &bucket = step.buckets[step.asked[k]];
            int32_t place = step.victims[rank];
            swap.sources[step.words[BASE] + rank] = swap.host_slots[step.row * swap.host_stride + bucket.position];
            swap.targets[step.words[BASE] + rank] = step.hot_slots[place];
            swap.held[(int64_t)step.row * swap.hot + place] = bucket.position;
            bucket.place = place;
        }
        rank++;
    }
}

CODE void answer(const Swap &swap, const Swapping &step, uint32_t request, uint32_t thread, uint32_t threads) {
    for (int32_t k = (int32_t)thread; k < swap.top; k += (int32_t)threads) {
        int32_t at = step.asked[k], place = at < 0 ? -1 : step.buckets[at].place;
        swap.slots[(int64_t)request * swap.top + k] = place < 0 ? -1 : step.hot_slots[place];
    }
}

#endif
