// int4.h: matrices in INT4 with a bf16 scale per group of 32 columns, as compressed-tensors packs them, and the plain C
// interface that makes them on the CPU. The CUDA library (int4.cu) makes the same bytes by the same functions.
//
// amax is the largest magnitude in a group of bf16 elements, an fp32 element counting as the bf16 that is nearest:
//
//     s = bf16(amax / 7), or 2^-7 where that is zero or subnormal
//     q = rne(clamp(bf16(x / s), -8, 7)), which is written as q + 8 in four bits, the even column in the low ones
//     v = bf16(q * s), the value that engines compute with
//
// The codes for a given scale, and the scale of zeros, are compressed-tensors' own. Its own scale is bf16(amax / 7.5),
// whose values have other codes when they are rounded again. With amax / 7 the largest q is 7, so that v has the same
// scales and the same codes: rounding again changes nothing. Subnormal scales would be an exception; hence their rule.
#pragma once

#include <stdint.h>

#include "numerics.h"

// Changes with the functions or with any rounding, so that a stale library is refused when it is loaded.
#define SLIMX_INT4_ABI 1

#define SLIMX_INT4_GROUP 32
#define SLIMX_INT4_NO_SCALE 0x3C00u  // 2^-7: the epsilon of bf16
#define SLIMX_INT4_ZERO 8u           // the code of 0

SLIMX_INLINE uint16_t slimx_int4_element(uint16_t x) { return x; }
SLIMX_INLINE uint16_t slimx_int4_element(uint32_t x) { return slimx_bf16(slimx_float(x)); }
SLIMX_INLINE void slimx_int4_store(uint16_t value, uint16_t* to) { *to = value; }
SLIMX_INLINE void slimx_int4_store(uint16_t value, uint32_t* to) { *to = (uint32_t)value << 16; }

// The scale of a group, as bf16; SLIMX_NAN_BF16 where an element, or a value, is not finite. amax: bf16.
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

// One group of elements T (bf16 or fp32, as bits): its 16 bytes of codes and its scale, unless `codes` is NULL, and its
// values, in the type of the elements, unless `values` is NULL; they may lie where the elements do. Returns 1 where the
// group is not finite: its scale and its values are NaN then, and its codes 0.
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

// Matrices, all on one device. `rows` lie `src_ld` bytes apart, and `groups` groups in a row side by side; codes [rows]
// [groups * 16] and scales [rows][groups] are dense. NULL `codes` leaves out both, NULL `values` (dense, or `src`
// itself with its rows) those.
typedef struct {
  const uint8_t* src;
  int64_t src_ld;
  int64_t rows;
  int64_t groups;
  uint8_t* codes;
  uint16_t* scales;
  uint8_t* values;
  int64_t values_ld;  // bytes
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

// Rounds `matrix`, in memory of the host; returns 1 where a group is not finite, else 0.
int slimx_int4(const SlimxInt4* matrix, int threads);
}
