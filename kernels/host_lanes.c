/* Queues a ring's works without Python, which is slower and would hold the interpreter.
 *
 * One stream is for kernels, the other for the copy engine. A work's second part waits for its first, and its first part
 * waits for the previous work in its slot. All works run between the earlier and the later work of a third stream,
 * except an opening launch, which copies the works' input and waits for nothing. At most `event_count` works are
 * pending, so that a cancel word stops all others.
 *
 * Valid C and C++. The caller passes the driver's functions, so nothing links with the driver. */
#define _POSIX_C_SOURCE 199309L
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#if defined(__cplusplus)
#define EXTERN extern "C" __attribute__((visibility("default")))
#else
#define EXTERN __attribute__((visibility("default")))
#endif

/* As in <cuda.h>. */
struct Calls {
    int (*set_context)(void *context);
    int (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared_bytes, void *stream, void **arguments, void **extra);
    int (*copy)(uint64_t target, uint64_t source, size_t bytes, void *stream);
    int (*batch)(const uint64_t *targets, const uint64_t *sources, const size_t *sizes, size_t count, void *attributes,
                 size_t *firsts, size_t attribute_count, size_t *failed, void *stream); /* may be null */
    int (*record)(void *event, void *stream);
    int (*follow)(void *stream, void *event, unsigned flags);
    int (*query)(void *event);
    int (*copy_rows)(const void *rows, void *stream); /* CUDA_MEMCPY2D */
};

/* CUDA_MEMCPY2D of <cuda.h>. */
struct Rows {
    size_t source_x, source_y;
    int32_t source_kind;
    const void *source_host;
    uint64_t source;
    void *source_array;
    size_t source_pitch;
    size_t target_x, target_y;
    int32_t target_kind;
    void *target_host;
    uint64_t target;
    void *target_array;
    size_t target_pitch;
    size_t width, count;
};
enum { UNIFIED = 4 };

enum { NOT_READY = 600, POLL_NANOSECONDS = 20000, NAP_MAX_NANOSECONDS = 100000, WAITED_PER_NAP = 256 };

/* Kernel rows, then copy engine runs; a fetch reverses the order. Either may be empty. */
struct Work {
    int64_t argument; /* index in `arguments`; negative: none */
    int64_t blocks;
    int64_t first_run, end_run;
};

struct Lanes {
    const struct Calls *calls;
    void *context, *function;
    void *rows_stream, *runs_stream;
    void **halves, **wholes; /* each work's events: its first part is done, the whole work is done */
    const uint32_t *cancel;  /* may be null */
    char *arguments;
    const struct Work *works;
    const uint64_t *sources, *targets, *sizes;
    const uint64_t *source_pitches, *target_pitches, *counts; /* null if runs are contiguous */
    void *attributes; /* CUmemcpyAttributes of a batch */
    void *stream, *fork, *rows_join, *runs_join; /* the third stream, and events that order it */
    void *opening;                               /* an argument; may be null */
    int64_t opening_blocks;
    int64_t slots, event_count, work_count, argument_bytes, threads, fetch;
    int64_t first_turn; /* works queued before this call; their slots and events are waited for, too */
    /* results */
    int64_t queued; /* works; the last may be incomplete if `status` is not 0 */
    int32_t status; /* of the call that failed, or 0 */
    int32_t cancelled;
};

/* Waits by polling, since an event that wakes its waiter delays its stream. */
static int reach(const struct Calls *calls, void *event) {
    const struct timespec pause = {0, POLL_NANOSECONDS};
    int status;
    while ((status = calls->query(event)) == NOT_READY) nanosleep(&pause, NULL);
    return status;
}

/* Each run is `counts` rows of `sizes` bytes, with a pitch on each side. */
static int queue_strided(const struct Lanes *lanes, const struct Work *work, void *stream) {
    struct Rows rows;
    memset(&rows, 0, sizeof rows);
    rows.source_kind = rows.target_kind = UNIFIED;
    for (int64_t at = work->first_run; at < work->end_run; at++) {
        rows.source = lanes->sources[at], rows.source_pitch = lanes->source_pitches[at];
        rows.target = lanes->targets[at], rows.target_pitch = lanes->target_pitches[at];
        rows.width = lanes->sizes[at], rows.count = lanes->counts[at];
        int status = lanes->calls->copy_rows(&rows, stream);
        if (status) return status;
    }
    return 0;
}

static int queue_runs(const struct Lanes *lanes, const struct Work *work, void *stream) {
    if (lanes->counts) return queue_strided(lanes, work, stream);
    int64_t count = work->end_run - work->first_run;
    if (count > 1 && lanes->calls->batch) {
        size_t first = 0, failed = 0;
        return lanes->calls->batch(lanes->targets + work->first_run, lanes->sources + work->first_run,
                                   (const size_t *)lanes->sizes + work->first_run, (size_t)count, lanes->attributes, &first, 1,
                                   &failed, stream);
    }
    for (int64_t at = work->first_run; at < work->end_run; at++) {
        int status = lanes->calls->copy(lanes->targets[at], lanes->sources[at], (size_t)lanes->sizes[at], stream);
        if (status) return status;
    }
    return 0;
}

static int launch(const struct Lanes *lanes, void *argument, int64_t blocks, void *stream) {
    return lanes->calls->launch(lanes->function, (unsigned)blocks, 1, 1, (unsigned)lanes->threads, 1, 1, 0, stream, &argument,
                                NULL);
}

static int queue_rows(const struct Lanes *lanes, const struct Work *work, void *stream) {
    if (work->argument < 0) return 0;
    return launch(lanes, lanes->arguments + work->argument * lanes->argument_bytes, work->blocks, stream);
}

/* A work's slot is free once the previous work in that slot is done. */
static int queue_work(const struct Lanes *lanes, const struct Work *work, int64_t turn) {
    const struct Calls *calls = lanes->calls;
    void *first = lanes->fetch ? lanes->runs_stream : lanes->rows_stream;
    void *second = lanes->fetch ? lanes->rows_stream : lanes->runs_stream;
    void *half = lanes->halves[turn % lanes->event_count], *whole = lanes->wholes[turn % lanes->event_count];
    int status = 0;
    if (turn >= lanes->slots) status = calls->follow(first, lanes->wholes[(turn - lanes->slots) % lanes->event_count], 0);
    if (!status) status = lanes->fetch ? queue_runs(lanes, work, first) : queue_rows(lanes, work, first);
    if (!status) status = calls->record(half, first);
    if (!status) status = calls->follow(second, half, 0);
    if (!status) status = lanes->fetch ? queue_rows(lanes, work, second) : queue_runs(lanes, work, second);
    return status ? status : calls->record(whole, second);
}

static int open_lanes(const struct Lanes *lanes) {
    const struct Calls *calls = lanes->calls;
    int status = calls->set_context(lanes->context);
    if (!status) status = calls->record(lanes->fork, lanes->stream);
    if (!status && lanes->opening) status = launch(lanes, lanes->opening, lanes->opening_blocks, lanes->rows_stream);
    if (!status) status = calls->follow(lanes->rows_stream, lanes->fork, 0);
    return status ? status : calls->follow(lanes->runs_stream, lanes->fork, 0);
}

static int close_lanes(const struct Lanes *lanes) {
    const struct Calls *calls = lanes->calls;
    int status = calls->record(lanes->rows_join, lanes->rows_stream);
    if (!status) status = calls->record(lanes->runs_join, lanes->runs_stream);
    if (!status) status = calls->follow(lanes->stream, lanes->rows_join, 0);
    return status ? status : calls->follow(lanes->stream, lanes->runs_join, 0);
}

static void queue_works(struct Lanes *lanes) {
    const struct Calls *calls = lanes->calls;
    for (int64_t at = 0; at < lanes->work_count && !lanes->status; at++) {
        int64_t turn = lanes->first_turn + at;
        if (turn >= lanes->event_count) lanes->status = reach(calls, lanes->wholes[turn % lanes->event_count]);
        if (lanes->status) return;
        if (lanes->cancel && *(const volatile uint32_t *)lanes->cancel) {
            lanes->cancelled = 1;
            return;
        }
        lanes->queued = at + 1;
        lanes->status = queue_work(lanes, lanes->works + at, turn);
    }
}

EXTERN void pdtransfer_lanes(struct Lanes *lanes) {
    lanes->queued = 0, lanes->cancelled = 0;
    lanes->status = open_lanes(lanes);
    if (!lanes->status) queue_works(lanes);
    if (!lanes->status) lanes->status = close_lanes(lanes);
}

struct Await {
    const struct Calls *calls;
    void *context;
    void **events;
    const uint32_t *called; /* ends the wait if not 0; null: poll once */
    int64_t count;
    int64_t until; /* deadline in ns of CLOCK_MONOTONIC */
    /* results */
    int64_t passed; /* the index of the passed event, or -1 */
    int32_t status; /* of the query that failed, or 0 */
    int32_t unused;
};

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* Sleeps until an event has passed, `called` is set, or the deadline is reached. Naps grow with the time that has been
 * waited, since each costs CPU. A small timer slack keeps them short. */
EXTERN void pdtransfer_await(struct Await *await) {
    prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
    const int64_t began = now();
    struct timespec pause = {0, POLL_NANOSECONDS};
    await->status = await->calls->set_context(await->context);
    for (await->passed = await->status ? 0 : -1; !await->status; nanosleep(&pause, NULL)) {
        for (int64_t at = 0; at < await->count; at++) {
            int status = await->calls->query(await->events[at]);
            if (status == NOT_READY) continue;
            await->passed = at, await->status = status;
            return;
        }
        const int64_t time = now(), nap = (time - began) / WAITED_PER_NAP;
        if (!await->called || *(const volatile uint32_t *)await->called || time >= await->until) return;
        pause.tv_nsec = nap < POLL_NANOSECONDS ? POLL_NANOSECONDS : nap < NAP_MAX_NANOSECONDS ? nap : NAP_MAX_NANOSECONDS;
    }
}
