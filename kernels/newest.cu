/* The launch of newest.h: one thread for each request. */
#include "newest.h"

extern "C" __global__ void newest(const __grid_constant__ Newest newest) {
    lead();
    follow();
    find_newest(newest, blockIdx.x * blockDim.x + threadIdx.x);
}
