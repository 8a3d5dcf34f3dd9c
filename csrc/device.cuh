// device.cuh: the features of a GPU that the CUDA kernels use beyond C++: asynchronous loads, warp reductions, hardware
// casts.
//
// Every name that exists only on a GPU is defined in this file, except CUDA's qualifiers, threadIdx, blockIdx, gridDim
// and __syncthreads. A test can therefore replace this file by emulated threads and run the kernels' source on a CPU.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "tiles.cuh"

namespace slimx {

constexpr unsigned kAllLanes = 0xffffffffu;

// ---- loads ----------------------------------------------------------------------------------------------------------

// Copies 16, 8 or 4 bytes from global to shared memory, asynchronously and without registers, so that a thread can have
// the loads of a whole tile in flight. Loads of 16 bytes bypass the L1 cache, which keeps the records and the tile
// counts.
template <class Unit>
__device__ __forceinline__ void stage(Unit* shared, const Unit* global) {
  const uint32_t to = uint32_t(__cvta_generic_to_shared(shared));
  if constexpr (sizeof(Unit) == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(sizeof(Unit)) : "memory");
}

// Waits for the copies of this thread. Before reading what other threads have staged, call __syncthreads as well.
__device__ __forceinline__ void wait_for_stage() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Loads through the cache, for data that neighboring threads or the next tile read again.
template <class T>
__device__ __forceinline__ T load_cached(const T* p) {
  return __ldg(p);
}

// ---- within a warp: all lanes must call, and all get the result -----------------------------------------------------

__device__ __forceinline__ uint32_t warp_max(uint32_t x) { return __reduce_max_sync(kAllLanes, x); }

__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
#pragma unroll
  for (int step = kWarp / 2; step; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// Returns the largest value of four neighboring lanes.
__device__ __forceinline__ uint32_t quad_max(uint32_t x) {
  x = max(x, __shfl_xor_sync(kAllLanes, x, 1));
  return max(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// Returns a word whose bit k is lane k's `yes`.
__device__ __forceinline__ uint32_t warp_ballot(bool yes) { return __ballot_sync(kAllLanes, yes); }

// ---- numbers --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int highest_bit(uint32_t x) { return 31 - __clz(x); }  // for x != 0

// Returns the larger of each pair of 16-bit halves.
__device__ __forceinline__ uint32_t max_halves(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }

// Converts four numbers to e4m3 as slimx_e4m3 does (NaN is not supported); the first is in the lowest byte.
__device__ __forceinline__ uint32_t e4m3x4(float a, float b, float c, float d) {
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return uint32_t(low) | uint32_t(high) << 16;
}

// The division to which Triton compiles `/` on float32, which is not always rounded to the nearest float.
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
