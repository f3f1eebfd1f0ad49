/* Finds which of a step's top-k positions are in a request's hot buffer, which are missing, and the victims: exact LRU.
 *
 * One block for each request, in phases. Within a phase, threads share data only through atomics; between phases they
 * synchronise. So host code can run a phase thread by thread.
 *
 * For each request the hot buffer holds `hot` tokens: held[i] is the position in place i, or -1, and order[] lists
 * the places from least to most recently used. Let a step ask for d distinct positions, of which h are held. Its victims
 * are the first d - h places of order[] that are not hit. There are hot - h such places, so hot >= d implies that there
 * are enough. After the step order[] has the unused places, then the hit places, both in their old order, then the
 * filled places in order of first mention.
 *
 * If few rows are missing, the block copies them itself, and they are not listed for kv_copy. Their transfer over the
 * bus, which takes most of such a step's time, then starts before the rest of the plan. */
#ifndef PDTRANSFER_SWAP_PLAN_H
#define PDTRANSFER_SWAP_PLAN_H

#include "kv_copy.h"

struct Swap {
    const int32_t *positions;  /* (requests, top): -1 is none, positions may repeat */
    const int32_t *lengths;    /* (requests): tokens; if at most `hot`, every position p is in place p */
    const int32_t *rows;       /* (requests): each request's row of the tables below */
    const int32_t *real;       /* the number of requests without padding; null: all */
    const int32_t *host_slots; /* (rows, host_stride): each position's arena slot */
    const int32_t *hot_slots;  /* (rows, hot): each place's device slot */
    int32_t *held, *order;     /* (rows, hot) */
    int32_t *slots;            /* out, (requests, top): each position's device slot, or -1 */
    int32_t *sources, *targets; /* out, one list for all requests: arena slots and device slots */
    int32_t *counts;           /* out: listed misses, refused positions; then misses, blocks and refusals of the running launch */
    uint32_t *refused;         /* (rows): increased by each row's refused positions and those without a slot; may be null */
    uint64_t *tally;           /* (2): increased by hits and by misses of requests longer than `hot`; may be null */
    int64_t host_stride;       /* a longer request is truncated to this length */
    int32_t requests, top, hot, buckets; /* buckets: a power of two, at least twice `top` */
    int32_t row_count, unused;           /* a request with a row outside [0, row_count) is padding */
    Copy bring;                          /* executes the list; with pairs, the plan may copy rows itself */
};

/* From BROUGHT on: arena slots by rank of their miss. WORDS is a multiple of four, since the next tables are read four
 * words at a time. */
enum { REFUSED, BASE, BROUGHT = 4, BROUGHT_MAX = 32, WORDS = BROUGHT + BROUGHT_MAX };
enum { ABSENT = 0xFFFF };          /* no place */

/* Shared memory of one request's threads. keys[] is a hash table of the requested positions, with linear probing. */
struct Swapping {
    int32_t row, length;
    bool real, direct, quads;  /* quads: table rows may be read four words at a time */
    int32_t *words;            /* refused positions, the start of the request's part of the list, arena slots of copied rows */
    int32_t *keys;             /* [buckets]; -1 is free, and its mark and place are undefined */
    int32_t *marks;            /* [buckets]: the position's least index; later the rank of its miss */
    uint16_t *places;          /* [buckets]: the position's place in the hot buffer, or ABSENT */
    int32_t *held, *hot_slots; /* [hot]: this row's tables before the step */
    int32_t *after;            /* [hot]: the order after this step, in the memory of keys, which are no longer used */
    int32_t *victims;          /* [top]: places, by rank of their miss */
};

/* One thread's share across phases: consecutive positions, and consecutive places of the order. */
template <int32_t TOP_EACH, int32_t HOT_EACH> struct Own {
    int32_t positions[TOP_EACH], buckets[TOP_EACH], places[TOP_EACH], sources[TOP_EACH];
    int32_t order[HOT_EACH];
    uint32_t again, missing, hit; /* bit sets: positions claimed by another thread, missing positions, places that are hit */
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

struct alignas(16) Quad {
    int32_t word[4];
};

CODE Swapping start_step(const Swap &swap, int32_t *memory) {
    Swapping step;
    step.words = memory;
    step.keys = memory + WORDS;
    int32_t hot = (swap.hot + 3) & ~3;
    step.after = step.keys;
    step.marks = step.keys + (swap.buckets > hot ? swap.buckets : hot);
    step.held = step.marks + swap.buckets;
    step.hot_slots = step.held + hot;
    step.victims = step.hot_slots + hot;
    step.places = (uint16_t *)(step.victims + swap.top);
    step.quads = ((swap.hot & 3) | (((uintptr_t)swap.held | (uintptr_t)swap.order | (uintptr_t)swap.hot_slots) & 15)) == 0;
    return step;
}

/* Runs before any read of the card's memory. */
CODE void clear(const Swap &swap, const Swapping &step, uint32_t thread, uint32_t threads) {
    if (thread == 0) step.words[REFUSED] = 0;
    const Quad free = {{-1, -1, -1, -1}};
    for (int32_t at = (int32_t)thread; at < swap.buckets / 4; at += (int32_t)threads) ((Quad *)step.keys)[at] = free;
}

/* Reads the request's row and length; the same for each thread. */
CODE void look(const Swap &swap, Swapping &step, uint32_t request) {
    int32_t row = swap.rows[request], length = swap.lengths[request];
    step.real = (!swap.real || (int32_t)request < *swap.real) && (uint32_t)row < (uint32_t)swap.row_count;
    step.row = step.real ? row : 0;
    step.length = !step.real ? 0 : length < swap.host_stride ? length : (int32_t)swap.host_stride;
    step.direct = step.length <= swap.hot;
}

/* Reads items first..first + 3 of a table of `limit` items; others stay unchanged. */
CODE void read_four(int32_t *to, const int32_t *table, int32_t first, int32_t limit, bool quads) {
    if (quads) {
        if (first >= limit) return;
        Quad four = *(const Quad *)(table + first);
        UNROLLED for (int32_t at = 0; at < 4; at++) to[at] = four.word[at];
    } else {
        UNROLLED for (int32_t at = 0; at < 4; at++)
            if (first + at < limit) to[at] = table[first + at];
    }
}

template <int32_t TOP_EACH, int32_t HOT_EACH>
CODE void read_positions(const Swap &swap, Own<TOP_EACH, HOT_EACH> &own, uint32_t request, uint32_t thread) {
    const int32_t *positions = swap.positions + (int64_t)request * swap.top;
    UNROLLED for (int32_t at = 0; at < TOP_EACH; at++) {
        int32_t k = (int32_t)thread * TOP_EACH + at;
        own.positions[at] = k < swap.top ? positions[k] : -1;
    }
}

/* Reads the other tables at once, so that later phases do not wait for the card's memory. */
template <int32_t TOP_EACH, int32_t HOT_EACH>
CODE void read_tables(const Swap &swap, const Swapping &step, Own<TOP_EACH, HOT_EACH> &own, uint32_t thread) {
    int64_t row = (int64_t)step.row * swap.hot;
    int32_t held[HOT_EACH], slots[HOT_EACH];
    UNROLLED for (int32_t at = 0; at < HOT_EACH; at += 4) {
        int32_t first = (int32_t)thread * HOT_EACH + at;
        read_four(own.order + at, swap.order + row, first, swap.hot, step.quads);
        read_four(held + at, swap.held + row, first, swap.hot, step.quads);
        read_four(slots + at, swap.hot_slots + row, first, swap.hot, step.quads);
    }
    UNROLLED for (int32_t at = 0; at < HOT_EACH; at += 4) {
        int32_t first = (int32_t)thread * HOT_EACH + at;
        if (first >= swap.hot) continue; /* rows here are padded to a multiple of four */
        Quad four = {{held[at], held[at + 1], held[at + 2], held[at + 3]}};
        *(Quad *)(step.held + first) = four;
        Quad slot = {{slots[at], slots[at + 1], slots[at + 2], slots[at + 3]}};
        *(Quad *)(step.hot_slots + first) = slot;
    }
}

/* Assigns positions to buckets. A position outside its request is refused. */
template <int32_t TOP_EACH, int32_t HOT_EACH>
CODE void ask(const Swap &swap, const Swapping &step, Own<TOP_EACH, HOT_EACH> &own, uint32_t thread) {
    int32_t before[TOP_EACH];
    own.again = 0;
    UNROLLED for (int32_t at = 0; at < TOP_EACH; at++) {
        int32_t position = own.positions[at];
        bool inside = position >= 0 && position < step.length;
        if (!inside && position != -1) add((uint32_t *)&step.words[REFUSED], 1);
        own.buckets[at] = inside ? hashed(position, swap.buckets) : -1;
        if (inside) before[at] = claim(&step.keys[own.buckets[at]], -1, position);
    }
    for (bool busy = true; busy;) { /* probe for all positions of a thread together */
        busy = false;
        UNROLLED for (int32_t at = 0; at < TOP_EACH; at++) {
            if (own.buckets[at] < 0 || before[at] < 0 || before[at] == own.positions[at]) continue;
            own.buckets[at] = (own.buckets[at] + 1) & (swap.buckets - 1);
            before[at] = claim(&step.keys[own.buckets[at]], -1, own.positions[at]);
            busy = true;
        }
    }
    UNROLLED for (int32_t at = 0; at < TOP_EACH; at++) {
        if (own.buckets[at] < 0) continue;
        if (before[at] < 0) {
            step.marks[own.buckets[at]] = (int32_t)thread * TOP_EACH + at;
            step.places[own.buckets[at]] = ABSENT;
        } else own.again |= 1u << at;
    }
}

/* Answers for a short request, in which every position p is in place p. */
CODE void answer_direct(const Swap &swap, const Swapping &step, uint32_t request, uint32_t thread, uint32_t threads) {
    for (int32_t k = (int32_t)thread; k < swap.top; k += (int32_t)threads) {
        int32_t given = step.real ? swap.positions[(int64_t)request * swap.top + k] : -1;
        bool inside = given >= 0 && given < step.length;
        int32_t slot = inside ? swap.hot_slots[(int64_t)step.row * swap.hot + given] : -1;
        if (step.real && slot < 0 && given != -1) add((uint32_t *)&step.words[REFUSED], 1);
        swap.slots[(int64_t)request * swap.top + k] = slot;
    }
}

/* Finds held positions, and the first mention of repeated ones, independent of the order of threads. */
template <int32_t TOP_EACH, int32_t HOT_EACH>
CODE void find_held(const Swap &swap, const Swapping &step, Own<TOP_EACH, HOT_EACH> &own, uint32_t thread) {
    int32_t positions[HOT_EACH], buckets[HOT_EACH], keys[HOT_EACH];
    UNROLLED for (int32_t at = 0; at < TOP_EACH; at++)
        if (own.again >> at & 1) lower(&step.marks[own.buckets[at]], (int32_t)thread * TOP_EACH + at);
    own.hit = 0;
    UNROLLED for (int32_t at = 0; at < HOT_EACH; at++)
        positions[at] = (int32_t)thread * HOT_EACH + at < swap.hot ? step.held[own.order[at]] : -1;
    UNROLLED for (int32_t at = 0; at < HOT_EACH; at++) {
        buckets[at] = hashed(positions[at], swap.buckets);
        keys[at] = positions[at] < 0 ? -1 : step.keys[buckets[at]];
    }
    for (bool busy = true; busy;) {
        busy = false;
        UNROLLED for (int32_t at = 0; at < HOT_EACH; at++) {
            if (keys[at] < 0 || keys[at] == positions[at]) continue;
            buckets[at] = (buckets[at] + 1) & (swap.buckets - 1);
            keys[at] = step.keys[buckets[at]];
            busy = true;
        }
    }
    UNROLLED for (int32_t at = 0; at < HOT_EACH; at++) {
        if (keys[at] < 0) continue;
        step.places[buckets[at]] = (uint16_t)own.order[at];
        own.hit |= 1u << at;
    }
}

/* Finds the thread's missing positions, each at its first mention. Their arena slots are loaded while misses are
 * counted. */
template <int32_t TOP_EACH, int32_t HOT_EACH>
CODE void find_missing(const Swap &swap, const Swapping &step, Own<TOP_EACH, HOT_EACH> &own, uint32_t thread) {
    own.missing = 0;
    UNROLLED for (int32_t at = 0; at < TOP_EACH; at++) {
        own.places[at] = own.buckets[at] < 0 ? 0 : step.places[own.buckets[at]];
        if (own.places[at] != ABSENT || step.marks[own.buckets[at]] != (int32_t)thread * TOP_EACH + at) continue;
        own.missing |= 1u << at;
        own.sources[at] = swap.host_slots[step.row * swap.host_stride + own.positions[at]];
    }
}

/* This thread's misses << 16 | its places that are not hit. */
template <int32_t TOP_EACH, int32_t HOT_EACH>
CODE int32_t counted(const Swap &swap, const Own<TOP_EACH, HOT_EACH> &own, uint32_t thread) {
    int32_t missing = 0, places = swap.hot - (int32_t)thread * HOT_EACH;
    places = places < 0 ? 0 : places < HOT_EACH ? places : HOT_EACH;
    UNROLLED for (int32_t at = 0; at < TOP_EACH; at++) missing += own.missing >> at & 1;
    UNROLLED for (int32_t at = 0; at < HOT_EACH; at++) places -= own.hit >> at & 1;
    return missing << 16 | places;
}

/* The number of misses that have a victim. The others are refused: hot < distinct(top-k). */
CODE int32_t misses_of(int32_t total) {
    int32_t missing = total >> 16, places = total & 0xFFFF;
    return missing < places ? missing : places;
}

/* Whether the block copies the rows itself: at most one row of one pair for each warp. */
CODE bool brings(const Swap &swap, int32_t total, uint32_t threads) {
    uint32_t misses = (uint32_t)misses_of(total);
    return misses && misses <= BROUGHT_MAX && swap.bring.pair_count && misses * swap.bring.pair_count <= threads / 32;
}

/* Called by one thread of each block: claims the block's part of the list. One 64-bit addition counts blocks in the upper
 * half and misses in the lower half. */
CODE uint64_t claim_list(const Swap &swap, const Swapping &step, int32_t total, int32_t listed) {
    uint32_t *counts = (uint32_t *)swap.counts;
    uint32_t refused = (uint32_t)step.words[REFUSED] + (uint32_t)((total >> 16) - misses_of(total));
    if (refused) {
        if (swap.refused && step.real) add(&swap.refused[step.row], refused);
        add(&counts[4], refused);
#if ON_DEVICE
        __threadfence();
#endif
    }
    return add_wide((uint64_t *)(counts + 2), (uint64_t)1 << 32 | (uint32_t)listed);
}

/* Called by the same thread with claim_list's result. The last block writes the totals and resets the counts for the
 * next launch. */
CODE void begin_list(const Swap &swap, const Swapping &step, int32_t total, int32_t listed, uint64_t before,
                     uint32_t blocks) {
    uint32_t *counts = (uint32_t *)swap.counts;
    step.words[BASE] = (int32_t)(uint32_t)before;
    if (swap.tally && !step.direct) {
        add_wide(&swap.tally[0], (uint64_t)(swap.hot - (total & 0xFFFF)));
        add_wide(&swap.tally[1], (uint64_t)misses_of(total));
    }
    if ((uint32_t)(before >> 32) != blocks - 1) return;
#if ON_DEVICE
    __threadfence();
#endif
    counts[0] = (uint32_t)before + (uint32_t)listed;
    counts[1] = glance(&counts[4]);
    counts[2] = counts[3] = counts[4] = 0;
}

/* Writes this thread's share of the new order to shared memory, victims to a list by rank, and each miss's rank to its
 * bucket. With `brought`, it also writes the misses' arena slots. */
template <int32_t TOP_EACH, int32_t HOT_EACH>
CODE void reorder(const Swap &swap, const Swapping &step, const Own<TOP_EACH, HOT_EACH> &own, int32_t before, int32_t total,
                  bool brought, uint32_t thread) {
    int32_t rank = before & 0xFFFF, places = total & 0xFFFF, misses = misses_of(total), miss = before >> 16;
    UNROLLED for (int32_t at = 0; at < TOP_EACH; at++) {
        if (!(own.missing >> at & 1)) continue;
        if (brought && miss < misses) step.words[BROUGHT + miss] = own.sources[at];
        step.marks[own.buckets[at]] = miss++;
    }
    UNROLLED for (int32_t at = 0; at < HOT_EACH; at++) {
        int32_t here = (int32_t)thread * HOT_EACH + at, place = own.order[at];
        if (here >= swap.hot) continue;
        bool hit = own.hit >> at & 1, victim = !hit && rank < misses;
        if (victim) step.victims[rank] = place;
        step.after[hit ? places - misses + here - rank : victim ? swap.hot - misses + rank : rank - misses] = place;
        rank += !hit;
    }
}

APART void bring_row(const Copy &copy, uint32_t pair_at, int32_t source, int32_t target, int32_t lane) {
    copy_slot<4>(copy, copy.pairs[pair_at], source, target, 0, lane, 32);
}

/* Copies the missing rows, one row of one pair for each warp. Uses the last warps, since the first thread is busy. */
CODE void bring(const Swap &swap, const Swapping &step, int32_t total, uint32_t thread, uint32_t threads) {
    uint32_t item = threads / 32 - 1 - thread / 32, pairs = swap.bring.pair_count;
    if (item >= (uint32_t)misses_of(total) * pairs) return;
    int32_t source = step.words[BROUGHT + item / pairs], target = step.hot_slots[step.victims[item / pairs]];
    if (outside(source, swap.bring.source) || outside(target, swap.bring.target)) return;
    bring_row(swap.bring, item % pairs, source, target, (int32_t)(thread & 31));
}

CODE void write_order(const Swap &swap, const Swapping &step, uint32_t thread, uint32_t threads) {
    int32_t *order = swap.order + (int64_t)step.row * swap.hot;
    if (step.quads) {
        const Quad *after = (const Quad *)step.after;
        for (int32_t at = (int32_t)thread; at < swap.hot / 4; at += (int32_t)threads) ((Quad *)order)[at] = after[at];
    } else
        for (int32_t at = (int32_t)thread; at < swap.hot; at += (int32_t)threads) order[at] = step.after[at];
}

/* Writes the slot of each position. A missing position gets its victim's place. */
template <int32_t TOP_EACH, int32_t HOT_EACH>
CODE void answer(const Swap &swap, const Swapping &step, Own<TOP_EACH, HOT_EACH> &own, int32_t total, uint32_t request,
                 uint32_t thread) {
    int32_t misses = misses_of(total);
    UNROLLED for (int32_t at = 0; at < TOP_EACH; at++) {
        int32_t k = (int32_t)thread * TOP_EACH + at, place = -1;
        if (own.buckets[at] >= 0) {
            place = own.places[at];
            if (place == ABSENT) {
                int32_t rank = step.marks[own.buckets[at]];
                place = rank < misses ? step.victims[rank] : -1;
            }
        }
        own.places[at] = place;
        if (k < swap.top) swap.slots[(int64_t)request * swap.top + k] = place < 0 ? -1 : step.hot_slots[place];
    }
}

/* Lists the copies for this thread's misses, unless the block has copied them, and updates `held`. */
template <int32_t TOP_EACH, int32_t HOT_EACH>
CODE void list(const Swap &swap, const Swapping &step, const Own<TOP_EACH, HOT_EACH> &own, int32_t before, bool brought) {
    int32_t rank = step.words[BASE] + (before >> 16);
    UNROLLED for (int32_t at = 0; at < TOP_EACH; at++) {
        if (!(own.missing >> at & 1) || own.places[at] < 0) continue;
        if (own.sources[at] < 0 && swap.refused) add(&swap.refused[step.row], 1); /* kv_copy skips it */
        if (!brought) {
            swap.sources[rank] = own.sources[at];
            swap.targets[rank] = step.hot_slots[own.places[at]];
        }
        swap.held[(int64_t)step.row * swap.hot + own.places[at]] = own.positions[at];
        rank++;
    }
}

#endif
