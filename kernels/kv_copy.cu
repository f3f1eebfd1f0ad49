/* The launch of kv_copy.h: few blocks of many threads, which leave multiprocessors to the model's kernels. */
#include "kv_copy.h"

extern "C" __global__ void __launch_bounds__(1024, 1) kv_copy(const __grid_constant__ Copy copy) {
    __shared__ Block block;
    if (threadIdx.x == 0) block.stop = block.refused = 0;
    __syncthreads();
    copy_items(copy, &block, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);
    if (!copy.progress) return;
    __syncthreads();
    if (threadIdx.x == 0) end_block(copy, &block, gridDim.x);
}
