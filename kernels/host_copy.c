/* Executes a plan on the CPU: copies rows of slots x planes between two mappings of this process.
 *
 * Valid C and C++, so any compiler works. Built without -march: the widest stores are chosen at run time, so one
 * library serves every CPU that shares a home directory. */
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifdef __cplusplus
#define EXPORT extern "C" __attribute__((visibility("default")))
#else
#define EXPORT __attribute__((visibility("default")))
#endif

enum {
    BATCH_BYTES = 4608, /* prefetched before stores: hides memory latency and fits the L1 cache */
    BATCH_ROWS = 256,
    TURN_BYTES = 2 << 20, /* copied between two yields of the core */
    TILE_ROWS = 64,       /* rows of long runs that pass all planes before the next rows */
    TILE_RUNS = 2048,     /* short runs of a tile: many rows of one plane in turn spare the TLB */
    TILE_RUNS_WOVEN = 16, /* short runs of a tile if the planes of a target row are adjacent */
    LONG_RUN_ROWS = 8,
    LINE = 64
};

typedef struct {
    int64_t source_base, source_page_stride, source_row_stride;
    int64_t target_base, target_page_stride, target_row_stride;
    int64_t bytes;
} Pair;

typedef struct {
    int64_t source_start, target_start, count;
} Run;

/* A run, or its part in the tile. */
typedef struct {
    int64_t source_page, target_page;
    int32_t source_row, target_row;
    int64_t count;
} Segment;

typedef void (*Store)(unsigned char *target, const unsigned char *source, size_t bytes);

typedef struct {
    unsigned char *target;
    const unsigned char *source;
    size_t bytes;
} Item;

typedef struct {
    Item items[BATCH_ROWS];
    int count;
    size_t bytes;
    size_t turn_bytes;
    Store store;
    const volatile uint32_t *cancel;
} Batch;

static void store_plain(unsigned char *target, const unsigned char *source, size_t bytes) {
    memcpy(target, source, bytes);
}

/* Whole cache lines bypass the cache; partial lines do not. */
#define STORE_STREAMING(NAME, FEATURE, VECTOR, WIDTH, LOAD, STREAM)                                     \
    __attribute__((target(FEATURE))) static void NAME(unsigned char *target, const unsigned char *source, \
                                                      size_t bytes) {                                   \
        size_t head = (LINE - ((uintptr_t)target & (LINE - 1))) & (LINE - 1);                           \
        if (bytes < head + LINE) {                                                                      \
            memcpy(target, source, bytes);                                                              \
            return;                                                                                     \
        }                                                                                               \
        memcpy(target, source, head);                                                                   \
        target += head, source += head, bytes -= head;                                                  \
        for (; bytes >= 4 * WIDTH; bytes -= 4 * WIDTH, target += 4 * WIDTH, source += 4 * WIDTH) {      \
            VECTOR first = LOAD((const VECTOR *)(const void *)source);                                  \
            VECTOR second = LOAD((const VECTOR *)(const void *)(source + WIDTH));                       \
            VECTOR third = LOAD((const VECTOR *)(const void *)(source + 2 * WIDTH));                    \
            VECTOR fourth = LOAD((const VECTOR *)(const void *)(source + 3 * WIDTH));                   \
            STREAM((VECTOR *)(void *)target, first);                                                    \
            STREAM((VECTOR *)(void *)(target + WIDTH), second);                                         \
            STREAM((VECTOR *)(void *)(target + 2 * WIDTH), third);                                      \
            STREAM((VECTOR *)(void *)(target + 3 * WIDTH), fourth);                                     \
        }                                                                                               \
        for (; bytes >= LINE; bytes -= LINE, target += LINE, source += LINE)                            \
            for (size_t at = 0; at < LINE; at += WIDTH)                                                 \
                STREAM((VECTOR *)(void *)(target + at), LOAD((const VECTOR *)(const void *)(source + at))); \
        memcpy(target, source, bytes);                                                                  \
    }

#if defined(__x86_64__)
STORE_STREAMING(store_sse2, "sse2", __m128i, 16, _mm_loadu_si128, _mm_stream_si128)
STORE_STREAMING(store_avx, "avx", __m256i, 32, _mm256_loadu_si256, _mm256_stream_si256)
STORE_STREAMING(store_avx512, "avx512f", __m512i, 64, _mm512_loadu_si512, _mm512_stream_si512)
#endif

/* The widest streaming stores of this CPU and its kernel: 0 none, 1 SSE2, 2 AVX, 3 AVX-512. */
EXPORT int32_t pdtransfer_streams(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return 3;
    if (__builtin_cpu_supports("avx")) return 2;
    return 1;
#else
    return 0;
#endif
}

static Store store_of(int32_t streams) {
#if defined(__x86_64__)
    static const Store stores[] = {store_plain, store_sse2, store_avx, store_avx512};
    int32_t most = pdtransfer_streams();
    return stores[streams < 0 ? 0 : streams > most ? most : streams];
#else
    (void)streams;
    return store_plain;
#endif
}

/* Stores the batch. Returns 0 and stores nothing if the cancel word is set. */
static int flush(Batch *batch) {
    if (batch->cancel && *batch->cancel) return 0;
    for (int at = 0; at < batch->count; at++)
        batch->store(batch->items[at].target, batch->items[at].source, batch->items[at].bytes);
    batch->turn_bytes += batch->bytes;
    batch->count = 0;
    batch->bytes = 0;
    if (batch->turn_bytes >= TURN_BYTES) {
        /* Without it, a thread that has just woken would wait for the end of this thread's time slice. */
        sched_yield();
        batch->turn_bytes = 0;
    }
    return 1;
}

static void take(Batch *batch, unsigned char *target, const unsigned char *source, size_t bytes) {
    /* Streaming stores and missing loads share a few buffers, so a batch first only loads. */
    for (size_t at = 0; at < bytes; at += LINE) __builtin_prefetch(source + at, 0, 2);
    Item *item = &batch->items[batch->count++];
    item->target = target;
    item->source = source;
    item->bytes = bytes;
    batch->bytes += bytes;
}

/* Copies bytes that are contiguous on both sides, in batches that end at a line of the target. */
static int stretch(Batch *batch, unsigned char *target, const unsigned char *source, size_t bytes) {
    if (batch->bytes + bytes > BATCH_BYTES || batch->count == BATCH_ROWS)
        if (!flush(batch)) return 0;
    while (bytes > BATCH_BYTES) {
        size_t part = BATCH_BYTES - (((uintptr_t)target + BATCH_BYTES) & (LINE - 1));
        take(batch, target, source, part);
        if (!flush(batch)) return 0;
        target += part, source += part, bytes -= part;
    }
    take(batch, target, source, bytes);
    return 1;
}

static int plane(Batch *batch, const Pair *pair, const Segment *segments, int count, uintptr_t source_at,
                 uintptr_t target_at) {
    int together = pair->source_row_stride == pair->bytes && pair->target_row_stride == pair->bytes;
    source_at += (uintptr_t)pair->source_base;
    target_at += (uintptr_t)pair->target_base;
    for (const Segment *segment = segments; segment < segments + count; segment++) {
        const unsigned char *source = (const unsigned char *)(source_at +
            (uintptr_t)(segment->source_page * pair->source_page_stride + segment->source_row * pair->source_row_stride));
        unsigned char *target = (unsigned char *)(target_at +
            (uintptr_t)(segment->target_page * pair->target_page_stride + segment->target_row * pair->target_row_stride));
        int64_t pieces = together ? 1 : segment->count;
        size_t bytes = (size_t)(together ? segment->count * pair->bytes : pair->bytes);
        for (int64_t at = 0; at < pieces; at++) {
            if (!stretch(batch, target, source, bytes)) return 0;
            source += pair->source_row_stride;
            target += pair->target_row_stride;
        }
    }
    return 1;
}

/* Whether the planes of a target row are adjacent. Pairs ascend by target. */
static int woven(const Pair *pairs, int64_t pair_count) {
    return pair_count > 1 && pairs[1].target_base - pairs[0].target_base < pairs[0].target_row_stride;
}

/* Copies every run of every pair. A page size is a power of two.
 *
 * source_at and target_at are added to the pairs' bases. `streams` is at most pdtransfer_streams(), 0 for ordinary
 * stores. Returns 1 when everything is copied, or 0 if *cancel was set; then some rows may be copied. No store is pending
 * on return. The caller has checked all slots, and that no run crosses a page where that matters. */
EXPORT int32_t pdtransfer_copy(const Pair *pairs, int64_t pair_count, const Run *runs, int64_t run_count,
                               int64_t source_page_size, int64_t target_page_size, uint64_t source_at,
                               uint64_t target_at, int32_t streams, const uint32_t *cancel) {
    Segment segments[TILE_RUNS];
    Batch batch;
    batch.count = 0;
    batch.bytes = 0;
    batch.turn_bytes = 0;
    batch.store = store_of(streams);
    batch.cancel = cancel;
    int source_shift = __builtin_ctzll((unsigned long long)source_page_size);
    int target_shift = __builtin_ctzll((unsigned long long)target_page_size);
    int64_t run = 0, done = 0; /* the next row is the run's row `done` */
    int complete = 1, most = woven(pairs, pair_count) ? TILE_RUNS_WOVEN : TILE_RUNS;
    while (complete && run < run_count) {
        int count = 0;
        int64_t rows = 0;
        while (run < run_count && count < most) {
            int64_t part = runs[run].count - done;
            /* Short runs fill a tile with many rows. A tile of TILE_ROWS rows takes no further long run. */
            if (part >= LONG_RUN_ROWS && part > TILE_ROWS - rows) part = TILE_ROWS - rows;
            if (part <= 0) break;
            int64_t source = runs[run].source_start + done, target = runs[run].target_start + done;
            Segment *segment = &segments[count++];
            segment->source_page = source >> source_shift;
            segment->source_row = (int32_t)(source & (source_page_size - 1));
            segment->target_page = target >> target_shift;
            segment->target_row = (int32_t)(target & (target_page_size - 1));
            segment->count = part;
            rows += part, done += part;
            if (done == runs[run].count) done = 0, run++;
        }
        for (int64_t at = 0; complete && at < pair_count; at++)
            complete = plane(&batch, &pairs[at], segments, count, (uintptr_t)source_at, (uintptr_t)target_at);
    }
    if (complete) complete = flush(&batch);
#if defined(__x86_64__)
    _mm_sfence(); /* orders streaming stores, so that a reader that learns of the copy sees them */
#endif
    return complete;
}
