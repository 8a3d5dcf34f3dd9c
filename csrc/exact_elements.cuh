// exact_elements.cuh: elements of tensors in the CUDA kernels of exact mode: conversions, loads of 16 bytes, and the
// contract's exp and log.
//
// Which thread computes what does not affect any bit: a sum is computed by one thread from first to last, or in the
// contract's lanes and blocks. The order of operations is that of slimx/extras/exact/operations/forward/reference.py.
#pragma once

#include <string.h>

#include "exact_device.cuh"
#include "exact_interface.cuh"

namespace slimx {

#define SLIMX_MATH static __device__ __forceinline__
#include "exact_math.h"
#undef SLIMX_MATH

static __device__ __forceinline__ float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static __device__ __forceinline__ float widened(float x) { return x; }
static __device__ __forceinline__ float widened(uint16_t x) { return as_float(uint32_t(x) << 16); }

static __device__ __forceinline__ void put(float* to, float x) { *to = x; }
static __device__ __forceinline__ void put(uint16_t* to, float x) {  // rounded to nearest even; NaN becomes 0x7FC0
  uint32_t bits;
  memcpy(&bits, &x, 4);
  *to = x == x ? uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16) : uint16_t(0x7FC0);
}

// Number of elements in a load of 16 bytes.
template <class T>
constexpr int kUnit = int(16 / sizeof(T));

// Loads one unit from `from` on. If fewer elements are left in the row, `n`, the others are zeros. `whole`: true if
// every `from` of the caller is aligned to 16 bytes.
template <class T>
static __device__ __forceinline__ Words load_unit(const T* from, int64_t n, bool whole) {
  if (n >= kUnit<T> && whole) return load_words(from);
  T elements[kUnit<T>];
  for (int i = 0; i < kUnit<T>; ++i) elements[i] = i < n ? from[i] : T(0);
  Words words;
  memcpy(&words, elements, sizeof words);
  return words;
}

// Stores the elements of a unit as floats, at an address divisible by 16.
static __device__ __forceinline__ void widen_unit(const Words& words, const float*, float* to) {
  store_floats(to, as_float(words.at[0]), as_float(words.at[1]), as_float(words.at[2]), as_float(words.at[3]));
}
static __device__ __forceinline__ void widen_unit(const Words& words, const uint16_t*, float* to) {
  for (int i = 0; i < 4; i += 2)
    store_floats(to + 2 * i, as_float(words.at[i] << 16), as_float(words.at[i] & 0xFFFF0000u),
                 as_float(words.at[i + 1] << 16), as_float(words.at[i + 1] & 0xFFFF0000u));
}

// Returns true if rows of `width` elements at `at` can be loaded 16 bytes at a time.
template <class T>
static __device__ __forceinline__ bool aligned(const T* at, int64_t width) {
  return (reinterpret_cast<uintptr_t>(at) | uint64_t(width) * sizeof(T)) % 16 == 0;
}

static __device__ __forceinline__ float exact_exp(float x) {
  if (!(x == x)) return x;
  if (x < SLIMX_EXP_LEAST) return 0.0f;
  if (x > SLIMX_EXP_MOST) return __builtin_inff();
  const float n = exp_power(x);
  const int32_t whole = int32_t(n), low = whole >> 1;
  return exp_polynomial(exp_rest(x, n)) * as_float(uint32_t(low + 127) << 23) *
         as_float(uint32_t(whole - low + 127) << 23);
}

// Adds SLIMX_LANES partial sums: the upper half to the lower one, until one is left.
static __device__ __forceinline__ float fold(float* lanes) {
  for (int half = SLIMX_LANES / 2; half; half /= 2)
    for (int l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
  return lanes[0];
}

}  // namespace slimx
