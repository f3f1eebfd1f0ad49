/* Copies rows between two pools, all planes in one launch: the work of each thread.
 *
 * An item is one row of one pair. Groups of lanes take items in turn. Lanes of a group do not communicate, and groups
 * communicate only through `Block`, so that host code can run this thread by thread. */
#ifndef PDTRANSFER_KV_COPY_H
#define PDTRANSFER_KV_COPY_H

#include "rows.h"

/* One plane's rows on both sides, as in pdtransfer.layout.pairing.Pairing, with addresses as bases. */
struct Pair {
    int64_t source_base, source_page_stride, source_row_stride;
    int64_t target_base, target_page_stride, target_row_stride;
    int64_t bytes;
};

/* The slots of one side's rows: row i has entry i >> granule_shift, a page of 1 << granule_shift slots; the shift is 0 if
 * entries are slots. Without entries, slots are consecutive from `first`. */
struct Slots {
    const void *entries; /* int32, or int64 if `wide` */
    int64_t first;
    int64_t entry_limit; /* rows with entries outside [0, entry_limit) are skipped and counted */
    int32_t wide;
    int32_t granule_shift;
    int32_t page_shift; /* of the pairing's page size on this side */
    int32_t unused;
};

/* In the host's pinned memory: reports a launch to the CPU. */
struct Progress {
    uint32_t ended;   /* ticket << 2 | state, once no store is pending: 1 complete, 2 cancelled */
    uint32_t refused; /* rows whose slots are outside their pools */
};

/* In the card's memory; zero between launches. */
struct Tally {
    uint32_t blocks, refused, cancelled;
};

struct Copy {
    const Pair *pairs;
    Slots source, target;
    const int32_t *count_at; /* the number of rows if only the card knows it, at most `count`; else null */
    const uint32_t *cancel;  /* stops the launch if not 0; 16 readable bytes, aligned to 16; may be null */
    Progress *progress;      /* may be null */
    Tally *tally;            /* null only if `progress` is null */
    int64_t count;
    uint32_t pair_count;
    uint32_t ticket;
    int32_t group_shift; /* a group has 1 << group_shift lanes, at most a warp */
    int32_t pair_major;  /* items are ordered by pair, not by row */
    int32_t by_source;   /* align accesses to the source's lines, not the target's */
    int32_t unused;
};

/* Shared by the threads of one block. */
struct Block {
    Fetched cancel; /* the launch's cancel word, as thread 0 read it last */
    uint32_t stop, refused;
};

enum {
    HELD_UNITS = 9,   /* of a row by each lane: a row of 1,152 bytes by eight lanes at once */
    GLANCE_ITEMS = 16 /* between two looks at the cancel word */
};

CODE int64_t entry_of(const Slots &slots, int64_t row) {
    int64_t at = row >> slots.granule_shift;
    if (!slots.entries) return slots.first + at;
    return slots.wide ? ((const int64_t *)slots.entries)[at] : (int64_t)((const int32_t *)slots.entries)[at];
}

CODE uint64_t offset_of(const Slots &slots, int64_t entry, int64_t row, int64_t page_stride, int64_t row_stride) {
    int64_t slot = (entry << slots.granule_shift) | (row & (((int64_t)1 << slots.granule_shift) - 1));
    int64_t within = slot & (((int64_t)1 << slots.page_shift) - 1);
    return (uint64_t)((slot >> slots.page_shift) * page_stride + within * row_stride);
}

CODE bool outside(int64_t entry, const Slots &slots) { return entry < 0 || entry >= slots.entry_limit; }

/* Copies one row of one pair; both entries are within their pools. */
template <int32_t HELD>
CODE void copy_slot(const Copy &copy, const Pair &pair, int64_t source_entry, int64_t target_entry, int64_t row,
                    int32_t lane, int32_t lanes) {
    uint64_t source = (uint64_t)pair.source_base +
        offset_of(copy.source, source_entry, row, pair.source_page_stride, pair.source_row_stride);
    uint64_t target = (uint64_t)pair.target_base +
        offset_of(copy.target, target_entry, row, pair.target_page_stride, pair.target_row_stride);
    copy_row<HELD>((char *)target, (const char *)source, (int32_t)pair.bytes, copy.by_source != 0, lane, lanes);
}

/* A group's position among all items: `inner` runs fastest, over the pairs of a row or the rows of a pair. It avoids
 * divisions in the loop. */
struct Walk {
    uint32_t inner, outer, inner_count, inner_step, outer_step;
};

CODE Walk walk_of(uint32_t inner_count, uint32_t item, uint32_t groups) {
    if (!inner_count) return {0, 0, 0, 0, 0};
    return {item % inner_count, item / inner_count, inner_count, groups % inner_count, groups / inner_count};
}

/* Whether the launch is to stop. Thread 0 reads the cancel word across the bus, where a read waits for all writes ahead of
 * it: it goes on meanwhile, and its next look finds the word. The others learn it from thread 0. */
CODE bool stopped(const Copy &copy, Block *block, uint32_t thread) {
    if (thread == 0) {
        if (end_fetch(&block->cancel)) add(&block->stop, 1);
        begin_fetch(&block->cancel, copy.cancel);
    }
    return add(&block->stop, 0) != 0;
}

/* Copies all items of the thread's group, after the previous launch has ended. */
CODE void copy_items(const Copy &copy, Block *block, uint32_t block_index, uint32_t block_count, uint32_t thread,
                     uint32_t threads) {
    uint32_t pairs = copy.pair_count, rows = (uint32_t)copy.count;
    int32_t lanes = 1 << copy.group_shift, lane = (int32_t)(thread & (uint32_t)(lanes - 1));
    uint32_t groups = (block_count * threads) >> copy.group_shift; /* few items take all blocks */
    uint32_t item = (thread >> copy.group_shift) * block_count + block_index;
    Walk walk = walk_of(copy.pair_major ? rows : pairs, item, groups);
    follow();
    if (copy.count_at) {
        int32_t known = *copy.count_at;
        rows = known < 0 ? 0 : known < copy.count ? (uint32_t)known : rows;
        if (copy.pair_major) walk = walk_of(rows, item, groups);
    }
    if ((int64_t)rows * pairs <= groups) lead(); /* no group has a second item: this ends soon */
    uint32_t inner = walk.inner, outer = walk.outer, outer_count = !rows ? 0 : copy.pair_major ? pairs : rows;
    int64_t source_entry = 0, target_entry = 0;
    if (outer < outer_count) {
        source_entry = entry_of(copy.source, copy.pair_major ? inner : outer);
        target_entry = entry_of(copy.target, copy.pair_major ? inner : outer);
    }
    for (uint32_t turn = 0; outer < outer_count; turn++) {
        if (copy.cancel && turn % GLANCE_ITEMS == GLANCE_ITEMS / 2 && stopped(copy, block, thread)) return;
        uint32_t row = copy.pair_major ? inner : outer, pair_at = copy.pair_major ? outer : inner;
        Pair pair = copy.pairs[pair_at]; /* on its way with the first slots, not after them */
        int64_t source_here = source_entry, target_here = target_entry;
        inner += walk.inner_step, outer += walk.outer_step;
        if (inner >= walk.inner_count) inner -= walk.inner_count, outer++;
        if (outer < outer_count) { /* load the next item's slots while this one is copied */
            source_entry = entry_of(copy.source, copy.pair_major ? inner : outer);
            target_entry = entry_of(copy.target, copy.pair_major ? inner : outer);
        }
        if (outside(source_here, copy.source) || outside(target_here, copy.target)) {
            if (lane == 0 && pair_at == 0) add(&block->refused, 1);
            continue;
        }
        copy_slot<HELD_UNITS>(copy, pair, source_here, target_here, row, lane, lanes);
    }
}

/* Called by one thread of each block after the block has synchronised. The last block publishes the end. */
CODE void end_block(const Copy &copy, const Block *block, uint32_t block_count) {
#if ON_DEVICE
    __threadfence_system();
#endif
    Tally *tally = copy.tally;
    if (block->refused) add(&tally->refused, block->refused);
    if (block->stop) add(&tally->cancelled, 1);
#if ON_DEVICE
    __threadfence();
#endif
    if (add(&tally->blocks, 1) != block_count - 1) return;
#if ON_DEVICE
    __threadfence();
#endif
    uint32_t refused = glance(&tally->refused), cancelled = glance(&tally->cancelled);
    tally->blocks = tally->refused = tally->cancelled = 0;
    copy.progress->refused = refused;
    publish(&copy.progress->ended, copy.ticket << 2 | (cancelled ? 2u : 1u));
}

#endif
