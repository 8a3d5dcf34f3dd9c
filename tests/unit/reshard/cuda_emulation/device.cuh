// device.cuh: stands in for csrc/device.cuh, so that the source of the CUDA kernels runs on a CPU: a thread block is
// 256 emulated threads.
//
// It finds wrong results, misaligned vector accesses, stage slots that are read before their copies were waited for,
// and barriers that some threads never reach. It says nothing of speed, nor of the rounding of a GPU's own
// instructions.
#pragma once

#include <stdint.h>

#include <algorithm>

#include "emulated_threads.h"
#include "tiles.cuh"

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __restrict__

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

void __syncthreads();

namespace slimx {

using std::max;
using std::min;

extern uint8_t memory[];  // the thread block's shared memory

void later(void* to, const void* from, int bytes);  // a copy that is done when it is waited for
void wait_for_stage();
void gather(uint32_t mine, uint32_t* all);  // of the warp's lanes; each lane gets all kWarp
void must_be_aligned(const void* p, int bytes);

template <class Unit>
void stage(Unit* shared, const Unit* global) {
  must_be_aligned(shared, sizeof(Unit));
  must_be_aligned(global, sizeof(Unit));
  later(shared, global, sizeof(Unit));
}

template <class T>
T load_cached(const T* p) {
  must_be_aligned(p, sizeof(T));
  return *p;
}

inline uint32_t warp_max(uint32_t x) {
  uint32_t all[kWarp];
  gather(x, all);
  return *std::max_element(all, all + kWarp);
}

inline uint64_t warp_sum(uint64_t x) {
  uint32_t low[kWarp], high[kWarp];
  gather(uint32_t(x), low);
  gather(uint32_t(x >> 32), high);
  uint64_t sum = 0;
  for (int k = 0; k < kWarp; ++k) sum += uint64_t(high[k]) << 32 | low[k];
  return sum;
}

inline uint32_t quad_max(uint32_t x) {
  uint32_t all[kWarp];
  gather(x, all);
  const uint32_t* quad = all + threadIdx.x % kWarp / 4 * 4;
  return *std::max_element(quad, quad + 4);
}

inline uint32_t warp_ballot(bool yes) {
  uint32_t all[kWarp], bits = 0;
  gather(yes, all);
  for (int k = 0; k < kWarp; ++k) bits |= all[k] << k;
  return bits;
}

inline int highest_bit(uint32_t x) { return 31 - __builtin_clz(x); }

inline uint32_t max_halves(uint32_t a, uint32_t b) {
  return max(a & 0xFFFFu, b & 0xFFFFu) | max(a >> 16, b >> 16) << 16;
}

inline uint32_t e4m3x4(float a, float b, float c, float d) {
  return slimx_e4m3(a) | slimx_e4m3(b) << 8 | slimx_e4m3(c) << 16 | uint32_t(slimx_e4m3(d)) << 24;
}

inline float divide_full(float a, float b) { return a / b; }  // a GPU's differs in the last bit

inline void add_to(uint64_t* sum, uint64_t x) { *sum += x; }
inline void or_to(uint32_t* flags, uint32_t bits) { *flags |= bits; }

}  // namespace slimx
