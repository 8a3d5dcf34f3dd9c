// quantize.cuh: tiles of the quantizing ops: computes a block's scale from its largest magnitude, and then its codes.
#pragma once

#include "elements.cuh"

namespace slimx {

// Two words per warp, so that the next tile can write one while slow warps still read the other.
struct Scratch {
  uint32_t most[2][kThreads / kWarp];
};
static_assert(sizeof(Scratch) == kScratch && kScratch % kSlot == 0, "shared_bytes");

// Returns the scale of a block; `amax` must be finite.
__device__ __forceinline__ SlimxScale scale_of(int rule, float amax, int item) {
  if (rule != SLIMX_RULE_TRITON) return slimx_scale(rule, amax, item);
  const float s = divide_full(slimx_at_least(amax, SLIMX_LEAST_AMAX), SLIMX_MAX_E4M3);
  return {s, divide_full(1.0f, s), 0};
}

__device__ __forceinline__ void write_scale_fp32(const SlimxPiece& p, int32_t row, int32_t col, float scale,
                                                 uint8_t* bucket, Found& found) {
  *reinterpret_cast<float*>(bucket + p.scale + row * p.scale_ld + 4 * int64_t(col)) = scale;
  found.scales += word_share(slimx_bits(scale), p.scale_pos + row * p.scale_pos_ld + 4 * int64_t(col));
}

__device__ __forceinline__ void write_scale_e8m0(const SlimxPiece& p, int32_t row, int32_t col, uint8_t e,
                                                 uint8_t* bucket, Found& found) {
  bucket[p.scale + row * p.scale_ld + col] = e;
  found.scales += part_share(e, p.scale_pos + row * p.scale_pos_ld + col);
}

template <int kItem>
__device__ __forceinline__ Vector<1> codes_of(const Vector<kItem>& v, const SlimxScale& s) {
  float x[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k) x[k] = slimx_mul(element(v, k), s.inverse);
  Vector<1> out = {{e4m3x4(x[0], x[1], x[2], x[3]), e4m3x4(x[4], x[5], x[6], x[7])}};
  if (s.doubled) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const uint32_t shift = 8 * (k % 4), code = out.words[k / 4] >> shift & 0xFFu;
      out.words[k / 4] ^= (code ^ slimx_double_e4m3(uint8_t(code))) << shift;
    }
  }
  return out;
}

__device__ __forceinline__ Vector<1> nan_codes() {
  return {{0x01010101u * SLIMX_NAN_E4M3, 0x01010101u * SLIMX_NAN_E4M3}};
}

__device__ __forceinline__ void write_codes(const SlimxPiece& p, int64_t row, int64_t col, const Vector<1>& codes,
                                            uint8_t* bucket, Found& found) {
  store_vector(bucket + p.dst + row * p.dst_ld + col, codes);
  found.values += share_of(codes, p.pos + row * p.pos_ld + col);
}

// ---- one block of up to kEdge x kEdge elements, in the stage --------------------------------------------------------

// Quantizes block number `block` of the piece, in row-major order. `turn` alternates between 0 and 1 from call to call.
template <int kItem>
__device__ __forceinline__ void quantize_block(const SlimxPiece& p, const Cut& cut, int32_t block, uint8_t* shared,
                                               uint8_t* bucket, Found& found, Scratch& scratch, int turn) {
  constexpr int kLanes = kEdge / kVector, kStep = kThreads / kLanes;  // 16 lanes per row, 16 rows at a time
  const int32_t block_row = block / cut.units, block_col = block % cut.units;
  const int64_t row0 = int64_t(block_row) * p.block_rows, col0 = int64_t(block_col) * p.block_cols;
  const int32_t rows = int32_t(min(int64_t(p.block_rows), p.rows - row0));
  const int32_t cols = int32_t(min(int64_t(p.block_cols), p.cols - col0));
  const int32_t row = int32_t(threadIdx.x) / kLanes, col = int32_t(threadIdx.x) % kLanes * kVector;
  const int32_t mine =
      col < cols && row < rows ? (rows - row + kStep - 1) / kStep : 0;  // number of rows of this thread

  const uint8_t* src = reinterpret_cast<const uint8_t*>(p.src) + (row0 + row) * p.src_ld + (col0 + col) * kItem;
#pragma unroll 4
  for (int j = 0; j < mine; ++j) stage_vector<kItem>(shared, j, src + j * kStep * p.src_ld);
  wait_for_stage();

  uint32_t most = 0;
#pragma unroll 2
  for (int j = 0; j < mine; ++j) most = largest_of(staged_vector<kItem>(shared, j), most);
  most = warp_max(join_halves<kItem>(most));
  if (threadIdx.x % kWarp == 0) scratch.most[turn][threadIdx.x / kWarp] = most;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kThreads / kWarp; ++k) most = max(most, scratch.most[turn][k]);

  const bool poisoned = is_nonfinite<kItem>(most);
  SlimxScale scale = {slimx_float(SLIMX_NAN_FP32), 0.0f, 0};
  if (!poisoned) scale = scale_of(p.rule, as_float<kItem>(most), kItem);
  if (threadIdx.x == 0) write_scale_fp32(p, block_row, block_col, scale.scale, bucket, found);
  found.nonfinite |= poisoned;
#pragma unroll 2
  for (int j = 0; j < mine; ++j) {
    const Vector<1> codes = poisoned ? nan_codes() : codes_of(staged_vector<kItem>(shared, j), scale);
    write_codes(p, row0 + row + j * kStep, col0 + col, codes, bucket, found);
  }
}

// ---- blocks of 1 x 32, each in four neighboring lanes ---------------------------------------------------------------

constexpr int kQuad = kMxCols / kVector;
static_assert(kQuad == 4, "quad_max");

// Calls write(row, col, x, most) for each vector x of this thread. `col` counts vectors; `most` is the largest
// magnitude in the vector's block, as bits. The `col` of the first lane of a block is divisible by kQuad.
template <int kItem, class Write>
__device__ __forceinline__ void for_each_in_quads(const SlimxPiece& p, const Cut& cut, int64_t first, int32_t count,
                                                  uint8_t* shared, const Write& write) {
  const uint8_t* src = reinterpret_cast<const uint8_t*>(p.src);
  Walk from(first + threadIdx.x, cut.units), to = from;
#pragma unroll 2
  for (int j = 0; int(threadIdx.x) + j * kThreads < count; ++j, from.step())
    stage_vector<kItem>(shared, j, src + from.at(p.src_ld, kVector * kItem));
  wait_for_stage();

#pragma unroll 1
  for (int j = 0; j * kThreads < count; ++j, to.step()) {  // all lanes iterate equally often, because they share amax
    const bool mine = int(threadIdx.x) + j * kThreads < count;
    const Vector<kItem> x = mine ? staged_vector<kItem>(shared, j) : Vector<kItem>{};
    const uint32_t most = quad_max(join_halves<kItem>(largest_of(x, 0)));  // a row consists of whole blocks
    if (mine) write(to.row(), to.col(), x, most);
  }
}

template <int kItem>
__device__ __forceinline__ void quantize_mx(const SlimxPiece& p, const Cut& cut, int64_t first, int32_t count,
                                            uint8_t* shared, uint8_t* bucket, Found& found) {
  const auto write = [&](int32_t row, int32_t col, const Vector<kItem>& x, uint32_t most) {
    const bool poisoned = is_nonfinite<kItem>(most);
    const uint8_t e = poisoned ? SLIMX_NAN_E8M0 : slimx_mxfp8_exponent(as_float<kItem>(most));
    if (col % kQuad == 0) write_scale_e8m0(p, row, col / kQuad, e, bucket, found);
    const Vector<1> codes = poisoned ? nan_codes() : codes_of(x, {0.0f, slimx_mxfp8_inverse(e), 0});
    write_codes(p, row, int64_t(col) * kVector, codes, bucket, found);
    found.nonfinite |= poisoned;
  };
  for_each_in_quads<kItem>(p, cut, first, count, shared, write);
}

// ---- any block at any address: one warp each, element by element, read twice ----------------------------------------

template <int kItem>
__device__ __forceinline__ void quantize_by_warp(const SlimxPiece& p, const Cut& cut, int64_t block, uint8_t* bucket,
                                                 Found& found) {
  const int32_t block_row = int32_t(block / cut.units), block_col = int32_t(block % cut.units);
  const int64_t row0 = int64_t(block_row) * p.block_rows, col0 = int64_t(block_col) * p.block_cols;
  const uint32_t cols = uint32_t(min(int64_t(p.block_cols), p.cols - col0));
  const int64_t rows = min(int64_t(p.block_rows), p.rows - row0), count = rows * cols;
  const uint8_t* src = reinterpret_cast<const uint8_t*>(p.src) + row0 * p.src_ld + col0 * p.src_step;
  const int lane = int(threadIdx.x) % kWarp;
  const auto load = [&](int64_t k) {
    return load_element(src + int64_t(uint64_t(k) / cols) * p.src_ld + int64_t(uint64_t(k) % cols) * p.src_step, kItem);
  };

  uint32_t most = 0;
#pragma unroll 1
  for (int64_t k = lane; k < count; k += kWarp) most = larger<kItem>(most, load(k));
  most = warp_max(most);
  const bool poisoned = is_nonfinite<kItem>(most), mx = p.op == SLIMX_QUANTIZE_MXFP8;
  const float amax = as_float<kItem>(most);
  const uint8_t e = poisoned ? SLIMX_NAN_E8M0 : slimx_mxfp8_exponent(amax);
  SlimxScale scale = {slimx_float(SLIMX_NAN_FP32), 0.0f, 0};
  if (!poisoned) scale = mx ? SlimxScale{0.0f, slimx_mxfp8_inverse(e), 0} : scale_of(p.rule, amax, kItem);
  if (lane == 0) {
    if (mx)
      write_scale_e8m0(p, block_row, block_col, e, bucket, found);
    else
      write_scale_fp32(p, block_row, block_col, scale.scale, bucket, found);
  }
  found.nonfinite |= poisoned;
#pragma unroll 1
  for (int64_t k = lane; k < count; k += kWarp) {
    const float x = as_float<kItem>(load(k));  // with all bits, including the sign
    const uint8_t code = poisoned ? SLIMX_NAN_E4M3 : slimx_quantize(x, scale);
    const int64_t row = row0 + int64_t(uint64_t(k) / cols), col = col0 + int64_t(uint64_t(k) % cols);
    bucket[p.dst + row * p.dst_ld + col] = code;
    found.values += part_share(code, p.pos + row * p.pos_ld + col);
  }
}

template <int kItem>
__device__ __forceinline__ void quantize_tile(const SlimxPiece& p, const Cut& cut, int64_t first, int32_t count,
                                              uint8_t* shared, uint8_t* bucket, Found& found, Scratch& scratch,
                                              int turn) {
  const int warp = int(threadIdx.x) / kWarp;
  if (cut.path == Path::kBlock)
    quantize_block<kItem>(p, cut, int32_t(first), shared, bucket, found, scratch, turn);
  else if (cut.path == Path::kVectors)
    quantize_mx<kItem>(p, cut, first, count, shared, bucket, found);
  else if (warp < count)
    quantize_by_warp<kItem>(p, cut, first + warp, bucket, found);
}

}  // namespace slimx
