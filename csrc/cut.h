// cut.h: cuts pieces into tiles, which are records of the same kind, small enough for one thread and its cache.
#pragma once

#include <algorithm>
#include <vector>

#include "reshard.h"
#include "tile.h"

namespace slimx {

// Large enough to pay for taking a tile from the shared counter; small enough to balance threads over a bucket, and for
// a band of blocks to stay in a core's L2 cache between its two reads.
constexpr int64_t kTileBytes = 256 << 10;
// A transposed tile is first brought into row order in a buffer: small enough for the L1 cache, and wide and high
// enough that whole cache lines are read and written on both sides.
constexpr int64_t kTransposedBytes = 32 << 10;
constexpr int64_t kTransposedCols = 128;

inline bool is_transposed(const SlimxPiece& p) { return p.src_step != p.item; }

inline bool has_blocks(const SlimxPiece& p) { return p.op >= SLIMX_QUANTIZE_FP8; }

// Bytes that `cols` elements of p occupy in the destination.
inline int64_t written(const SlimxPiece& p, int64_t cols) {
  return (p.op == SLIMX_QUANTIZE_INT4 ? cols / 2 : cols) * p.out;
}

inline int64_t scale_bytes(const SlimxPiece& p) {
  if (p.op == SLIMX_QUANTIZE_INT4) return 2;
  return p.op == SLIMX_QUANTIZE_MXFP8 || p.op == SLIMX_DEQUANTIZE_MXFP8 ? 1 : 4;
}

// Returns rows [row, row + rows) and columns [col, col + cols) of p, which start at blocks, as a separate piece.
inline SlimxPiece part(const SlimxPiece& p, int64_t row, int64_t rows, int64_t col, int64_t cols) {
  SlimxPiece tile = p;
  tile.src += row * p.src_ld + col * p.src_step;
  tile.dst += row * p.dst_ld + written(p, col);
  tile.pos += row * p.pos_ld + written(p, col);
  tile.rows = rows;
  tile.cols = cols;
  if (has_blocks(p)) {
    const int64_t across = col / p.block_cols * scale_bytes(p), down = row / p.block_rows;
    tile.scale += down * p.scale_ld + across;
    tile.scale_pos += down * p.scale_pos_ld + across;
  }
  return tile;
}

// Returns the largest multiple of `unit` that is at most `room`, but at least one unit, and at most `all`.
inline int64_t whole_units(int64_t room, int64_t unit, int64_t all) {
  return std::min(all, std::max<int64_t>(1, room / unit) * unit);
}

// Appends the tiles of p to `tiles`. `copy`: true for slimx_pack, false for slimx_checksum.
inline void cut(std::vector<SlimxPiece>& tiles, SlimxPiece p, bool copy) {
  if (p.rows == 0 || p.cols == 0) return;
  if (p.cols == 1) p.src_step = p.item;
  const int64_t from = p.cols * p.item, to = written(p, p.cols);
  const bool one_run = p.src_ld == from && p.pos_ld == to && (!copy || p.dst_ld == to);
  if (one_run && !is_transposed(p) && !has_blocks(p)) {
    p.cols *= p.rows;
    p.rows = 1;
  }
  const int64_t down = has_blocks(p) ? p.block_rows : 1, across = has_blocks(p) ? p.block_cols : 1;
  const int64_t room = (is_transposed(p) ? kTransposedBytes : kTileBytes) / p.item;  // elements
  const int64_t widest = is_transposed(p) ? kTransposedCols : has_blocks(p) ? kChunk : room;
  const int64_t width = has_blocks(p) ? std::min(widest, kBlocks * across) : widest;
  const int64_t cols = whole_units(std::min(width, room / std::min(room, down)), across, p.cols);
  const int64_t rows = whole_units(room / std::min(room, cols), down, p.rows);
  for (int64_t row = 0; row < p.rows; row += rows)
    for (int64_t col = 0; col < p.cols; col += cols)
      tiles.push_back(part(p, row, std::min(rows, p.rows - row), col, std::min(cols, p.cols - col)));
}

}  // namespace slimx
