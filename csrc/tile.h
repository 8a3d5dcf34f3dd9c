// tile.h: what becomes of one tile, for each op. A tile is a piece small enough for one thread's cache.
//
// What an op computes goes to a short buffer in the cache, and from there by `put` to the bucket and into the checksum.
#pragma once

#include "isa.h"

namespace slimx {

// Elements of a row that are converted at a time. A tile of several blocks in a row has no more than these columns.
constexpr int64_t kChunk = 2048;

// What a tile adds to its tensors.
struct Share {
  uint64_t values = 0, scales = 0;  // checksums
  bool nonfinite = false;
};

SLIMX_INLINE const uint8_t* source_row(const SlimxPiece& p, int64_t r) {
  return reinterpret_cast<const uint8_t*>(p.src) + r * p.src_ld;
}

// ---- copies ---------------------------------------------------------------------------------------------------------

template <class Isa, bool kCopy>
SLIMX_INLINE Share copy_tile(const SlimxPiece& p, uint8_t* bucket) {
  const int64_t row_bytes = p.cols * p.item, rows_ahead = (kAhead + row_bytes - 1) / row_bytes;
  const int64_t ahead = row_bytes > kAhead ? kAhead : rows_ahead * p.src_ld;
  Share share;
  for (int64_t r = 0; r < p.rows; ++r) {
    uint8_t* to = kCopy ? bucket + p.dst + r * p.dst_ld : nullptr;
    share.values += put<Isa, kCopy>(source_row(p, r), to, row_bytes, p.pos + r * p.pos_ld, ahead);
  }
  return share;
}

// T: the type of an element. A chunk is checked on its way into the cache and then copied from there.
template <class Isa, class T>
SLIMX_INLINE Share checked_copy_tile(const SlimxPiece& p, uint8_t* bucket) {
  Share share;
  uint32_t most = 0;
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t c = 0; c < p.cols; c += kChunk) {
      const int64_t n = std::min(kChunk, p.cols - c), at = c * int64_t(sizeof(T));
      const uint8_t* from = source_row(p, r) + at;
      most = std::max(most, largest(reinterpret_cast<const T*>(from), n));
      share.values +=
          put<Isa, true>(from, bucket + p.dst + r * p.dst_ld + at, n * sizeof(T), p.pos + r * p.pos_ld + at);
    }
  share.nonfinite = most >= kInfinite<T>;
  return share;
}

// bf16 <-> fp32.
template <class Isa, class From, class To>
SLIMX_INLINE Share convert_tile(const SlimxPiece& p, uint8_t* bucket) {
  alignas(64) To out[kChunk];
  Share share;
  uint32_t most = 0;
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t c = 0; c < p.cols; c += kChunk) {
      const int64_t n = std::min(kChunk, p.cols - c), at = c * int64_t(sizeof(To));
      convert(reinterpret_cast<const From*>(source_row(p, r)) + c, n, out);
      most = std::max(most, largest(out, n));
      share.values += put<Isa, true>(reinterpret_cast<uint8_t*>(out), bucket + p.dst + r * p.dst_ld + at,
                                     n * sizeof(To), p.pos + r * p.pos_ld + at);
    }
  share.nonfinite = most >= kInfinite<To>;
  return share;
}

}  // namespace slimx
