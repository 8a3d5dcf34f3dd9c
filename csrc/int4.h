// int4.h: INT4 matrices with a bf16 scale per group of 32 columns, in compressed-tensors' format, and the plain C
// interface that quantizes them on the CPU. The CUDA library (int4.cu) uses the same functions and gives the same
// bytes.
//
// amax is the largest magnitude in a group of bf16 elements; an fp32 element counts as the nearest bf16:
//
//     s = bf16(amax / 7), or 2^-7 if that is zero or subnormal
//     q = rne(clamp(bf16(x / s), -8, 7)), stored as q + 8 in four bits, with the even column in the lower half
//     v = bf16(q * s), the value that engines compute with
//
// The codes for a given scale, and the scale of a group of zeros, are those of compressed-tensors. Its scale of other
// groups is bf16(amax / 7.5), with which values get other codes when they are quantized again. With amax / 7 the
// largest q is 7, so v has the same scale and the same codes: quantizing again changes nothing. Subnormal scales would
// be an exception, so they are replaced.
#pragma once

#include <stdint.h>

#include "numerics.h"

// Changes with the functions and with any rounding, so that a stale library is refused when it is loaded.
#define SLIMX_INT4_ABI 1

#define SLIMX_INT4_GROUP 32
#define SLIMX_INT4_NO_SCALE 0x3C00u  // 2^-7, the epsilon of bf16
#define SLIMX_INT4_ZERO 8u           // code of 0

SLIMX_INLINE uint16_t slimx_int4_element(uint16_t x) { return x; }
SLIMX_INLINE uint16_t slimx_int4_element(uint32_t x) { return slimx_bf16(slimx_float(x)); }
SLIMX_INLINE void slimx_int4_store(uint16_t value, uint16_t* to) { *to = value; }
SLIMX_INLINE void slimx_int4_store(uint16_t value, uint32_t* to) { *to = (uint32_t)value << 16; }

// Returns the scale of a group as bf16; SLIMX_NAN_BF16 if an element or a value is not finite. amax: bf16.
SLIMX_INLINE uint16_t slimx_int4_scale(uint16_t amax) {
  const uint16_t s = slimx_bf16(slimx_div(slimx_from_bf16(amax), 7.0f));
  const uint16_t largest = slimx_bf16(slimx_mul(slimx_from_bf16(s), 7.0f));
  if (amax >= SLIMX_INF_BF16 || largest >= SLIMX_INF_BF16) return SLIMX_NAN_BF16;
  return s < 0x0080u ? SLIMX_INT4_NO_SCALE : s;
}

// Adding 1.5 * 2^23 + 8 rounds to an integer, ties to even, and leaves the code in the lowest bits.
SLIMX_INLINE uint32_t slimx_int4_code(uint16_t x, float scale) {
  const float q = slimx_from_bf16(slimx_bf16(slimx_div(slimx_from_bf16(x), scale)));
  const float low = q < -8.0f ? -8.0f : q, clamped = low > 7.0f ? 7.0f : low;
  return slimx_bits(slimx_add(clamped, 12582920.0f)) & 0xFu;
}

SLIMX_INLINE uint16_t slimx_int4_value(uint32_t code, float scale) {
  return slimx_bf16(slimx_mul((float)((int32_t)code - (int32_t)SLIMX_INT4_ZERO), scale));
}

// Quantizes one group of elements T (bf16 or fp32, as bits). Writes 16 bytes of codes and the scale, unless `codes` is
// NULL, and the values, in the type of the elements, unless `values` is NULL; `values` may be `x`. Returns 1 if the
// group contains a value that is not finite; its scale and values are then NaN, and its codes 0.
template <class T>
SLIMX_INLINE uint32_t slimx_int4_group(const T* x, uint8_t* codes, uint16_t* scale, T* values) {
  uint16_t elements[SLIMX_INT4_GROUP], amax = 0;
  for (int i = 0; i < SLIMX_INT4_GROUP; ++i) {
    elements[i] = slimx_int4_element(x[i]);
    const uint16_t magnitude = elements[i] & 0x7FFFu;
    amax = magnitude > amax ? magnitude : amax;
  }
  const uint16_t s = slimx_int4_scale(amax);
  const uint32_t bad = s == SLIMX_NAN_BF16;
  const float wide = slimx_from_bf16(s);
  uint8_t found[SLIMX_INT4_GROUP];
  for (int i = 0; i < SLIMX_INT4_GROUP; ++i)
    found[i] = (uint8_t)slimx_select(bad, SLIMX_INT4_ZERO, slimx_int4_code(elements[i], wide));
  if (codes) {
    for (int i = 0; i < SLIMX_INT4_GROUP / 2; ++i) codes[i] = (uint8_t)(found[2 * i] | found[2 * i + 1] << 4);
    *scale = s;
  }
  if (values)
    for (int i = 0; i < SLIMX_INT4_GROUP; ++i) slimx_int4_store(slimx_int4_value(found[i], wide), values + i);
  return bad;
}

// A matrix, all in memory of one device. Its rows are `src_ld` bytes apart and contain `groups` consecutive groups.
// Codes [rows][groups * 16] and scales [rows][groups] are contiguous. Codes and scales are written unless `codes` is
// NULL, values (contiguous, or in place of `src`) unless `values` is NULL.
typedef struct {
  const uint8_t* src;
  int64_t src_ld;
  int64_t rows;
  int64_t groups;
  uint8_t* codes;
  uint16_t* scales;
  uint8_t* values;
  int64_t values_ld;  // bytes from one row of values to the next
  int32_t item;       // bytes of an element: 2 or 4
  int32_t reserved;
} SlimxInt4;

template <class T>
SLIMX_INLINE uint32_t slimx_int4_at(const SlimxInt4& m, int64_t index) {
  const int64_t row = index / m.groups, at = index % m.groups * SLIMX_INT4_GROUP;
  uint8_t* to = m.values ? m.values + row * m.values_ld : nullptr;
  return slimx_int4_group<T>(reinterpret_cast<const T*>(m.src + row * m.src_ld) + at,
                             m.codes ? m.codes + index * (SLIMX_INT4_GROUP / 2) : nullptr,
                             m.codes ? m.scales + index : nullptr, to ? reinterpret_cast<T*>(to) + at : nullptr);
}

extern "C" {

int slimx_int4_abi(void);

// Quantizes `matrix`, in host memory; returns 1 if a group contains a value that is not finite, else 0.
int slimx_int4(const SlimxInt4* matrix, int threads);
}
