// exact_device.cuh: stands in for csrc/exact_device.cuh, so that the source of the CUDA kernels of exact mode runs on a
// CPU: a thread block is as many emulated threads. Blocks follow one another.
//
// It finds wrong results and missing barriers that matter; it says nothing of speed, nor of a GPU's own rounding.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include <functional>
#include <vector>

#include "arithmetic.h"
#include "emulated_threads.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __syncthreads() slimx::meet_block()

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

using cudaError_t = int;
inline const char* cudaGetErrorString(int) { return "no error of a device that is not there"; }

namespace slimx {

inline std::vector<float> shared_memory;
inline std::function<void()> kernel;
inline Meeting block;
inline int block_threads;

inline void meet_block() { meet(block, block_threads); }

inline float chain(float a, float b, float c) {
  const Arithmetic<true> zeros_for_denormals;
  volatile float x = a, y = b, z = c;  // so that nothing moves out of the scope
  volatile float sum = fmaf(x, y, z);
  return sum;
}

inline float chain_add(float a, float b) {
  const Arithmetic<true> zeros_for_denormals;
  volatile float x = a, y = b, sum = x + y;
  return sum;
}

inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
inline float divide(float a, float b) { return a / b; }
inline float root(float x) { return sqrtf(x); }
struct Words {
  uint32_t at[4];
};
struct Floats {
  float at[4];
};
inline void check_alignment(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % 16) abort();  // as a GPU would end the kernel
}
inline Words load_words(const void* from) {
  check_alignment(from);
  return *static_cast<const Words*>(from);
}
inline Floats load_floats(const float* from) {
  check_alignment(from);
  return *reinterpret_cast<const Floats*>(from);
}
inline void store_floats(float* to, float a, float b, float c, float d) {
  check_alignment(to);
  *reinterpret_cast<Floats*>(to) = {{a, b, c, d}};
}

inline float* shared_floats() { return shared_memory.data(); }

template <class... Of, class... Given>
int launch(void (*of)(Of...), dim3 blocks, int threads, int64_t shared, void*, Given... given) {
  shared_memory.assign(shared / 4, NAN);
  kernel = [=] { of(given...); };
  body = [] { kernel(); };
  block_threads = threads;
  for (unsigned z = 0; z < blocks.z; ++z)
    for (unsigned y = 0; y < blocks.y; ++y)
      for (unsigned x = 0; x < blocks.x; ++x) {
        blockIdx = {x, y, z};
        run_block(threads);
      }
  return 0;
}

}  // namespace slimx
