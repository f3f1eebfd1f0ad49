/* Sums the hashes of rows in this process's memory: XXH64 of every head of every row, as proto/v1 defines it.
 *
 * Valid C and C++, built without -march like host_copy.c: AVX-512 is chosen at run time. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read as they lie: on a big-endian host numpy sums"
#endif

#ifdef __cplusplus
#define EXPORT extern "C" __attribute__((visibility("default")))
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#define P1 0x9E3779B185EBCA87ULL
#define P2 0xC2B2AE3D27D4EB4FULL
#define P3 0x165667B19E3779F9ULL
#define P4 0x85EBCA77C2B2AE63ULL
#define P5 0x27D4EB2F165667C5ULL

enum {
    ITEMS = 8,  /* hashed together, since a single hash waits for its multiplications */
    SLICE_RUNS = 512,
    STRIPE = 32
};
#define AHEAD ((size_t)2048) /* bytes of an item to prefetch; then the hardware prefetches */
#define LINE_BYTES 64

/* The heads of one plane, adjacent in each row. The seed of head h is seeds[first_seed + h]. */
typedef struct {
    int64_t base, page_stride, row_stride;
    int64_t heads, head_bytes, first_seed;
} Line;

/* Slots slot .. slot + count - 1 hold the room's rows row .. row + count - 1. */
typedef struct {
    int64_t slot, row, count;
} Run;

/* As in host_copy.c. */
typedef struct {
    int64_t source_start, target_start, count;
} PlanRun;

typedef int32_t (*Copy)(const void *pairs, int64_t pair_count, const PlanRun *runs, int64_t run_count,
                        int64_t source_page_size, int64_t target_page_size, uint64_t source_at, uint64_t target_at,
                        int32_t streams, const uint32_t *cancel);

typedef struct {
    const unsigned char *at;
    size_t bytes;
    uint64_t seed;
} Item;

typedef uint64_t (*Hashes)(const Item *items, int count);

typedef struct {
    Item items[2][ITEMS]; /* one batch is hashed while the other is prefetched */
    int filling, count, waiting;
    uint64_t sum;
    Hashes hashes;
    const volatile uint32_t *cancel;
} Batch;

static inline uint64_t word64(const unsigned char *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

static inline uint32_t word32(const unsigned char *at) {
    uint32_t word;
    memcpy(&word, at, 4);
    return word;
}

static inline uint64_t rotl(uint64_t value, int by) { return (value << by) | (value >> (64 - by)); }

static inline uint64_t round_of(uint64_t lane, uint64_t word) { return rotl(lane + word * P2, 31) * P1; }

static inline uint64_t merged(uint64_t hash, uint64_t lane) { return (hash ^ round_of(0, lane)) * P1 + P4; }

static inline uint64_t avalanche(uint64_t hash) {
    hash = (hash ^ (hash >> 33)) * P2;
    hash = (hash ^ (hash >> 29)) * P3;
    return hash ^ (hash >> 32);
}

/* The seed of one head's row: XXH64 of the row's index as a little-endian u64, with the head's seed. */
static inline uint64_t seed_of(uint64_t head_seed, uint64_t row) {
    uint64_t hash = (head_seed + P5 + 8) ^ round_of(0, row);
    return avalanche(rotl(hash, 27) * P1 + P4);
}

/* Hashes the bytes after the last whole stripe; `hash` includes the stripes but not the length. */
static uint64_t finished(uint64_t hash, const unsigned char *at, size_t bytes) {
    size_t left = bytes & (STRIPE - 1);
    hash += bytes;
    at += bytes - left;
    for (; left >= 8; left -= 8, at += 8) hash = rotl(hash ^ round_of(0, word64(at)), 27) * P1 + P4;
    if (left >= 4) {
        hash = rotl(hash ^ ((uint64_t)word32(at) * P1), 23) * P2 + P3;
        at += 4, left -= 4;
    }
    for (; left; left--, at++) hash = rotl(hash ^ ((uint64_t)*at * P5), 11) * P1;
    return avalanche(hash);
}

static inline uint64_t joined(const uint64_t *lanes) {
    uint64_t hash = rotl(lanes[0], 1) + rotl(lanes[1], 7) + rotl(lanes[2], 12) + rotl(lanes[3], 18);
    for (int lane = 0; lane < 4; lane++) hash = merged(hash, lanes[lane]);
    return hash;
}

static uint64_t hash_of(const unsigned char *at, size_t bytes, uint64_t seed) {
    if (bytes < STRIPE) return finished(seed + P5, at, bytes);
    uint64_t lanes[4] = {seed + P1 + P2, seed + P2, seed, seed - P1};
    const unsigned char *end = at + (bytes & ~(size_t)(STRIPE - 1));
    for (const unsigned char *stripe = at; stripe < end; stripe += STRIPE)
        for (int lane = 0; lane < 4; lane++) lanes[lane] = round_of(lanes[lane], word64(stripe + 8 * lane));
    return finished(joined(lanes), at, bytes);
}

static uint64_t hashes_plain(const Item *items, int count) {
    uint64_t sum = 0;
    for (int at = 0; at < count; at++) sum += hash_of(items[at].at, items[at].bytes, items[at].seed);
    return sum;
}

#if defined(__x86_64__)
#define WIDE __attribute__((target("avx512f,avx512dq")))

WIDE static inline __m512i two(uint64_t first, uint64_t second) {
    return _mm512_set_epi64((long long)(second - P1), (long long)second, (long long)(second + P2),
                            (long long)(second + P1 + P2), (long long)(first - P1), (long long)first,
                            (long long)(first + P2), (long long)(first + P1 + P2));
}

WIDE static inline __m512i stripes(const unsigned char *first, const unsigned char *second) {
    __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)first);
    __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)second);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

WIDE static inline __m512i rounds_of(__m512i lanes, __m512i words) {
    __m512i sum = _mm512_add_epi64(lanes, _mm512_mullo_epi64(words, _mm512_set1_epi64((long long)P2)));
    return _mm512_mullo_epi64(_mm512_rol_epi64(sum, 31), _mm512_set1_epi64((long long)P1));
}

/* Two items of equal length in each register, four registers in flight. */
WIDE static uint64_t hashes_avx512(const Item *items, int count) {
    size_t bytes = items[0].bytes;
    int equal = count == ITEMS && bytes >= STRIPE;
    for (int at = 1; equal && at < count; at++) equal = items[at].bytes == bytes;
    if (!equal) return hashes_plain(items, count);
    __m512i a = two(items[0].seed, items[1].seed), b = two(items[2].seed, items[3].seed);
    __m512i c = two(items[4].seed, items[5].seed), d = two(items[6].seed, items[7].seed);
    size_t end = bytes & ~(size_t)(STRIPE - 1);
    for (size_t at = 0; at < end; at += STRIPE) {
        a = rounds_of(a, stripes(items[0].at + at, items[1].at + at));
        b = rounds_of(b, stripes(items[2].at + at, items[3].at + at));
        c = rounds_of(c, stripes(items[4].at + at, items[5].at + at));
        d = rounds_of(d, stripes(items[6].at + at, items[7].at + at));
    }
    uint64_t lanes[ITEMS][4], sum = 0;
    _mm512_storeu_si512((void *)lanes[0], a);
    _mm512_storeu_si512((void *)lanes[2], b);
    _mm512_storeu_si512((void *)lanes[4], c);
    _mm512_storeu_si512((void *)lanes[6], d);
    for (int at = 0; at < ITEMS; at++) sum += finished(joined(lanes[at]), items[at].at, bytes);
    return sum;
}
#endif

/* Whether this CPU and its kernel support AVX-512. */
EXPORT int32_t pdtransfer_checksum_wide(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
#else
    return 0;
#endif
}

static int flush(Batch *batch) {
    if (batch->cancel && *batch->cancel) return 0;
    if (batch->waiting) batch->sum += batch->hashes(batch->items[!batch->filling], batch->waiting);
    batch->waiting = batch->count;
    batch->filling = !batch->filling;
    batch->count = 0;
    return 1;
}

static inline int take(Batch *batch, const unsigned char *at, size_t bytes, uint64_t seed) {
    size_t early = bytes < AHEAD ? bytes : AHEAD;
    for (size_t line = 0; line < early; line += LINE_BYTES) __builtin_prefetch(at + line, 0, 3);
    Item *item = &batch->items[batch->filling][batch->count++];
    item->at = at;
    item->bytes = bytes;
    item->seed = seed;
    return batch->count < ITEMS || flush(batch);
}

/* One row of one plane, head by head. */
static inline int row_of(Batch *batch, const Line *line, const uint64_t *seeds, uintptr_t at, int64_t page, int64_t slot,
                         uint64_t row) {
    const unsigned char *head =
        (const unsigned char *)(at + (uintptr_t)(line->base + page * line->page_stride + slot * line->row_stride));
    const uint64_t *seed = seeds + line->first_seed;
    for (int64_t number = 0; number < line->heads; number++, head += line->head_bytes)
        if (!take(batch, head, (size_t)line->head_bytes, seed_of(seed[number], row))) return 0;
    return 1;
}

typedef struct {
    const Line *lines;
    int64_t count;
    const uint64_t *seeds;
    int shift; /* of the page size */
    int64_t mask;
    uintptr_t at;
    int woven;
} Source;

static int rows_of(Batch *batch, const Source *source, const Run *runs, int64_t run_count) {
    int64_t outer = source->woven ? 1 : source->count, inner = source->woven ? source->count : 1;
    for (int64_t first = 0; first < outer; first++)
        for (const Run *run = runs; run < runs + run_count; run++)
            for (int64_t number = 0; number < run->count; number++) {
                int64_t slot = run->slot + number;
                for (int64_t line = first; line < first + inner; line++)
                    if (!row_of(batch, &source->lines[line], source->seeds, source->at, slot >> source->shift,
                                slot & source->mask, (uint64_t)(run->row + number)))
                        return 0;
            }
    return 1;
}

static Source source_of(const Line *lines, int64_t count, const uint64_t *seeds, int64_t page_size, uint64_t at,
                        int32_t woven) {
    Source source;
    source.lines = lines;
    source.count = count;
    source.seeds = seeds;
    source.shift = __builtin_ctzll((unsigned long long)page_size);
    source.mask = page_size - 1;
    source.at = (uintptr_t)at;
    source.woven = woven;
    return source;
}

static void begin(Batch *batch, int32_t wide, const uint32_t *cancel) {
    memset(batch, 0, sizeof *batch);
    batch->cancel = cancel;
    batch->hashes = hashes_plain;
#if defined(__x86_64__)
    if (wide && pdtransfer_checksum_wide()) batch->hashes = hashes_avx512;
#else
    (void)wide;
#endif
}

static int end(Batch *batch, uint64_t *sum) {
    if (!flush(batch) || !flush(batch)) return 0;
    *sum = batch->sum;
    return 1;
}

/* Adds up the hashes of every head of every line in every row of the runs, mod 2**64, into *sum.
 *
 * `at` is added to the lines' bases; a page size is a power of two. `wide` is at most pdtransfer_checksum_wide(). If the
 * lines of a slot are adjacent (`woven`), they are read row by row, else line by line. Returns 1 when everything is
 * summed, or 0 if *cancel was set. The caller has checked all slots. */
EXPORT int32_t pdtransfer_checksum(const Line *lines, int64_t line_count, const uint64_t *seeds, const Run *runs,
                                   int64_t run_count, int64_t page_size, uint64_t at, int32_t woven, int32_t wide,
                                   const uint32_t *cancel, uint64_t *sum) {
    Batch batch;
    Source source = source_of(lines, line_count, seeds, page_size, at, woven);
    begin(&batch, wide, cancel);
    return rows_of(&batch, &source, runs, run_count) && end(&batch, sum);
}

/* Sums the source rows of a plan while copying them, slice by slice, so that each slice is copied from the cache.
 *
 * `copy` is host_copy.c's pdtransfer_copy, followed by its arguments; `at` is the source's address. The first
 * run's first row is row `row` of the room; a slice is at most `slice_rows` rows. */
EXPORT int32_t pdtransfer_checksum_copy(const Line *lines, int64_t line_count, const uint64_t *seeds, int64_t page_size,
                                        uint64_t at, int32_t woven, int32_t wide, int64_t row, int64_t slice_rows,
                                        Copy copy, const void *pairs, int64_t pair_count, const PlanRun *runs,
                                        int64_t run_count, int64_t source_page_size, int64_t target_page_size,
                                        uint64_t target_at, int32_t streams, const uint32_t *cancel, uint64_t *sum) {
    Batch batch;
    Source source = source_of(lines, line_count, seeds, page_size, at, woven);
    Run summed[SLICE_RUNS];
    PlanRun copied[SLICE_RUNS];
    begin(&batch, wide, cancel);
    int64_t run = 0, done = 0; /* the next row is the run's row `done` */
    while (run < run_count) {
        int count = 0;
        for (int64_t left = slice_rows; left > 0 && run < run_count && count < SLICE_RUNS; count++) {
            int64_t part = runs[run].count - done < left ? runs[run].count - done : left;
            copied[count].source_start = summed[count].slot = runs[run].source_start + done;
            copied[count].target_start = runs[run].target_start + done;
            copied[count].count = summed[count].count = part;
            summed[count].row = row;
            row += part, left -= part, done += part;
            if (done == runs[run].count) done = 0, run++;
        }
        if (!rows_of(&batch, &source, summed, count)) return 0;
        if (!copy(pairs, pair_count, copied, count, source_page_size, target_page_size, at, target_at, streams, cancel))
            return 0;
    }
    return end(&batch, sum);
}
