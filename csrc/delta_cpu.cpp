// delta_cpu.cpp: encodes and applies frames of changes (delta.h) on the CPU, one chunk per thread at a time.
#include <omp.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "delta.h"
#include "intrinsics.h"

namespace {

constexpr int64_t kChunk = SLIMX_DELTA_CHUNK;
constexpr int64_t kMostGroups = kChunk / SLIMX_DELTA_GROUP;  // for elements of one byte

constexpr int64_t kBatch = 4;  // chunks that a thread takes at once

// Number of threads for `chunks` chunks: waking another thread takes longer than encoding a few chunks.
int team(int64_t chunks, int threads) { return int(std::clamp<int64_t>(chunks / kBatch, 1, threads)); }

int64_t chunk_bytes(int64_t bytes, int64_t chunk) { return std::min(kChunk, bytes - chunk * kChunk); }
int64_t groups_of(int64_t chunk, int item) { return chunk / (SLIMX_DELTA_GROUP * item); }
int64_t bytes_of_bits(int64_t groups) { return (groups + 7) / 8; }

// Bit e of the result is 1 if element e of a group of eight differs.
template <int kItem>
SLIMX_INLINE uint32_t differing(const uint8_t* a, const uint8_t* b) {
#if defined(__x86_64__)
  if (kItem == 2) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
    const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
    const __m128i same = _mm_packs_epi16(_mm_cmpeq_epi16(x, y), _mm_setzero_si128());
    return ~uint32_t(_mm_movemask_epi8(same)) & 0xFFu;
  }
  const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(a));
  const __m128i y = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b));
  return ~uint32_t(_mm_movemask_epi8(_mm_cmpeq_epi8(x, y))) & 0xFFu;
#else
  uint32_t mask = 0;
  for (int e = 0; e < SLIMX_DELTA_GROUP; ++e) mask |= uint32_t(memcmp(a + e * kItem, b + e * kItem, kItem) != 0) << e;
  return mask;
#endif
}

// Encodes a chunk in `body`, which has room for the chunk's bytes; returns the bytes of the body.
template <int kItem>
int64_t encode_chunk(const uint8_t* base, const uint8_t* fresh, int64_t bytes, uint8_t* body) {
  uint8_t bits[kMostGroups / 8], masks[kMostGroups];
  // Elements are collected separately, because the number of masks before them is not known yet.
  alignas(16) uint8_t elements[kChunk];
  const int64_t groups = groups_of(bytes, kItem), first = bytes_of_bits(groups);
  memset(bits, 0, size_t(first));
  int64_t changed = 0, count = 0;  // groups, bytes
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = g * SLIMX_DELTA_GROUP * kItem;
    uint32_t mask = differing<kItem>(base + at, fresh + at);
    if (!mask) continue;
    bits[g / 8] = uint8_t(bits[g / 8] | 1u << g % 8);
    masks[changed++] = uint8_t(mask);
    for (; mask; mask &= mask - 1, count += kItem)
      memcpy(elements + count, fresh + at + __builtin_ctz(mask) * kItem, kItem);
  }
  if (!changed) return 0;
  if (first + changed + count >= bytes) {
    memcpy(body, fresh, size_t(bytes));
    return bytes;
  }
  memcpy(body, bits, size_t(first));
  memcpy(body + first, masks, size_t(changed));
  memcpy(body + first + changed, elements, size_t(count));
  return first + changed + count;
}

// Applies a body of `size` bytes to a chunk, or with `kDry` only checks that it can be applied; returns false if it
// cannot. Reads nothing outside the body and writes nothing outside the chunk, whatever the body contains and however
// it changes.
template <int kItem, bool kDry>
bool apply_chunk(const uint8_t* body, int64_t size, uint8_t* chunk, int64_t bytes) {
  if (size == 0) return true;
  if (size == bytes) {
    if (!kDry) memcpy(chunk, body, size_t(bytes));
    return true;
  }
  const int64_t groups = groups_of(bytes, kItem), first = bytes_of_bits(groups);
  if (size < first) return false;
  int64_t changed = 0;
  for (int64_t k = 0; k < first; ++k) changed += __builtin_popcount(body[k]);
  int64_t mask_at = first, at = first + changed;
  const int64_t masks_end = at;
  if (masks_end > size) return false;
  for (int64_t k = 0; k < first; ++k)
    for (uint32_t left = body[k]; left; left &= left - 1) {
      const int64_t g = 8 * k + __builtin_ctz(left);
      if (g >= groups || mask_at >= masks_end) return false;
      uint32_t mask = body[mask_at++];
      const int64_t taken = __builtin_popcount(mask) * kItem;
      if (!mask || at + taken > size) return false;
      if (!kDry) {
        uint8_t* group = chunk + g * SLIMX_DELTA_GROUP * kItem;
        for (int64_t from = at; mask; mask &= mask - 1, from += kItem)
          memcpy(group + __builtin_ctz(mask) * kItem, body + from, kItem);
      }
      at += taken;
    }
  return at == size && mask_at == masks_end;
}

template <int kItem>
int64_t encode(const uint8_t* base, const uint8_t* fresh, int64_t bytes, uint8_t* frame, int threads) {
  const int64_t chunks = slimx_delta_chunks(bytes);
  uint8_t* bodies = frame + 4 * chunks;
#pragma omp parallel for num_threads(team(chunks, threads)) schedule(static, kBatch)
  for (int64_t k = 0; k < chunks; ++k) {
    const int64_t at = k * kChunk, own = chunk_bytes(bytes, k);
    uint32_t size = uint32_t(own);
    if (base)
      size = uint32_t(encode_chunk<kItem>(base + at, fresh + at, own, bodies + at));
    else
      memcpy(bodies + at, fresh + at, size_t(own));
    memcpy(frame + 4 * k, &size, 4);
  }
  int64_t end = 0;
  for (int64_t k = 0; k < chunks; ++k) {  // a body never moves past the start of its own chunk
    uint32_t size;
    memcpy(&size, frame + 4 * k, 4);
    if (end != k * kChunk) memmove(bodies + end, bodies + k * kChunk, size);
    end += size;
  }
  return 4 * chunks + end;
}

template <int kItem>
bool apply(const uint8_t* frame, const std::vector<int64_t>& starts, uint8_t* base, int64_t bytes, int threads) {
  const int64_t chunks = int64_t(starts.size()) - 1;
  std::atomic<bool> good{true};
  const auto all = [&](auto dry) {
#pragma omp parallel for num_threads(team(chunks, threads)) schedule(static, kBatch)
    for (int64_t k = 0; k < chunks; ++k)
      if (!apply_chunk<kItem, decltype(dry)::value>(frame + starts[k], starts[k + 1] - starts[k], base + k * kChunk,
                                                    chunk_bytes(bytes, k)))
        good = false;
    return good.load();
  };
  return all(std::true_type()) && all(std::false_type());
}

}  // namespace

SlimxStatus slimx_delta_encode(const uint8_t* base, const uint8_t* fresh, int64_t bytes, int item, uint8_t* frame,
                               int64_t* length, int threads) {
  *length = item == 2 ? encode<2>(base, fresh, bytes, frame, threads) : encode<1>(base, fresh, bytes, frame, threads);
  return SLIMX_OK;
}

int slimx_delta_apply(const uint8_t* frame, int64_t length, uint8_t* base, int64_t bytes, int item, int threads) {
  const int64_t chunks = slimx_delta_chunks(bytes);
  if (length < 4 * chunks) return SLIMX_DELTA_BROKEN;
  std::vector<int64_t> starts;  // copied, because the sizes in the frame could change
  try {
    starts.reserve(size_t(chunks) + 1);
  } catch (const std::bad_alloc&) {
    return SLIMX_NO_MEMORY;
  }
  starts.push_back(4 * chunks);
  for (int64_t k = 0; k < chunks; ++k) {
    uint32_t size;
    memcpy(&size, frame + 4 * k, 4);
    if (int64_t(size) > chunk_bytes(bytes, k)) return SLIMX_DELTA_BROKEN;
    starts.push_back(starts.back() + size);
  }
  if (starts.back() != length) return SLIMX_DELTA_BROKEN;
  const bool good =
      item == 2 ? apply<2>(frame, starts, base, bytes, threads) : apply<1>(frame, starts, base, bytes, threads);
  return good ? int(SLIMX_OK) : SLIMX_DELTA_BROKEN;
}
