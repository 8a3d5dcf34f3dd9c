// words.h: the inner loop of the CPU kernels: copies a run of words and returns its contribution to the checksum.
//
// Each function copies `words` 4-byte words from src to dst (if kCopy) and returns the sum of w_i * B_i, where the
// first word has index `first` in its tensor, and the largest magnitude of an element (kElement bytes: 2 for bf16, 4
// for fp32, 0 for none), as bits. Any byte alignment is allowed. All functions do the same integer arithmetic, so they
// give the same bits. The vector loops are explicit because GCC 12 does not find a 32 x 32 -> 64 bit multiply in the
// scalar one: compiled for the same processor, that ran at a third to a half of their speed.
#pragma once

#include <algorithm>

#include "intrinsics.h"
#include "reshard.h"

#if defined(__x86_64__)
#define SLIMX_TARGET_AVX2 __attribute__((target("avx2")))
#define SLIMX_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")))
#endif

namespace slimx {

// Distance of prefetches in the vector loops, in bytes in the order of reading. The processor's own prefetch starts
// anew on every page and on every row of a strided source. A prefetch never faults, so it may refer to addresses past
// the end.
constexpr int64_t kAhead = 4096;

struct Summed {
  uint64_t sum = 0;
  uint32_t most = 0;

  void add(const Summed& other) {
    sum += other.sum;
    most = std::max(most, other.most);
  }
};

// `dst`: nullptr without kCopy. `ahead`: distance from a source byte to the one that is read kAhead bytes later.
using Words = Summed (*)(const uint8_t* src, uint8_t* dst, int64_t words, uint32_t first, int64_t ahead);

// Returns the largest magnitude among a word's elements.
template <int kElement>
inline uint32_t most_of_word(uint32_t word) {
  if (kElement == 2) return std::max(word & 0x7FFFu, word >> 16 & 0x7FFFu);
  return kElement == 4 ? word & 0x7FFFFFFFu : 0u;
}

template <bool kCopy, int kElement>
Summed words_scalar(const uint8_t* __restrict src, uint8_t* __restrict dst, int64_t words, uint32_t first,
                    int64_t /* ahead */ = 0) {
  using Word = uint32_t __attribute__((aligned(1), may_alias));
  const Word* from = reinterpret_cast<const Word*>(src);
  Word* to = reinterpret_cast<Word*>(dst);
  Summed out;
  for (int64_t k = 0; k < words; ++k) {
    const uint32_t word = from[k];
    if (kCopy) to[k] = word;
    out.sum += uint64_t(word) * slimx_multiplier(first + uint32_t(k));
    if (kElement) out.most = std::max(out.most, most_of_word<kElement>(word));
  }
  return out;
}

#if defined(__x86_64__)

// Returns the number of words to copy before `dst` reaches a cache line, from which on stores bypass the cache; -1 if
// no word starts at a line. A bucket is larger than any cache, and a line that is written whole need not be read first.
// With prefetching, on a Xeon and for 256 MiB, this was 1.5 times as fast as plain stores for one run, and about twice
// for short rows.
inline int64_t words_to_line(const uint8_t* dst, int64_t words) {
  const int64_t bytes = -reinterpret_cast<int64_t>(dst) & 63;
  return bytes % 4 ? -1 : std::min(bytes / 4, words);
}

// Orders streaming stores before later ones; must be called before a tile is reported as done.
inline void finish_stores() { _mm_sfence(); }

template <bool kCopy, int kElement>
SLIMX_TARGET_AVX512 Summed words_avx512(const uint8_t* src, uint8_t* dst, int64_t words, uint32_t first,
                                        int64_t ahead) {
  const int64_t head = kCopy ? words_to_line(dst, words) : -1;
  const bool stream = head >= 0;
  int64_t k = std::max<int64_t>(head, 0);
  Summed out = words_scalar<kCopy, kElement>(src, dst, k, first);

  const __m512i one = _mm512_set1_epi32(1), step = _mm512_set1_epi32(16 * SLIMX_K1), k2 = _mm512_set1_epi32(SLIMX_K2);
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  __m512i x = _mm512_add_epi32(lane, _mm512_set1_epi32(first + uint32_t(k)));
  x = _mm512_add_epi32(_mm512_mullo_epi32(x, _mm512_set1_epi32(SLIMX_K1)), _mm512_set1_epi32(SLIMX_S1));
  const __m512i magnitude = _mm512_set1_epi32(kElement == 2 ? 0x7FFF7FFF : 0x7FFFFFFF);
  __m512i even = _mm512_setzero_si512(), odd = even, most = even;
  for (; k + 16 <= words; k += 16) {
    _mm_prefetch(reinterpret_cast<const char*>(src + 4 * k + ahead), _MM_HINT_T1);
    const __m512i w = _mm512_loadu_si512(src + 4 * k);
    if (kCopy && stream)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 4 * k), w);
    else if (kCopy)
      _mm512_storeu_si512(dst + 4 * k, w);
    __m512i b = _mm512_or_si512(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)), one);
    b = _mm512_mullo_epi32(b, k2);
    b = _mm512_or_si512(_mm512_xor_si512(b, _mm512_srli_epi32(b, 15)), one);
    if (kElement == 2) most = _mm512_max_epu16(most, _mm512_and_si512(w, magnitude));
    if (kElement == 4) most = _mm512_max_epu32(most, _mm512_and_si512(w, magnitude));
    even = _mm512_add_epi64(even, _mm512_mul_epu32(w, b));
    odd = _mm512_add_epi64(odd, _mm512_mul_epu32(_mm512_srli_epi64(w, 32), _mm512_srli_epi64(b, 32)));
    x = _mm512_add_epi32(x, step);
  }
  uint64_t lanes[8];  // because _mm512_reduce_add_epi64 adds signed numbers, whose overflow is undefined
  uint32_t magnitudes[16];
  _mm512_storeu_si512(lanes, _mm512_add_epi64(even, odd));
  _mm512_storeu_si512(magnitudes, most);
  for (const uint64_t lane : lanes) out.sum += lane;
  for (const uint32_t lane : magnitudes) out.most = std::max(out.most, most_of_word<kElement>(lane));
  out.add(words_scalar<kCopy, kElement>(src + 4 * k, kCopy ? dst + 4 * k : nullptr, words - k, first + uint32_t(k)));
  return out;
}

template <bool kCopy, int kElement>
SLIMX_TARGET_AVX2 Summed words_avx2(const uint8_t* src, uint8_t* dst, int64_t words, uint32_t first, int64_t ahead) {
  const int64_t head = kCopy ? words_to_line(dst, words) : -1;
  const bool stream = head >= 0;
  int64_t k = std::max<int64_t>(head, 0);
  Summed out = words_scalar<kCopy, kElement>(src, dst, k, first);

  const __m256i one = _mm256_set1_epi32(1), step = _mm256_set1_epi32(8 * SLIMX_K1), k2 = _mm256_set1_epi32(SLIMX_K2);
  __m256i x = _mm256_add_epi32(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set1_epi32(first + uint32_t(k)));
  x = _mm256_add_epi32(_mm256_mullo_epi32(x, _mm256_set1_epi32(SLIMX_K1)), _mm256_set1_epi32(SLIMX_S1));
  const __m256i magnitude = _mm256_set1_epi32(kElement == 2 ? 0x7FFF7FFF : 0x7FFFFFFF);
  __m256i even = _mm256_setzero_si256(), odd = even, most = even;
  while (k + 16 <= words) {
    _mm_prefetch(reinterpret_cast<const char*>(src + 4 * k + ahead), _MM_HINT_T1);
    for (int half = 0; half < 2; ++half, k += 8) {  // streams a whole cache line
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 4 * k));
      if (kCopy && stream)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 4 * k), w);
      else if (kCopy)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 4 * k), w);
      __m256i b = _mm256_or_si256(_mm256_xor_si256(x, _mm256_srli_epi32(x, 16)), one);
      b = _mm256_mullo_epi32(b, k2);
      b = _mm256_or_si256(_mm256_xor_si256(b, _mm256_srli_epi32(b, 15)), one);
      if (kElement == 2) most = _mm256_max_epu16(most, _mm256_and_si256(w, magnitude));
      if (kElement == 4) most = _mm256_max_epu32(most, _mm256_and_si256(w, magnitude));
      even = _mm256_add_epi64(even, _mm256_mul_epu32(w, b));
      odd = _mm256_add_epi64(odd, _mm256_mul_epu32(_mm256_srli_epi64(w, 32), _mm256_srli_epi64(b, 32)));
      x = _mm256_add_epi32(x, step);
    }
  }
  uint64_t lanes[4];
  uint32_t magnitudes[8];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi64(even, odd));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(magnitudes), most);
  for (const uint64_t lane : lanes) out.sum += lane;
  for (const uint32_t lane : magnitudes) out.most = std::max(out.most, most_of_word<kElement>(lane));
  out.add(words_scalar<kCopy, kElement>(src + 4 * k, kCopy ? dst + 4 * k : nullptr, words - k, first + uint32_t(k)));
  return out;
}

#else

inline void finish_stores() {}

#endif

}  // namespace slimx
