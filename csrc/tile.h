// tile.h: processes one tile, for each op. A tile is a piece small enough for one thread's cache.
//
// The result of an op is written to a short buffer in the cache, from which `put` copies it to the bucket and adds it
// to the checksum.
#pragma once

#include "isa.h"

namespace slimx {

// Number of elements of a row that are converted at a time, and maximum columns of a tile with several blocks in a row.
constexpr int64_t kChunk = 2048;
// Maximum number of blocks in a row of a tile.
constexpr int64_t kBlocks = 64;

// Contribution of a tile to the checksums and flags of its tensors.
struct Share {
  uint64_t values = 0, scales = 0;  // checksums
  bool nonfinite = false;
};

SLIMX_INLINE const uint8_t* source_row(const SlimxPiece& p, int64_t r) {
  return reinterpret_cast<const uint8_t*>(p.src) + r * p.src_ld;
}

// ---- copies ---------------------------------------------------------------------------------------------------------

// kElement: bytes of an element, to check that all are finite; 0 for no check.
template <class Isa, bool kCopy, int kElement>
SLIMX_INLINE Share copy_tile(const SlimxPiece& p, uint8_t* bucket) {
  const int64_t row_bytes = p.cols * p.item, rows_ahead = (kAhead + row_bytes - 1) / row_bytes;
  const int64_t ahead = row_bytes > kAhead ? kAhead : rows_ahead * p.src_ld;
  Summed all;
  for (int64_t r = 0; r < p.rows; ++r) {
    uint8_t* to = kCopy ? bucket + p.dst + r * p.dst_ld : nullptr;
    all.add(put<Isa, kCopy, kElement>(source_row(p, r), to, row_bytes, p.pos + r * p.pos_ld, ahead));
  }
  return {all.sum, 0, kElement && all.most >= (kElement == 2 ? SLIMX_INF_BF16 : SLIMX_INF_FP32)};
}

// Converts bf16 to fp32 or fp32 to bf16.
template <class Isa, class From, class To>
SLIMX_INLINE Share convert_tile(const SlimxPiece& p, uint8_t* bucket) {
  alignas(64) To out[kChunk];
  Summed all;
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t c = 0; c < p.cols; c += kChunk) {
      const int64_t n = std::min(kChunk, p.cols - c), at = c * int64_t(sizeof(To));
      convert(reinterpret_cast<const From*>(source_row(p, r)) + c, n, out);
      all.add(put<Isa, true, sizeof(To)>(reinterpret_cast<uint8_t*>(out), bucket + p.dst + r * p.dst_ld + at,
                                         n * sizeof(To), p.pos + r * p.pos_ld + at));
    }
  return {all.sum, 0, all.most >= kInfinite<To>};
}

}  // namespace slimx
