/* Queues works of a card to lanes, each a stream and a slot of a ring, without Python: a work takes 10 us here and 60
 * there, and the engine's other threads want the interpreter. Lane after lane gets one work. There is an event after every
 * few, since each takes the copy engine a microsecond; when all events are pending the oldest is waited for, so that a
 * cancel word stops all but what is queued by then.
 *
 * C that is C++ as well. The driver's functions are handed in: nothing here is linked with them. */
#define _POSIX_C_SOURCE 199309L
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#if defined(__cplusplus)
#define EXTERN extern "C" __attribute__((visibility("default")))
#else
#define EXTERN __attribute__((visibility("default")))
#endif

/* As <cuda.h> has them. */
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
};

enum { NOT_READY = 600, POLL_NANOSECONDS = 20000 };

/* Rows between two places by the kernel, runs by the copy engine, or both in this order; the reverse in a fetch. */
struct Work {
    int64_t argument; /* which of `arguments`; none where it is negative */
    int64_t blocks;
    int64_t first_run, end_run;
};

struct Lanes {
    const struct Calls *calls;
    void *context, *function;
    void **streams, **events;
    const uint32_t *cancel; /* may be null */
    char *arguments;
    const struct Work *works;
    const uint64_t *sources, *targets, *sizes;
    void *attributes; /* of a batch: CUmemcpyAttributes */
    int64_t lanes, event_count, every, work_count, argument_bytes, threads, fetch; /* an event after `every` works */
    /* answers */
    int64_t queued; /* works, of which the last may be there in part where `status` is not 0 */
    int32_t status; /* of the call that failed: 0 if none did */
    int32_t cancelled;
};

/* Waits as this does and not by an event that wakes its waiter: each of those holds its stream up for 6 us. */
static int reach(const struct Calls *calls, void *event) {
    const struct timespec pause = {0, POLL_NANOSECONDS};
    int status;
    while ((status = calls->query(event)) == NOT_READY) nanosleep(&pause, NULL);
    return status;
}

static int queue_runs(const struct Lanes *lanes, const struct Work *work, void *stream) {
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

static int queue_rows(const struct Lanes *lanes, const struct Work *work, void *stream) {
    void *argument = lanes->arguments + work->argument * lanes->argument_bytes;
    if (work->argument < 0) return 0;
    return lanes->calls->launch(lanes->function, (unsigned)work->blocks, 1, 1, (unsigned)lanes->threads, 1, 1, 0, stream,
                                &argument, NULL);
}

static int queue_work(const struct Lanes *lanes, const struct Work *work, void *stream) {
    int status = lanes->fetch ? queue_runs(lanes, work, stream) : queue_rows(lanes, work, stream);
    if (status) return status;
    return lanes->fetch ? queue_rows(lanes, work, stream) : queue_runs(lanes, work, stream);
}

/* Lanes that get a work wait for `fork` first. */
EXTERN void pdtransfer_lanes(struct Lanes *lanes, void *fork) {
    const struct Calls *calls = lanes->calls;
    lanes->queued = 0, lanes->cancelled = 0;
    lanes->status = calls->set_context(lanes->context);
    for (int64_t turn = 0; turn < lanes->work_count && !lanes->status; turn++) {
        void *stream = lanes->streams[turn % lanes->lanes];
        void *event = lanes->events[turn / lanes->every % lanes->event_count];
        if (turn < lanes->lanes) lanes->status = calls->follow(stream, fork, 0);
        if (turn % lanes->every == 0 && turn >= lanes->every * lanes->event_count) lanes->status = reach(calls, event);
        if (lanes->status) return;
        if (lanes->cancel && *(const volatile uint32_t *)lanes->cancel) {
            lanes->cancelled = 1;
            return;
        }
        lanes->queued = turn + 1;
        lanes->status = queue_work(lanes, lanes->works + turn, stream);
        if (!lanes->status && (turn + 1) % lanes->every == 0) lanes->status = calls->record(event, stream);
    }
}

EXTERN uint32_t pdtransfer_abi(void) { return 1; }
