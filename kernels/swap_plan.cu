/* The launches of swap_plan.h: one block for each request, with any whole number of warps. */
#include "swap_plan.h"

/* The exclusive prefix sum of `own` over threads, and the total. Both hold two 16-bit sums. Synchronises the block. */
__device__ __forceinline__ int32_t sum_before(int32_t own, int32_t *sums, int32_t *total) {
    int32_t lane = (int32_t)threadIdx.x & 31, warp = (int32_t)threadIdx.x >> 5, warps = (int32_t)blockDim.x >> 5;
    int32_t sum = own;
    UNROLLED for (int32_t step = 1; step < 32; step <<= 1) {
        int32_t other = __shfl_up_sync(0xFFFFFFFF, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int32_t theirs = lane < warps ? sums[lane] : 0;
    *total = (int32_t)__reduce_add_sync(0xFFFFFFFF, (uint32_t)theirs);
    return (int32_t)__reduce_add_sync(0xFFFFFFFF, (uint32_t)(lane < warp ? theirs : 0)) + sum - own;
}

template <int32_t TOP_EACH, int32_t HOT_EACH> __device__ __forceinline__ void plan(const Swap &swap) {
    extern __shared__ __align__(16) int32_t memory[];
    __shared__ int32_t sums[32];
    uint32_t request = blockIdx.x, thread = threadIdx.x, threads = blockDim.x;
    Swapping step = start_step(swap, memory);
    Own<TOP_EACH, HOT_EACH> own;
    lead();
    clear(swap, step, thread, threads);
    follow();
    read_positions(swap, own, request, thread);
    look(swap, step, request);
    if (!step.real || step.direct) {
        __syncthreads();
        answer_direct(swap, step, request, thread, threads);
        __syncthreads();
        if (thread == 0) begin_list(swap, step, 0, 0, claim_list(swap, step, 0, 0), gridDim.x);
        return;
    }
    read_tables(swap, step, own, thread);
    __syncthreads();
    ask(swap, step, own, thread);
    __syncthreads();
    find_held(swap, step, own, thread);
    __syncthreads();
    find_missing(swap, step, own, thread);
    int32_t total, before = sum_before(counted(swap, own, thread), sums, &total);
    bool brought = brings(swap, total, threads);
    int32_t listed = brought ? 0 : misses_of(total);
    uint64_t claimed = 0; /* used after the answers, since the atomic has a long latency */
    if (thread == 0) claimed = claim_list(swap, step, total, listed);
    reorder(swap, step, own, before, total, brought, thread);
    __syncthreads();
    if (brought) bring(swap, step, total, thread, threads);
    answer(swap, step, own, total, request, thread);
    write_order(swap, step, thread, threads);
    if (thread == 0) begin_list(swap, step, total, listed, claimed, gridDim.x);
    if (!misses_of(total)) return;
    __syncthreads();
    list(swap, step, own, before, brought);
}

#define PLAN(NAME, TOP_EACH, HOT_EACH)                                                                                 \
    extern "C" __global__ void __launch_bounds__(1024, 1) NAME(const __grid_constant__ Swap swap) {                  \
        plan<TOP_EACH, HOT_EACH>(swap);                                                                                \
    }
PLAN(swap_plan_2x4, 2, 4)
PLAN(swap_plan_4x16, 4, 16)
