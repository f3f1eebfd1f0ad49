/* The launch of hot_row.h. */
#include "hot_row.h"

extern "C" __global__ void hot_row(const __grid_constant__ HotRow set) {
    lead();
    follow();
    set_row(set, (int64_t)blockIdx.x * blockDim.x + threadIdx.x, (int64_t)gridDim.x * blockDim.x);
}
