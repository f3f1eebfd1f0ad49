/* The launch of swap_plan.h: one block a request, of any whole number of warps. */
#include "swap_plan.h"

/* counts[] becomes what is before each thread, and counts[threads] the total: of two 16-bit sums at once. */
__device__ __forceinline__ void sum_before(int32_t *counts, int32_t *warps) {
    int32_t lane = (int32_t)threadIdx.x & 31, warp = (int32_t)threadIdx.x >> 5, warp_count = (int32_t)blockDim.x >> 5;
    int32_t own = counts[threadIdx.x], sum = own;
    for (int32_t step = 1; step < 32; step <<= 1) {
        int32_t other = __shfl_up_sync(0xFFFFFFFF, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        int32_t total = lane < warp_count ? warps[lane] : 0;
        for (int32_t step = 1; step < 32; step <<= 1) {
            int32_t other = __shfl_up_sync(0xFFFFFFFF, total, step);
            if (lane >= step) total += other;
        }
        warps[lane] = total;
    }
    __syncthreads();
    counts[threadIdx.x] = sum - own + (warp ? warps[warp - 1] : 0);
    if (threadIdx.x == blockDim.x - 1) counts[blockDim.x] = counts[threadIdx.x] + own;
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(1024, 1) swap_plan(const __grid_constant__ Swap swap) {
    extern __shared__ int32_t memory[];
    __shared__ int32_t warps[32];
    uint32_t request = blockIdx.x, thread = threadIdx.x, threads = blockDim.x;
    follow();
    lead();
    Swapping step = start_step(swap, request, memory, threads);
    if (thread == 0) step.words[REFUSED] = 0;
    __syncthreads();
    if (!step.real || step.direct) {
        answer_direct(swap, step, request, thread, threads);
        __syncthreads();
        if (thread == 0) claim_list(swap, step, 0, gridDim.x);
        return;
    }
    fetch(swap, step, request, thread, threads);
    __syncthreads();
    ask(swap, step, thread, threads);
    __syncthreads();
    find_held(swap, step, thread, threads);
    __syncthreads();
    step.counts[thread] = count_share(swap, step, thread, threads);
    __syncthreads();
    sum_before(step.counts, warps);
    int32_t before = step.counts[thread], total = step.counts[threads];
    if (thread == 0) claim_list(swap, step, total, gridDim.x);
    reorder(swap, step, before, total, thread, threads);
    __syncthreads();
    fill(swap, step, before, total, thread, threads);
    __syncthreads();
    answer(swap, step, request, thread, threads);
}
