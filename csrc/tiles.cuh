// tiles.cuh: divides a piece into the tiles that thread blocks process one by one. Host and GPU both compute this from
// the record alone: the host to count tiles, a thread block to locate its tile.
#pragma once

#include <stdint.h>

#include "reshard.h"

namespace slimx {

constexpr int kThreads = 256;  // threads in a thread block
constexpr int kWarp = 32;
constexpr int kUnits = 8;   // units of a row-major tile per thread
constexpr int kVector = 8;  // elements of a unit, if memory is aligned for that
constexpr int kTileUnits = kUnits * kThreads;
constexpr int kEdge = 128;   // longest side of a quantization block that a thread block holds in its stage
constexpr int kMxCols = 32;  // columns of an MXFP8 block or INT4 group on the vector path

enum class Kernel : int32_t { kPack, kChecksum };

// Code path by which a thread block processes a tile.
enum class Path : uint8_t {
  kCopy16,        // units of 16, 4, 2 or 1 bytes: the largest that all addresses and row lengths allow; transposed
                  // elements are units of 4 or 2 bytes
  kCopy4,         //
  kCopy2,         //
  kCopy1,         //
  kCopyItems,     // units of one element of any size, at any address
  kVectors,       // element-wise ops, MXFP8 and INT4: units of kVector elements
  kElements,      // element-wise ops: units of one element
  kBlock,         // one quantization block, in the stage
  kBlocksByWarp,  // any other quantization blocks, each read twice by one warp
};

// A piece as rows x units, of which each tile takes the next `tile_units` in row-major order. On the last two paths a
// unit is a quantization block.
struct Cut {
  Path path;
  int32_t rows, units, tile_units;
};

SLIMX_INLINE bool aligned(uint64_t bits, uint64_t bytes) { return (bits & (bytes - 1)) == 0; }

// Shared memory of a thread block: two words per warp, and the stage, in which each thread has slots.
constexpr int kSlot = 16;  // bytes
constexpr int kScratch = 2 * 4 * (kThreads / kWarp);
SLIMX_INLINE constexpr int shared_bytes(int slots) { return kScratch + slots * kSlot * kThreads; }

SLIMX_INLINE int32_t ceil_div(int64_t a, int64_t b) { return int32_t((a + b - 1) / b); }

// Returns the row length, or 0 for a single row, whose length does not matter to alignment.
SLIMX_INLINE uint64_t apart(const SlimxPiece& p, int64_t ld) { return p.rows > 1 ? uint64_t(ld) : 0; }

SLIMX_INLINE Cut cut_apart(const SlimxPiece& p, bool to_bucket) {
  const uint64_t written = to_bucket ? p.dst | apart(p, p.dst_ld) : 0;
  const uint64_t bits = p.src | p.src_step | apart(p, p.src_ld) | written | p.pos | apart(p, p.pos_ld);
  const bool natural = aligned(bits, p.item) && (p.item == 2 || p.item == 4);
  const Path path = !natural ? Path::kCopyItems : p.item == 2 ? Path::kCopy2 : Path::kCopy4;
  return {path, int32_t(p.rows), int32_t(p.cols), kTileUnits};
}

SLIMX_INLINE Cut cut_copy(const SlimxPiece& p, bool to_bucket) {
  if (p.src_step != p.item) return cut_apart(p, to_bucket);
  const int64_t bytes = p.cols * p.item;
  const bool one_run = p.src_ld == bytes && p.pos_ld == bytes && (!to_bucket || p.dst_ld == bytes);
  const bool join = one_run && p.rows * bytes < INT32_MAX;  // else `units` could overflow
  const int64_t rows = join ? 1 : p.rows, row_bytes = join ? p.rows * bytes : bytes;
  const uint64_t between = join ? 0 : apart(p, p.src_ld | (to_bucket ? p.dst_ld : 0));
  const uint64_t memory = p.src | (to_bucket ? p.dst : 0) | between | uint64_t(row_bytes);
  const uint64_t place = p.pos | (join ? 0 : apart(p, p.pos_ld));
  const auto cut = [&](Path path, int64_t unit) -> Cut {
    return {path, int32_t(rows), int32_t(row_bytes / unit), kTileUnits};
  };
  if (aligned(memory, 16) && aligned(place, 4)) return cut(Path::kCopy16, 16);
  if (aligned(memory | place, 4)) return cut(Path::kCopy4, 4);
  if (aligned(memory | place, 2)) return cut(Path::kCopy2, 2);
  return cut(Path::kCopy1, 1);
}

// Returns true if units of kVector elements can be read and written whole, and start at words of the destination
// tensor.
SLIMX_INLINE bool vectors_fit(const SlimxPiece& p) {
  const uint64_t read = p.item == 1 ? 8 : 16, written = p.out == 1 ? 8 : 16;
  return p.src_step == p.item && aligned(uint64_t(p.cols), kVector) && aligned(p.src | apart(p, p.src_ld), read) &&
         aligned(p.dst | apart(p, p.dst_ld), written) && aligned(p.pos | apart(p, p.pos_ld), 4);
}

// A tile has half as many units of fp32, which have 32 bytes and take two slots.
SLIMX_INLINE Cut cut_vectors(const SlimxPiece& p) {
  return {Path::kVectors, int32_t(p.rows), int32_t(p.cols / kVector), p.item == 4 ? kTileUnits / 2 : kTileUnits};
}

SLIMX_INLINE Cut cut_elements(const SlimxPiece& p) {
  return {Path::kElements, int32_t(p.rows), int32_t(p.cols), kTileUnits};
}

SLIMX_INLINE Cut cut_quantized(const SlimxPiece& p) {
  const int32_t rows = ceil_div(p.rows, p.block_rows), cols = ceil_div(p.cols, p.block_cols);
  const bool vectors = vectors_fit(p);
  const bool narrow = p.op == SLIMX_QUANTIZE_MXFP8 || p.op == SLIMX_QUANTIZE_INT4;
  if (narrow && vectors && p.block_rows == 1 && p.block_cols == kMxCols && p.cols % kMxCols == 0) return cut_vectors(p);
  const bool large = p.block_rows >= kEdge / 8;  // small blocks would leave most threads idle
  const bool held = large && p.block_rows <= kEdge && p.block_cols <= kEdge && p.block_cols % kVector == 0;
  if (p.op == SLIMX_QUANTIZE_FP8 && vectors && held) return {Path::kBlock, rows, cols, 1};
  return {Path::kBlocksByWarp, rows, cols, kThreads / kWarp};
}

// `p` must not be empty. The number of its rows, and the bytes of a row in source and destination, must be below 2^31.
SLIMX_INLINE Cut cut_of(const SlimxPiece& p, Kernel kernel) {
  if (kernel == Kernel::kChecksum) return cut_copy(p, false);
  switch (p.op) {
    case SLIMX_COPY:
    case SLIMX_COPY_CHECKED:
      return cut_copy(p, true);
    case SLIMX_QUANTIZE_FP8:
    case SLIMX_QUANTIZE_MXFP8:
    case SLIMX_QUANTIZE_INT4:
      return cut_quantized(p);
    case SLIMX_DEQUANTIZE_FP8:
    case SLIMX_DEQUANTIZE_MXFP8:
      return vectors_fit(p) && p.block_cols % kVector == 0 ? cut_vectors(p) : cut_elements(p);
    default:
      return vectors_fit(p) ? cut_vectors(p) : cut_elements(p);
  }
}

// ---- on the host ----------------------------------------------------------------------------------------------------

// first[k] = number of tiles before piece k, for k = 0 .. n. `slots`: number of slots of the stage that each thread
// needs.
inline void count_tiles(const SlimxPiece* pieces, int64_t n, Kernel kernel, int64_t* first, int* slots) {
  first[0] = 0;
  *slots = kUnits;
  for (int64_t k = 0; k < n; ++k) {
    int64_t tiles = 0;
    if (pieces[k].rows > 0 && pieces[k].cols > 0) {
      const Cut cut = cut_of(pieces[k], kernel);
      tiles = (int64_t(cut.rows) * cut.units + cut.tile_units - 1) / cut.tile_units;
      if (cut.path == Path::kBlock && pieces[k].item == 4) *slots = 2 * kUnits;
    }
    first[k + 1] = first[k] + tiles;
  }
}

}  // namespace slimx
