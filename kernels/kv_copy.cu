/* The launch of kv_copy.h: few blocks, which leave multiprocessors to the model's kernels, of threads with many registers. */
#include "kv_copy.h"

extern "C" __global__ void __launch_bounds__(512, 1) kv_copy(const __grid_constant__ Copy copy) {
    __shared__ Block block;
    if (threadIdx.x == 0) block = {};
    __syncthreads();
    copy_items(copy, &block, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);
    if (threadIdx.x == 0) end_fetch(&block.cancel); /* nothing may arrive after the block has ended */
    if (!copy.progress) return;
    __syncthreads();
    if (threadIdx.x == 0) end_block(copy, &block, gridDim.x);
}
