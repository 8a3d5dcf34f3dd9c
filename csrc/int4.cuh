// int4.cuh: INT4 quantization on a GPU: each thread quantizes a group, with the same functions as the CPU.
#pragma once

#include "device.cuh"
#include "int4.h"

namespace slimx {

// Sets bit 0 of `flags` if a group contains a value that is not finite.
template <class T>
__global__ void __launch_bounds__(kThreads) int4_round(SlimxInt4 m, uint32_t* __restrict__ flags) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x; index < m.rows * m.groups; index += step)
    if (slimx_int4_at<T>(m, index)) or_to(flags, 1u);
}

}  // namespace slimx
