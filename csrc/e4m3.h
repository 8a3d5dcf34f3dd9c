// e4m3.h: a run of elements to e4m3 codes, in vectors.
//
// The steps of slimx_e4m3_number in csrc/numerics.h, 8 or 16 elements at a time. Written out because GCC 12 makes jumps
// of its minimum and maximum and then vectorises nothing (AVX2) or badly (AVX-512). Sources: bf16 or fp32, as bits.
#pragma once

#include "words.h"

namespace slimx {

inline float element(uint16_t x) { return slimx_from_bf16(x); }
inline float element(uint32_t x) { return slimx_float(x); }

// codes[i] of x[i] * inverse, for finite products.
template <class T>
void encode_scalar(const T* __restrict x, int64_t n, float inverse, uint8_t* __restrict codes) {
  for (int64_t i = 0; i < n; ++i) codes[i] = slimx_e4m3_number(slimx_mul(element(x[i]), inverse));
}

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
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs work on each half apart
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
  const __m512i code = _mm512_add_epi32(sum, _mm512_srli_epi32(power, 20));  // bit 7 is 0, the conversion cuts the rest
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

#endif

}  // namespace slimx
