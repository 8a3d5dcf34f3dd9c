// device.cuh: what the CUDA kernels ask of the machine beyond C++: asynchronous loads, warp reductions, hardware casts.
//
// Every name that only a GPU has is in this file or is one of CUDA's qualifiers, threadIdx, blockIdx, gridDim and
// __syncthreads. So a test can put emulated threads in this file's place and run the kernels' own source on a CPU.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "tiles.cuh"

namespace slimx {

constexpr unsigned kAllLanes = 0xffffffffu;

// ---- loads ----------------------------------------------------------------------------------------------------------

// Copies 16, 8 or 4 bytes from global to shared memory, asynchronously and through no register: so a thread has a whole
// tile's loads in flight. 16 bytes pass by the L1, where the records and the tile counts stay.
template <class Unit>
__device__ __forceinline__ void stage(Unit* shared, const Unit* global) {
  const uint32_t to = uint32_t(__cvta_generic_to_shared(shared));
  if constexpr (sizeof(Unit) == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(sizeof(Unit)) : "memory");
}

// Waits for this thread's own copies: for what other threads staged, __syncthreads must follow.
__device__ __forceinline__ void wait_for_stage() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// What neighbouring threads or the next tile read again.
template <class T>
__device__ __forceinline__ T load_cached(const T* p) {
  return __ldg(p);
}

// ---- within a warp: every lane calls, every lane gets the result ----------------------------------------------------

__device__ __forceinline__ uint32_t warp_max(uint32_t x) { return __reduce_max_sync(kAllLanes, x); }

__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
#pragma unroll
  for (int step = kWarp / 2; step; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// The largest of four neighbouring lanes.
__device__ __forceinline__ uint32_t quad_max(uint32_t x) {
  x = max(x, __shfl_xor_sync(kAllLanes, x, 1));
  return max(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// Bit k is lane k's answer.
__device__ __forceinline__ uint32_t warp_ballot(bool yes) { return __ballot_sync(kAllLanes, yes); }

// ---- numbers --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int highest_bit(uint32_t x) { return 31 - __clz(x); }  // of x != 0

// The larger of each pair of 16-bit halves.
__device__ __forceinline__ uint32_t max_halves(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }

// Four numbers to e4m3 as slimx_e4m3 does it (for NaN that is not assumed); the first in the lowest byte.
__device__ __forceinline__ uint32_t e4m3x4(float a, float b, float c, float d) {
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return uint32_t(low) | uint32_t(high) << 16;
}

// The division that Triton's `/` emits on float32: not always the nearest float.
__device__ __forceinline__ float divide_full(float a, float b) {
  float q;
  asm("div.full.f32 %0, %1, %2;" : "=f"(q) : "f"(a), "f"(b));
  return q;
}

// ---- memory that thread blocks share --------------------------------------------------------------------------------

__device__ __forceinline__ void add_to(uint64_t* sum, uint64_t x) {
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(x));
}

__device__ __forceinline__ void or_to(uint32_t* flags, uint32_t bits) { atomicOr(flags, bits); }

}  // namespace slimx
