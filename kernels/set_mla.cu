/* The launches of set_mla.h: one for each access width, and bulk copies for sm_90 and later. */
#include "set_mla.h"

#define SET(NAME, UNIT, HELD)                                                                                          \
    extern "C" __global__ void __launch_bounds__(1024, 1) NAME(const __grid_constant__ SetMla set) {                 \
        follow();                                                                                                      \
        lead();                                                                                                        \
        set_rows<UNIT, HELD>(set, blockIdx.x, threadIdx.x, threadIdx.y, blockDim.x, blockDim.y);                       \
    }
SET(set_mla_16x2, Bytes16, 2)
SET(set_mla_16x4, Bytes16, 4)
SET(set_mla_8x4, uint64_t, 4)
SET(set_mla_4x4, uint32_t, 4)
SET(set_mla_1x4, unsigned char, 4)

extern "C" __global__ void __launch_bounds__(1024, 1) set_mla_16x1(const __grid_constant__ SetMla set) {
    set_row<Bytes16>(set, blockIdx.x, threadIdx.x, threadIdx.y, blockDim.y);
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t shared_address(const void *at) { return (uint32_t)__cvta_generic_to_shared(at); }

#define BULK "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"

template <bool HINTED>
__device__ __forceinline__ void bring(uint32_t to, const char *from, int32_t bytes, uint32_t barrier, uint64_t policy) {
    if (HINTED)
        asm volatile(BULK ".L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                     : "memory");
    else asm volatile(BULK " [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

/* One thread for each row: bulk copies load its two parts into shared memory, and one bulk copy stores it. EARLY
 * prefetches the rows into the L2 before the previous launch has ended (the L2 sees that launch's later stores), and
 * evicts them first once they are read. Widths, strides and addresses are multiples of 16; units are bytes. */
template <bool EARLY> __device__ __forceinline__ void set_bulk(const SetMla &set) {
    extern __shared__ __align__(128) char rows[];
    __shared__ uint64_t arrived;
    int32_t row = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    int32_t rope_bytes = set.units - set.nope_units;
    uint32_t barrier = shared_address(&arrived), place = shared_address(rows + (int64_t)threadIdx.x * set.units);
    int32_t here = set.rows - (int32_t)(blockIdx.x * blockDim.x);
    if (here > (int32_t)blockDim.x) here = (int32_t)blockDim.x;
    const char *nope = set.nope + row * set.nope_stride, *rope = set.rope + row * set.rope_stride;
    if (EARLY && row < set.rows) {
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(nope), "r"(set.nope_units) : "memory");
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(rope), "r"(rope_bytes) : "memory");
    }
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(here));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    uint64_t policy = 0;
    if (EARLY) asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    follow();
    lead();
    int64_t slot = -1;
    if (row < set.rows) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(set.units) : "memory");
        bring<EARLY>(place, nope, set.nope_units, barrier, policy);
        bring<EARLY>(place + set.nope_units, rope, rope_bytes, barrier, policy);
        slot = slot_of(set, row);
    }
    uint32_t done = 0;
    while (!done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(barrier)
                     : "memory");
    if (slot >= 0 && slot < set.slots && slot != set.skip) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(set.buffer + slot * set.buffer_stride),
                     "r"(place), "r"(set.units)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        /* Shared memory must stay until the bulk copy has read it. */
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
}

extern "C" __global__ void set_mla_bulk(const __grid_constant__ SetMla set) { set_bulk<false>(set); }
extern "C" __global__ void set_mla_early(const __grid_constant__ SetMla set) { set_bulk<true>(set); }
#endif
