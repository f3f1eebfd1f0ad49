/* The launches of set_mla.h, one for each width of access, and one that moves rows by bulk copies (sm_90 and later). */
#include "set_mla.h"

#define SET(NAME, UNIT, HELD)                                                                                          \
    extern "C" __global__ void __launch_bounds__(1024, 1) NAME(const __grid_constant__ SetMla set) {                 \
        follow();                                                                                                      \
        lead();                                                                                                        \
        set_rows<UNIT, HELD>(set, blockIdx.x, threadIdx.x, threadIdx.y, blockDim.x, blockDim.y);                       \
    }
SET(set_mla_16x1, Bytes16, 1)
SET(set_mla_16x2, Bytes16, 2)
SET(set_mla_16x4, Bytes16, 4)
SET(set_mla_8x4, uint64_t, 4)
SET(set_mla_4x4, uint32_t, 4)
SET(set_mla_1x4, unsigned char, 4)

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t shared_address(const void *at) { return (uint32_t)__cvta_generic_to_shared(at); }

/* A thread a row: bulk copies bring its two parts side by side into shared memory, and one takes it to its slot.
 * Widths, strides and addresses are multiples of 16; units are bytes here. */
extern "C" __global__ void set_mla_bulk(const __grid_constant__ SetMla set) {
    extern __shared__ __align__(128) char rows[];
    __shared__ uint64_t arrived;
    int32_t row = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    int32_t rope_bytes = set.units - set.nope_units;
    uint32_t barrier = shared_address(&arrived), place = shared_address(rows + (int64_t)threadIdx.x * set.units);
    int32_t here = set.rows - (int32_t)(blockIdx.x * blockDim.x);
    if (here > (int32_t)blockDim.x) here = (int32_t)blockDim.x;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(here * set.units)
                     : "memory");
    }
    __syncthreads();
    follow();
    lead();
    int64_t slot = -1;
    if (row < set.rows) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(place),
                     "l"(set.nope + row * set.nope_stride), "r"(set.nope_units), "r"(barrier)
                     : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         place + set.nope_units),
                     "l"(set.rope + row * set.rope_stride), "r"(rope_bytes), "r"(barrier)
                     : "memory");
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
        /* Shared memory has to stay until it is read. */
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
}
#endif
