// elements.cuh: tiles of the element-wise ops: fp32 <-> bf16, and e4m3 codes times their block's scale to either type.
#pragma once

#include "vectors.cuh"

namespace slimx {

// Returns the scale of element (row, col) of a piece of codes. The first block starts at the piece's first element.
__device__ __forceinline__ float scale_at(const SlimxPiece& p, int32_t row, int32_t col) {
  const uint8_t* line = reinterpret_cast<const uint8_t*>(p.scale) + (row / p.block_rows) * p.scale_ld;
  const int32_t k = col / p.block_cols;
  if (p.op == SLIMX_DEQUANTIZE_MXFP8) return slimx_from_e8m0(load_cached(line + k));
  return load_cached(reinterpret_cast<const float*>(line) + k);
}

// Returns the bits of one destination element. `bits`: bits of the source element; with kItem 1 it is a code, which is
// multiplied by `scale`.
template <int kItem, int kOut>
__device__ __forceinline__ uint32_t convert(uint32_t bits, float scale) {
  static_assert(kItem == 1 || kItem + kOut == 6, "codes to either, fp32 to bf16, bf16 to fp32");
  const float x = kItem == 1   ? slimx_dequantize(uint8_t(bits), scale)
                  : kItem == 2 ? slimx_from_bf16(uint16_t(bits))
                               : slimx_float(bits);
  return kOut == 2 ? slimx_bf16(x) : slimx_bits(x);
}

template <int kItem, int kOut>
__device__ __forceinline__ Vector<kOut> convert(const Vector<kItem>& v, float scale) {
  constexpr uint32_t kMask = kItem == 4 ? 0xFFFFFFFFu : (1u << 8 * kItem % 32) - 1;
  constexpr int kIn = 4 / kItem, kEach = 4 / kOut;  // elements in a word
  Vector<kOut> out = {};
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const uint32_t bits = v.words[k / kIn] >> (8 * kItem * (k % kIn)) & kMask;
    out.words[k / kEach] |= convert<kItem, kOut>(bits, scale) << (8 * kOut * (k % kEach));
  }
  return out;
}

template <int kItem, int kOut>
__device__ __forceinline__ void convert_vectors(const SlimxPiece& p, const Cut& cut, int64_t first, int32_t count,
                                                uint8_t* shared, uint8_t* bucket, Found& found) {
  const uint8_t* src = reinterpret_cast<const uint8_t*>(p.src);
  Walk from(first + threadIdx.x, cut.units), to = from;
#pragma unroll 2
  for (int j = 0; int(threadIdx.x) + j * kThreads < count; ++j, from.step())
    stage_vector<kItem>(shared, j, src + from.at(p.src_ld, kVector * kItem));
  wait_for_stage();

  uint32_t most = 0;
#pragma unroll 1
  for (int j = 0; int(threadIdx.x) + j * kThreads < count; ++j, to.step()) {
    const float scale = kItem == 1 ? scale_at(p, to.row(), to.col() * kVector) : 1.0f;
    const Vector<kOut> out = convert<kItem, kOut>(staged_vector<kItem>(shared, j), scale);
    store_vector<kOut>(bucket + p.dst + to.at(p.dst_ld, kVector * kOut), out);
    found.values += share_of(out, p.pos + to.at(p.pos_ld, kVector * kOut));
    most = largest_of(out, most);
  }
  found.nonfinite |= is_nonfinite<kOut>(join_halves<kOut>(most));
}

__device__ __forceinline__ uint32_t load_element(const uint8_t* from, int item) {
  if (item == 1) return load_cached(from);
  if (item == 2) return load_cached(reinterpret_cast<const uint16_t*>(from));
  return load_cached(reinterpret_cast<const uint32_t*>(from));
}

template <int kItem, int kOut>
__device__ __forceinline__ void convert_elements(const SlimxPiece& p, const Cut& cut, int64_t first, int32_t count,
                                                 uint8_t* bucket, Found& found) {
  Walk at(first + threadIdx.x, cut.units);
#pragma unroll 1
  for (int32_t k = threadIdx.x; k < count; k += kThreads, at.step()) {
    const uint8_t* src = reinterpret_cast<const uint8_t*>(p.src) + at.at(p.src_ld, p.src_step);
    const float scale = kItem == 1 ? scale_at(p, at.row(), at.col()) : 1.0f;
    const uint32_t bits = convert<kItem, kOut>(load_element(src, kItem), scale);
    uint8_t* dst = bucket + p.dst + at.at(p.dst_ld, kOut);
    if (kOut == 2)
      *reinterpret_cast<uint16_t*>(dst) = uint16_t(bits);
    else
      *reinterpret_cast<uint32_t*>(dst) = bits;
    found.values += part_share(bits, p.pos + at.at(p.pos_ld, kOut));
    found.nonfinite |= is_nonfinite<kOut>(larger<kOut>(0, bits));
  }
}

template <int kItem, int kOut>
__device__ __forceinline__ void convert_tile(const SlimxPiece& p, const Cut& cut, int64_t first, int32_t count,
                                             uint8_t* shared, uint8_t* bucket, Found& found) {
  if (cut.path == Path::kVectors)
    convert_vectors<kItem, kOut>(p, cut, first, count, shared, bucket, found);
  else
    convert_elements<kItem, kOut>(p, cut, first, count, bucket, found);
}

__device__ __forceinline__ void element_tile(const SlimxPiece& p, const Cut& cut, int64_t first, int32_t count,
                                             uint8_t* shared, uint8_t* bucket, Found& found) {
  if (p.item == 4)
    convert_tile<4, 2>(p, cut, first, count, shared, bucket, found);
  else if (p.item == 2)
    convert_tile<2, 4>(p, cut, first, count, shared, bucket, found);
  else if (p.out == 2)
    convert_tile<1, 2>(p, cut, first, count, shared, bucket, found);
  else
    convert_tile<1, 4>(p, cut, first, count, shared, bucket, found);
}

}  // namespace slimx
