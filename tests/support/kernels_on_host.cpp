// The kernels' own headers as host code: launches run thread by thread. Built as a library for the tests of the launches,
// and with -DALONE as a program that copies rows of every size between every two alignments, for sanitizers to watch.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "hot_row.h"
#include "kv_copy.h"
#include "newest.h"
#include "set_mla.h"
#include "swap_plan.h"

template <class Each> static void each_thread(uint32_t blocks, uint32_t columns, uint32_t together, Each each) {
    for (uint32_t block = 0; block < blocks; block++)
        for (uint32_t down = 0; down < together; down++)
            for (uint32_t across = 0; across < columns; across++) each(block, across, down);
}

template <class Unit, int32_t HELD>
static void set_all(const SetMla &set, uint32_t blocks, uint32_t columns, uint32_t together) {
    each_thread(blocks, columns, together, [&](uint32_t block, uint32_t across, uint32_t down) {
        set_rows<Unit, HELD>(set, block, across, down, columns, together);
    });
}

extern "C" {

uint32_t sizes_of(uint32_t which) {
    const uint32_t sizes[] = {sizeof(Copy), sizeof(Slots), sizeof(Pair), sizeof(SetMla), sizeof(Swap), sizeof(Newest), sizeof(HotRow)};
    return sizes[which];
}

// Threads of a block run one after another: they share nothing but the word that stops them.
void kv_copy_on_host(const Copy *copy, uint32_t blocks, uint32_t threads) {
    for (uint32_t at = 0; at < blocks; at++) {
        Block block = {};
        for (uint32_t thread = 0; thread < threads; thread++) copy_items(*copy, &block, at, blocks, thread, threads);
        if (copy->progress) end_block(*copy, &block, blocks);
    }
}

void set_mla_on_host(const SetMla *set, uint32_t unit, uint32_t held, uint32_t blocks, uint32_t columns, uint32_t together) {
    if (unit == 16 && held == 1)
        each_thread(blocks, columns, together, [&](uint32_t block, uint32_t across, uint32_t down) {
            set_row<Bytes16>(*set, block, across, down, together);
        });
    else if (unit == 16 && held == 2) set_all<Bytes16, 2>(*set, blocks, columns, together);
    else if (unit == 16) set_all<Bytes16, 4>(*set, blocks, columns, together);
    else if (unit == 8) set_all<uint64_t, 4>(*set, blocks, columns, together);
    else if (unit == 4) set_all<uint32_t, 4>(*set, blocks, columns, together);
    else set_all<unsigned char, 4>(*set, blocks, columns, together);
}
}

// The phases of swap_plan.cu. `memory` is a block's shared memory, of the very bytes that a launch asks for.
template <int32_t TOP_EACH, int32_t HOT_EACH> static void plan_all(const Swap &swap, uint32_t threads, int32_t *memory) {
    for (uint32_t request = 0; request < (uint32_t)swap.requests; request++) {
        Swapping step = start_step(swap, memory);
        std::vector<Own<TOP_EACH, HOT_EACH>> own(threads);
        std::vector<int32_t> before(threads);
        for (uint32_t at = 0; at < threads; at++) clear(swap, step, at, threads);
        look(swap, step, request);
        if (!step.real || step.direct) {
            for (uint32_t at = 0; at < threads; at++) answer_direct(swap, step, request, at, threads);
            begin_list(swap, step, 0, 0, claim_list(swap, step, 0, 0), (uint32_t)swap.requests);
            continue;
        }
        for (uint32_t at = 0; at < threads; at++) {
            read_positions(swap, own[at], request, at);
            read_tables(swap, step, own[at], at);
        }
        for (uint32_t at = threads; at--;) ask(swap, step, own[at], at);
        for (uint32_t at = 0; at < threads; at++) find_held(swap, step, own[at], at);
        int32_t total = 0;
        for (uint32_t at = 0; at < threads; at++) {
            find_missing(swap, step, own[at], at);
            before[at] = total;
            total += counted(swap, own[at], at);
        }
        bool brought = brings(swap, total, threads);
        int32_t listed = brought ? 0 : misses_of(total);
        uint64_t claimed = claim_list(swap, step, total, listed);
        for (uint32_t at = 0; at < threads; at++) reorder(swap, step, own[at], before[at], total, brought, at);
        for (uint32_t at = 0; brought && at < threads; at++) bring(swap, step, total, at, threads);
        for (uint32_t at = 0; at < threads; at++) answer(swap, step, own[at], total, request, at);
        for (uint32_t at = 0; at < threads; at++) write_order(swap, step, at, threads);
        begin_list(swap, step, total, listed, claimed, (uint32_t)swap.requests);
        for (uint32_t at = 0; at < threads; at++) list(swap, step, own[at], before[at], brought);
    }
}

extern "C" void swap_plan_on_host(const Swap *swap, uint32_t top_each, uint32_t threads, int32_t *memory) {
    if (top_each == 2) plan_all<2, 4>(*swap, threads, memory);
    else plan_all<4, 16>(*swap, threads, memory);
}

extern "C" void hot_row_on_host(const HotRow *set, uint32_t threads) {
    for (uint32_t thread = 0; thread < threads; thread++) set_row(*set, thread, threads);
}

extern "C" void newest_on_host(const Newest *newest, uint32_t threads) {
    for (uint32_t thread = 0; thread < threads; thread++) find_newest(*newest, thread);
}

#ifdef ALONE
static char byte_of(int at) { return (char)(at * 167 + (at >> 8) * 59 + 13); }

// Bytes around the row that differ from before, and bytes of it that are not the source's.
static int differs(int bytes, int source_at, int target_at, int lanes, bool by_source) {
    char *sources = (char *)aligned_alloc(128, 2048), *targets = (char *)aligned_alloc(128, 2048);
    char *source = sources + 256 + source_at, *target = targets + 256 + target_at;
    for (int at = 0; at < bytes; at++) source[at] = byte_of(at);
    memset(targets, 0x5a, 2048);
    for (int lane = 0; lane < lanes; lane++) copy_row<HELD_UNITS>(target, source, bytes, by_source, lane, lanes);
    int wrong = 0;
    for (int at = 0; at < 2048; at++) {
        bool inside = targets + at >= target && targets + at < target + bytes;
        wrong += targets[at] != (inside ? byte_of((int)(targets + at - target)) : 0x5a);
    }
    free(sources), free(targets);
    return wrong;
}

// The same with a row that begins and ends where its allocation does: nothing beside it may even be read.
static int strays(int bytes, int lanes, bool by_source) {
    char *source = (char *)malloc((size_t)bytes + !bytes), *target = (char *)malloc((size_t)bytes + !bytes);
    for (int at = 0; at < bytes; at++) source[at] = byte_of(at);
    for (int lane = 0; lane < lanes; lane++) copy_row<HELD_UNITS>(target, source, bytes, by_source, lane, lanes);
    int wrong = memcmp(source, target, (size_t)bytes) != 0;
    free(source), free(target);
    return wrong;
}

int main() {
    int odd[] = {255, 256, 257, 575, 576, 577, 655, 656, 1151, 1152, 1153}, sizes[160], count = 0;
    for (int bytes = 0; bytes <= 130; bytes++) sizes[count++] = bytes;
    for (int bytes : odd) sizes[count++] = bytes;
    long rows = 0;
    for (int size = 0; size < count; size++) {
        for (int at = 0; at < 256; at++) {
            int lanes = at ? 1 << (at + size) % 6 : 8; // rows of whole lines are copied apart by eight lanes
            for (int by_source = 0; by_source < 2; by_source++, rows++)
                if (differs(sizes[size], at & 15, at >> 4, lanes, by_source) ||
                    differs(sizes[size], (at & 15) + 48, at >> 4, 32, by_source)) {
                    printf("%d bytes from %d to %d differ\n", sizes[size], at & 15, at >> 4);
                    return 1;
                }
        }
        if (strays(sizes[size], 32, false) || strays(sizes[size], 8, true)) return 1;
    }
    printf("%ld rows\n", rows);
    return 0;
}
#endif
