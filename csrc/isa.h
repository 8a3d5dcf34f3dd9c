// isa.h: the instruction sets of the CPU kernels, and the loops that are written once and compiled for each of them.
//
// A function marked SLIMX_INLINE has no instruction set of its own, because it is inlined into its caller. The tile
// functions in reshard_cpu.cpp, which have target attributes, are thereby compiled with all loops below in vectors of
// 16, 32 or 64 bytes. Only integers, and floats under IEEE rules, are computed, so all instruction sets give the same
// bits.
#pragma once

#include <algorithm>

#include "e4m3.h"
#include "reshard.h"
#include "words.h"

namespace slimx {

// A class of an instruction set contains the two loops that a compiler cannot vectorize well itself.
struct Scalar {
  static constexpr bool kCorrects = false;  // true if it uses Corrections
  template <bool kCopy, int kElement>
  static constexpr Words words = words_scalar<kCopy, kElement>;
  template <class T>
  static void encode(const T* x, int64_t n, float inverse, uint8_t* codes) {
    encode_scalar(x, n, inverse, codes);
  }
};

#if defined(__x86_64__)
struct Avx2 {
  static constexpr bool kCorrects = false;
  template <bool kCopy, int kElement>
  static constexpr Words words = words_avx2<kCopy, kElement>;
  template <class T>
  SLIMX_TARGET_AVX2 static void encode(const T* x, int64_t n, float inverse, uint8_t* codes) {
    encode_avx2(x, n, inverse, codes);
  }
};

struct Avx512 {
  static constexpr bool kCorrects = true;
  template <bool kCopy, int kElement>
  static constexpr Words words = words_avx512<kCopy, kElement>;
  template <class T>
  SLIMX_TARGET_AVX512 static void encode(const T* x, int64_t n, float inverse, uint8_t* codes) {
    encode_avx512(x, n, inverse, codes);
  }
};
#endif

// ---- runs of elements -----------------------------------------------------------------------------------------------
// T: uint16_t for bf16, uint32_t for fp32, both as bits.

template <class T>
constexpr T kMagnitude = T(~T(0)) >> 1;
template <class T>
constexpr uint32_t kInfinite = sizeof(T) == 2 ? SLIMX_INF_BF16 : SLIMX_INF_FP32;

// most[i] = the larger of most[i] and |x[i]|.
template <class T>
SLIMX_INLINE void fold_magnitudes(const T* __restrict x, int64_t n, T* __restrict most) {
  for (int64_t i = 0; i < n; ++i) {
    const T magnitude = x[i] & kMagnitude<T>;
    most[i] = most[i] < magnitude ? magnitude : most[i];
  }
}

// Returns the largest magnitude of a run.
template <class T>
SLIMX_INLINE uint32_t largest(const T* x, int64_t n) {
  T most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const T magnitude = x[i] & kMagnitude<T>;
    most = most < magnitude ? magnitude : most;
  }
  return most;
}

SLIMX_INLINE void double_codes(uint8_t* codes, int64_t n) {
  for (int64_t i = 0; i < n; ++i) codes[i] = slimx_double_e4m3(codes[i]);
}

SLIMX_INLINE void convert(const uint32_t* __restrict x, int64_t n, uint16_t* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = slimx_bf16(slimx_float(x[i]));
}

SLIMX_INLINE void convert(const uint16_t* __restrict x, int64_t n, uint32_t* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = uint32_t(x[i]) << 16;
}

SLIMX_INLINE void decode(const uint8_t* __restrict codes, int64_t n, float scale, uint16_t* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = slimx_bf16(slimx_dequantize(codes[i], scale));
}

SLIMX_INLINE void decode(const uint8_t* __restrict codes, int64_t n, float scale, uint32_t* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = slimx_bits(slimx_dequantize(codes[i], scale));
}

// ---- runs of bytes --------------------------------------------------------------------------------------------------

// Copies fewer than four bytes, all in the word that contains offset `pos` of the tensor.
template <bool kCopy, int kElement>
SLIMX_INLINE Summed part_of_word(const uint8_t* src, uint8_t* dst, int64_t bytes, uint64_t pos) {
  uint32_t word = 0;
  for (int64_t k = 0; k < bytes; ++k) {
    if (kCopy) dst[k] = src[k];
    word |= uint32_t(src[k]) << (8 * ((pos + k) & 3));
  }
  return {uint64_t(word) * slimx_multiplier(uint32_t(pos >> 2)), most_of_word<kElement>(word)};
}

// Copies bytes that are at offset `pos` of their tensor, and returns their contribution to its checksum and their
// largest magnitude. `ahead`: as in Words.
template <class Isa, bool kCopy, int kElement = 0>
SLIMX_INLINE Summed put(const uint8_t* src, uint8_t* dst, int64_t bytes, uint64_t pos, int64_t ahead = 0) {
  const int64_t head = std::min<int64_t>(bytes, -pos & 3);  // up to the tensor's next word boundary
  const int64_t whole = (bytes - head) >> 2, tail = head + 4 * whole;
  const auto to = [&](int64_t offset) { return kCopy ? dst + offset : nullptr; };
  Summed out = Isa::template words<kCopy, kElement>(src + head, to(head), whole, uint32_t((pos + head) >> 2), ahead);
  if (head) out.add(part_of_word<kCopy, kElement>(src, to(0), head, pos));
  if (tail < bytes) out.add(part_of_word<kCopy, kElement>(src + tail, to(tail), bytes - tail, pos + tail));
  return out;
}

}  // namespace slimx
