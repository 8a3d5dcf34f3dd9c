// e4m3.h: converts runs of elements to e4m3 codes with vector instructions.
//
// Performs the steps of slimx_e4m3_number (csrc/numerics.h) on 8 or 16 elements at a time. The vector code is explicit,
// because GCC 12 compiles the minimum and maximum to jumps and then vectorizes nothing (AVX2) or badly (AVX-512).
// Sources are the bits of bf16 or fp32.
#pragma once

#include "words.h"

namespace slimx {

inline float element(uint16_t x) { return slimx_from_bf16(x); }
inline float element(uint32_t x) { return slimx_float(x); }

// codes[i] = code of x[i] * inverse, for finite products.
template <class T>
void encode_scalar(const T* __restrict x, int64_t n, float inverse, uint8_t* __restrict codes) {
  for (int64_t i = 0; i < n; ++i) codes[i] = slimx_e4m3_number(slimx_mul(element(x[i]), inverse));
}

// ---- many bf16 elements of one block --------------------------------------------------------------------------------
//
// Shifted right by 4, the low byte of a bf16 contains the fields of an e4m3: 3 bits of mantissa and an exponent, but
// with another bias. Normal codes are therefore that byte plus a correction, which depends only on the 7 bits of
// mantissa and on the block's factor: a table of 128 bytes, in which AVX-512 looks up 64 elements at once.

struct Corrections {
  bool usable = false;  // false if the factor is near the limits of fp32
  uint16_t least;       // smaller magnitudes become subnormal codes, to which corrections do not apply
  alignas(64) uint8_t bytes[128];
};

// ---- in vectors -----------------------------------------------------------------------------------------------------

#if defined(__x86_64__)

SLIMX_TARGET_AVX2 inline __m256 load8(const uint16_t* x) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

SLIMX_TARGET_AVX2 inline __m256 load8(const uint32_t* x) { return _mm256_loadu_ps(reinterpret_cast<const float*>(x)); }

SLIMX_TARGET_AVX2 inline __m256i codes8(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i a = _mm256_min_epi32(_mm256_and_si256(u, _mm256_set1_epi32(0x7FFFFFFF)),  //
                                     _mm256_set1_epi32(SLIMX_MAX_BITS));
  const __m256i power = _mm256_and_si256(_mm256_max_epi32(a, _mm256_set1_epi32(SLIMX_NORMAL_BITS)),  //
                                         _mm256_set1_epi32(0x7F800000));
  const __m256 rounder = _mm256_castsi256_ps(_mm256_add_epi32(power, _mm256_set1_epi32(SLIMX_ROUNDER)));
  const __m256i sum = _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(a), rounder));
  const __m256i code = _mm256_and_si256(_mm256_add_epi32(sum, _mm256_srli_epi32(power, 20)), _mm256_set1_epi32(0x7F));
  return _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(u, 24), _mm256_set1_epi32(0x80)));
}

template <class T>
SLIMX_TARGET_AVX2 void encode_avx2(const T* x, int64_t n, float inverse, uint8_t* codes) {
  const __m256 factor = _mm256_set1_ps(inverse);
  const __m256i in_order =
      _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // because packs work on each 128-bit half separately
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    __m256i c[4];
    for (int k = 0; k < 4; ++k) c[k] = codes8(_mm256_mul_ps(load8(x + i + 8 * k), factor));
    const __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(c[0], c[1]), _mm256_packus_epi32(c[2], c[3]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), _mm256_permutevar8x32_epi32(bytes, in_order));
  }
  encode_scalar(x + i, n - i, inverse, codes + i);
}

SLIMX_TARGET_AVX512 inline __m512 load16(const uint16_t* x) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

SLIMX_TARGET_AVX512 inline __m512 load16(const uint32_t* x) { return _mm512_loadu_ps(x); }

SLIMX_TARGET_AVX512 inline __m128i codes16(__m512 x) {
  const __m512i a = _mm512_castps_si512(_mm512_range_ps(x, _mm512_set1_ps(SLIMX_MAX_E4M3), 0xA));  // min of magnitudes
  const __m512i power =
      _mm512_and_si512(_mm512_max_epi32(a, _mm512_set1_epi32(SLIMX_NORMAL_BITS)), _mm512_set1_epi32(0x7F800000));
  const __m512 rounder = _mm512_castsi512_ps(_mm512_add_epi32(power, _mm512_set1_epi32(SLIMX_ROUNDER)));
  const __m512i sum = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), rounder));
  const __m512i code =
      _mm512_add_epi32(sum, _mm512_srli_epi32(power, 20));  // bit 7 is 0; the conversion drops higher bits
  const __m512i sign = _mm512_srli_epi32(_mm512_castps_si512(x), 24);
  return _mm512_cvtepi32_epi8(_mm512_ternarylogic_epi32(code, sign, _mm512_set1_epi32(0x80), 0xF8));  // a | (b & c)
}

template <class T>
SLIMX_TARGET_AVX512 void encode_avx512(const T* x, int64_t n, float inverse, uint8_t* codes) {
  const __m512 factor = _mm512_set1_ps(inverse);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), codes16(_mm512_mul_ps(load16(x + i), factor)));
  encode_scalar(x + i, n - i, inverse, codes + i);
}

// Positions of the low bytes of 64 16-bit words in two vectors.
alignas(64) constexpr uint8_t kLowBytes[64] = {
    0,  2,  4,  6,  8,  10, 12,  14,  16,  18,  20,  22,  24,  26,  28,  30,  32,  34,  36,  38, 40, 42,
    44, 46, 48, 50, 52, 54, 56,  58,  60,  62,  64,  66,  68,  70,  72,  74,  76,  78,  80,  82, 84, 86,
    88, 90, 92, 94, 96, 98, 100, 102, 104, 106, 108, 110, 112, 114, 116, 118, 120, 122, 124, 126};

SLIMX_TARGET_AVX512 inline void make_corrections(float inverse, Corrections& out) {
  // Any exponent works as long as x and its code are normal. With this one x * inverse is in [1, 4).
  const int32_t exponent = 254 - int32_t(slimx_bits(inverse) >> 23);
  out.usable = exponent >= 1 && exponent <= 253;
  if (!out.usable) return;
  uint16_t x[128];
  for (int m = 0; m < 128; ++m) x[m] = uint16_t(exponent << 7 | m);
  encode_avx512(x, 128, inverse, out.bytes);
  for (int m = 0; m < 128; ++m) out.bytes[m] = uint8_t(out.bytes[m] - (x[m] >> 4));
  const float normal = slimx_float(SLIMX_NORMAL_BITS);
  out.least = std::max<uint16_t>(0x80, uint16_t(slimx_bits(slimx_div(normal, inverse)) >> 16));
  while (slimx_mul(slimx_from_bf16(out.least), inverse) < normal) ++out.least;
}

SLIMX_TARGET_AVX512 inline void encode_corrected(const uint16_t* x, int64_t n, float inverse, const Corrections& table,
                                                 uint8_t* codes) {
  const __m512i first = _mm512_load_si512(table.bytes), second = _mm512_load_si512(table.bytes + 64);
  const __m512i twice_least = _mm512_set1_epi16(int16_t(2 * table.least));
  const __m512i low_bytes = _mm512_load_si512(kLowBytes);
  const __m512i high_bytes = _mm512_add_epi8(low_bytes, _mm512_set1_epi8(1));
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    const __m512i a = _mm512_loadu_si512(x + i), b = _mm512_loadu_si512(x + i + 32);
    const __mmask32 small = _mm512_cmplt_epu16_mask(_mm512_add_epi16(a, a), twice_least) |
                            _mm512_cmplt_epu16_mask(_mm512_add_epi16(b, b), twice_least);
    if (small) {
      encode_avx512(x + i, 64, inverse, codes + i);
      continue;
    }
    const __m512i mantissas = _mm512_permutex2var_epi8(a, low_bytes, b);  // the look-up ignores bit 7
    const __m512i cut = _mm512_permutex2var_epi8(_mm512_srli_epi16(a, 4), low_bytes, _mm512_srli_epi16(b, 4));
    const __m512i signs = _mm512_permutex2var_epi8(a, high_bytes, b);
    const __m512i code = _mm512_add_epi8(cut, _mm512_permutex2var_epi8(first, mantissas, second));
    _mm512_storeu_si512(codes + i, _mm512_ternarylogic_epi32(signs, code, _mm512_set1_epi8(-128), 0xE4));  // c ? a : b
  }
  encode_avx512(x + i, n - i, inverse, codes + i);
}

#endif

}  // namespace slimx
