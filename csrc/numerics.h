// numerics.h: every rounding decision of the packing kernels, shared by CPU and GPU so that both give the same bits.
//
// Compile with contraction off (-ffp-contract=off; on the GPU the _rn intrinsics below prevent it) and without flushing
// denormals. No NaN payload of the hardware is ever written: the bits of every NaN result are defined here. Functions
// that are applied to every element have no branches, so that a compiler can vectorize the loops around them.
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define SLIMX_INLINE static __host__ __device__ __forceinline__
#else
#define SLIMX_INLINE static inline __attribute__((always_inline))
#endif

// Rule by which a quantizing op computes the scale s of a block from amax, the largest magnitude in the block; q is the
// e4m3 code of an element x. The manifest of a publication names the rule, because no two rules agree on all codes.
typedef enum {
  SLIMX_RULE_NONE = 0,    // for ops that do not quantize
  SLIMX_RULE_IEEE = 1,    // s = max(amax, 1e-10) / 448, q = rne(x * (1 / s))
  SLIMX_RULE_TRITON = 2,  // as IEEE, but with the approximate division to which Triton compiles `/` (div.full.f32)
  SLIMX_RULE_TE = 3,      // q = rne(x * r) and s = 1 / r, where r = 448 / amax (Transformer Engine)
  SLIMX_RULE_UE8M0 = 4,   // s = 2^ceil(log2(max(amax, 1e-4) / 448)), made a fixed point by slimx_scale_ue8m0 (DeepGEMM)
  SLIMX_RULE_MXFP8 = 5,   // s = 2^(e - 127), e = the exponent of amax * rne(1 / 448) rounded up (OCP MX)
  SLIMX_RULE_INT4 = 6,    // for INT4 codes: see int4.h
} SlimxRule;

// ---- bits -----------------------------------------------------------------------------------------------------------

#define SLIMX_INF_BF16 0x7F80u      // magnitudes from here on are not finite
#define SLIMX_INF_FP32 0x7F800000u  // magnitudes from here on are not finite
#define SLIMX_NAN_BF16 0x7FC0u
#define SLIMX_NAN_FP32 0x7FC00000u
#define SLIMX_NAN_E4M3 0x7Fu
#define SLIMX_NAN_E8M0 0xFFu
#define SLIMX_MAX_E4M3 448.0f
#define SLIMX_MAX_BITS 0x43E00000                   // bits of 448.0f
#define SLIMX_NORMAL_BITS (121 << 23)               // bits of 2^-6, the smallest normal e4m3
#define SLIMX_ROUNDER ((uint32_t)(20 << 23) + 56u)  // 56 = -(121 << 3) mod 256, the change of the exponent's bias

SLIMX_INLINE uint32_t slimx_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

SLIMX_INLINE float slimx_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Both branches are computed arithmetically, because GCC 12 compiles a ternary here to a jump and then does not
// vectorize the loop around it.
SLIMX_INLINE uint32_t slimx_select(uint32_t condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - condition;
  return (yes & mask) | (no & ~mask);
}

SLIMX_INLINE uint32_t slimx_is_nan(float x) { return (SLIMX_INF_FP32 - (slimx_bits(x) & 0x7FFFFFFFu)) >> 31; }

// Functions instead of operators, so that no compiler option can fuse or approximate them on the GPU.
#ifdef __CUDA_ARCH__
SLIMX_INLINE float slimx_mul(float a, float b) { return __fmul_rn(a, b); }
SLIMX_INLINE float slimx_add(float a, float b) { return __fadd_rn(a, b); }
SLIMX_INLINE float slimx_div(float a, float b) { return __fdiv_rn(a, b); }
#else
SLIMX_INLINE float slimx_mul(float a, float b) { return a * b; }
SLIMX_INLINE float slimx_add(float a, float b) { return a + b; }
SLIMX_INLINE float slimx_div(float a, float b) { return a / b; }
#endif

// ---- bf16 -----------------------------------------------------------------------------------------------------------

// Rounds to nearest, ties to even. Values above the largest bf16 become infinite, and every NaN becomes SLIMX_NAN_BF16.
SLIMX_INLINE uint16_t slimx_bf16(float x) {
  const uint32_t u = slimx_bits(x);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return (uint16_t)slimx_select(slimx_is_nan(x), SLIMX_NAN_BF16, rounded);
}

SLIMX_INLINE float slimx_from_bf16(uint16_t x) { return slimx_float((uint32_t)x << 16); }

// ---- e4m3 (4 exponent bits, bias 7; no infinity; magnitude 0x7F is NaN) --------------------------------------------

// Rounds to nearest, ties to even, saturating at +-448. x is a number or infinite. Equal to
// cvt.rn.satfinite.e4m3x2.f32, and to a clamp followed by torch's cast. csrc/e4m3.h performs the same steps with
// vectors.
SLIMX_INLINE uint8_t slimx_e4m3_number(float x) {
  const uint32_t u = slimx_bits(x);
  const int32_t magnitude = (int32_t)(u & 0x7FFFFFFFu), a = magnitude < SLIMX_MAX_BITS ? magnitude : SLIMX_MAX_BITS;
  // Codes are 2^(e - 3) apart for magnitudes a in [2^e, 2^(e + 1)), and below 2^-6 as far apart as just above it.
  // Floats with exponent e + 20 are equally far apart, so adding that power of two rounds a to a code, and leaves the
  // code's three bits, and a carry, at the end of the mantissa.
  const int32_t power = (a < SLIMX_NORMAL_BITS ? SLIMX_NORMAL_BITS : a) & 0x7F800000;
  const uint32_t sum = slimx_bits(slimx_add(slimx_float((uint32_t)a), slimx_float((uint32_t)power + SLIMX_ROUNDER)));
  const uint32_t code = (sum + ((uint32_t)power >> 20)) & 0x7Fu;  // adds the exponent; a carry increases it
  return (uint8_t)(code | (u >> 24 & 0x80u));
}

// The same for all floats: NaN becomes SLIMX_NAN_E4M3.
SLIMX_INLINE uint8_t slimx_e4m3(float x) {
  return (uint8_t)slimx_select(slimx_is_nan(x), SLIMX_NAN_E4M3, slimx_e4m3_number(x));
}

// Converts exactly. Both NaN codes become SLIMX_NAN_FP32.
SLIMX_INLINE float slimx_from_e4m3(uint8_t code) {
  const uint32_t magnitude = code & 0x7Fu, sign = (uint32_t)(code & 0x80u) << 24;
  // Read as a float, the code's bits are 2^-120 times its value: an exponent with bias 7, or a denormal if it is 0.
  const uint32_t value = slimx_bits(slimx_mul(slimx_float(magnitude << 20), slimx_float(247u << 23))) | sign;
  return slimx_float(slimx_select(magnitude == SLIMX_NAN_E4M3, SLIMX_NAN_FP32, value));
}

// Returns the code of twice the value of a code of at most 224: its exponent plus one, or a subnormal's bits shifted.
SLIMX_INLINE uint8_t slimx_double_e4m3(uint8_t code) {
  const uint32_t a = code & 0x7Fu, shifted = a << 1, raised = a + 8u;
  return (uint8_t)((shifted < raised ? shifted : raised) | (code & 0x80u));
}

// ---- block scales ---------------------------------------------------------------------------------------------------
//
// amax is the largest magnitude in a block, computed on bits as an unsigned number, of bf16 or fp32. If it is not
// finite (at or above SLIMX_INF_*), the whole block becomes NaN: its scale is SLIMX_NAN_FP32 or SLIMX_NAN_E8M0, all its
// codes are SLIMX_NAN_E4M3, and the tensor's flag is set. The functions below are not called with such an amax.

typedef struct {
  float scale;       // s, as it is written
  float inverse;     // factor by which elements are multiplied before they are rounded
  uint32_t doubled;  // 1 if codes are doubled after rounding
} SlimxScale;

SLIMX_INLINE float slimx_at_least(float x, float least) { return x < least ? least : x; }

// Returns the smallest power of two that is at least x, the scale of UE8M0. x is a normal float.
SLIMX_INLINE float slimx_power_of_two(float x) { return slimx_float((slimx_bits(x) + 0x7FFFFFu) & 0xFF800000u); }

// If the largest code is 224, which would be 448 with half the scale, the codes are not a fixed point: dequantizing and
// quantizing them again would give another scale. In this case half the scale is written, with doubled codes. Both are
// exact, so engines that requantize when loading change nothing. At the lower limit of amax, quantizing again would
// give the same scale.
SLIMX_INLINE SlimxScale slimx_scale_ue8m0(float amax) {
  const float least = 1e-4f, s = slimx_power_of_two(slimx_div(slimx_at_least(amax, least), SLIMX_MAX_E4M3));
  SlimxScale out = {s, slimx_div(1.0f, s), 0};
  if (slimx_e4m3(slimx_mul(amax, out.inverse)) == slimx_e4m3(224.0f) && slimx_mul(224.0f, s) >= least) {
    out.scale = slimx_mul(s, 0.5f);
    out.doubled = 1;
  }
  return out;
}

// As in Transformer Engine: `inverse` is 1 for a block of zeros, and the largest number of the source's type if 448 /
// amax overflows.
SLIMX_INLINE SlimxScale slimx_scale_te(float amax, int item) {
  const float ratio = amax == 0.0f ? 1.0f : slimx_div(SLIMX_MAX_E4M3, amax);
  const float largest = slimx_float(item == 2 ? 0x7F7F0000u : 0x7F7FFFFFu);
  const float inverse = slimx_bits(ratio) == SLIMX_INF_FP32 ? largest : ratio;
  const SlimxScale out = {slimx_div(1.0f, inverse), inverse, 0};
  return out;
}

#define SLIMX_LEAST_AMAX 1e-10f  // lower limit of amax for IEEE and TRITON

SLIMX_INLINE SlimxScale slimx_scale_ieee(float amax) {
  const float s = slimx_div(slimx_at_least(amax, SLIMX_LEAST_AMAX), SLIMX_MAX_E4M3);
  const SlimxScale out = {s, slimx_div(1.0f, s), 0};
  return out;
}

// Returns the scale of a block of finite elements. `item`: bytes of a source element, 2 (bf16) or 4 (fp32). TRITON is
// not implemented here: the GPU divides by div.full.f32, and the CPU has a table that a GPU wrote (SLIMX_TRITON_SCALES
// in reshard.h).
SLIMX_INLINE SlimxScale slimx_scale(int rule, float amax, int item) {
  if (rule == SLIMX_RULE_UE8M0) return slimx_scale_ue8m0(amax);
  if (rule == SLIMX_RULE_TE) return slimx_scale_te(amax, item);
  return slimx_scale_ieee(amax);
}

// Returns the E8M0 scale of an MXFP8 block: the exponent of amax / 448, rounded up; 0 below 2^-127.
SLIMX_INLINE uint8_t slimx_mxfp8_exponent(float amax) {
  const uint32_t u = slimx_bits(slimx_mul(amax, 1.0f / SLIMX_MAX_E4M3));
  const uint32_t exponent = u >> 23, mantissa = u & 0x7FFFFFu;
  return (uint8_t)(exponent + (mantissa > (exponent ? 0u : 0x400000u) ? 1u : 0u));
}

// Returns 2^(127 - e), for the exponents of blocks of finite elements (at most 247).
SLIMX_INLINE float slimx_mxfp8_inverse(uint8_t e) { return slimx_float((254u - e) << 23); }

// Returns 2^(e - 127); NaN for SLIMX_NAN_E8M0.
SLIMX_INLINE float slimx_from_e8m0(uint8_t e) {
  const uint32_t power = e ? (uint32_t)e << 23 : 0x00400000u;
  return slimx_float(e == SLIMX_NAN_E8M0 ? SLIMX_NAN_FP32 : power);
}

// ---- elements -------------------------------------------------------------------------------------------------------

SLIMX_INLINE uint8_t slimx_quantize(float x, SlimxScale s) {
  const uint8_t code = slimx_e4m3_number(slimx_mul(x, s.inverse));
  return s.doubled ? slimx_double_e4m3(code) : code;
}

// Returns the value in fp32, with NaN as SLIMX_NAN_FP32; the bf16 value is slimx_bf16 of it.
SLIMX_INLINE float slimx_dequantize(uint8_t code, float scale) {
  const float x = slimx_mul(slimx_from_e4m3(code), scale);
  return slimx_float(slimx_select(slimx_is_nan(x), SLIMX_NAN_FP32, slimx_bits(x)));
}
