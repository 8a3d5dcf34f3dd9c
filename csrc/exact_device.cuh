// exact_device.cuh: the features of a GPU that the CUDA kernels of exact mode use beyond C++. A test replaces this file
// by threads of a CPU and runs the kernels' source.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace slimx {

// a * b + c rounded once, and a + b, both with denormals flushed to zeros of the same sign.
__device__ __forceinline__ float chain(float a, float b, float c) {
  float sum;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
  return sum;
}

__device__ __forceinline__ float chain_add(float a, float b) {
  float sum;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}

// The same with denormals kept; quotient and root are rounded to nearest.
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ float divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float root(float x) { return __fsqrt_rn(x); }

// Loads 16 bytes, at an address divisible by 16, in one instruction.
struct Words {
  uint32_t at[4];
};
struct Floats {
  float at[4];
};
__device__ __forceinline__ Words load_words(const void* from) {
  const uint4 words = *static_cast<const uint4*>(from);
  return {{words.x, words.y, words.z, words.w}};
}
__device__ __forceinline__ Floats load_floats(const float* from) {
  const float4 floats = *reinterpret_cast<const float4*>(from);
  return {{floats.x, floats.y, floats.z, floats.w}};
}
__device__ __forceinline__ void store_floats(float* to, float a, float b, float c, float d) {
  *reinterpret_cast<float4*>(to) = make_float4(a, b, c, d);
}

// The thread block's dynamic shared memory, whose size is set at the launch.
__device__ __forceinline__ float* shared_floats() {
  extern __shared__ float floats[];
  return floats;
}

template <class... Of, class... Given>
int launch(void (*kernel)(Of...), dim3 blocks, int threads, int64_t shared, void* stream, Given... given) {
  kernel<<<blocks, threads, size_t(shared), cudaStream_t(stream)>>>(given...);
  return cudaGetLastError();
}

}  // namespace slimx
