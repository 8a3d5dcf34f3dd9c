// quantize_int4.cuh: tiles of SLIMX_QUANTIZE_INT4: a bf16 scale per group of 32 columns, and two codes per byte.
#pragma once

#include "int4.h"
#include "quantize.cuh"

namespace slimx {

__device__ __forceinline__ void write_scale_bf16(const SlimxPiece& p, int64_t row, int64_t group, uint16_t scale,
                                                 uint8_t* bucket, Found& found) {
  *reinterpret_cast<uint16_t*>(bucket + p.scale + row * p.scale_ld + 2 * group) = scale;
  found.scales += part_share(scale, p.scale_pos + row * p.scale_pos_ld + 2 * group);
}

// `bits`: those of an element of kItem bytes.
template <int kItem>
__device__ __forceinline__ uint16_t int4_element(uint32_t bits) {
  return kItem == 2 ? uint16_t(bits) : slimx_int4_element(bits);
}

// `most`: bits of the largest magnitude in a group; the same element is also the largest after rounding to bf16.
template <int kItem>
__device__ __forceinline__ uint16_t int4_scale(uint32_t most) {
  return slimx_int4_scale(int4_element<kItem>(most) & 0x7FFFu);
}

__device__ __forceinline__ uint32_t int4_code(uint16_t x, uint16_t scale) {
  return scale == SLIMX_NAN_BF16 ? SLIMX_INT4_ZERO : slimx_int4_code(x, slimx_from_bf16(scale));
}

// Returns element k of a vector, as bits.
template <int kItem>
__device__ __forceinline__ uint32_t bits_of(const Vector<kItem>& v, int k) {
  return kItem == 4 ? v.words[k] : v.words[k / 2] >> (16 * (k % 2)) & 0xFFFFu;
}

// Quantizes groups of four neighboring lanes each; every lane writes a word of codes.
template <int kItem>
__device__ __forceinline__ void quantize_int4_vectors(const SlimxPiece& p, const Cut& cut, int64_t first, int32_t count,
                                                      uint8_t* shared, uint8_t* bucket, Found& found) {
  static_assert(SLIMX_INT4_GROUP == kMxCols, "a quad has a group");
  const auto write = [&](int32_t row, int32_t col, const Vector<kItem>& x, uint32_t most) {
    const uint16_t scale = int4_scale<kItem>(most);
    if (col % kQuad == 0) write_scale_bf16(p, row, col / kQuad, scale, bucket, found);
    uint32_t codes = 0;
#pragma unroll
    for (int k = 0; k < kVector; ++k) codes |= int4_code(int4_element<kItem>(bits_of(x, k)), scale) << (4 * k);
    const int64_t at = 4 * int64_t(col);
    *reinterpret_cast<uint32_t*>(bucket + p.dst + row * p.dst_ld + at) = codes;
    found.values += word_share(codes, p.pos + row * p.pos_ld + at);
    found.nonfinite |= scale == SLIMX_NAN_BF16;
  };
  for_each_in_quads<kItem>(p, cut, first, count, shared, write);
}

// Quantizes a group at any address with one warp, one element per lane. Even lanes write the byte of two lanes.
template <int kItem>
__device__ __forceinline__ void quantize_int4_by_warp(const SlimxPiece& p, const Cut& cut, int64_t block,
                                                      uint8_t* bucket, Found& found) {
  static_assert(SLIMX_INT4_GROUP == kWarp, "an element for each lane");
  const int64_t row = block / cut.units, group = block % cut.units;
  const int lane = int(threadIdx.x) % kWarp;
  const uint8_t* src = reinterpret_cast<const uint8_t*>(p.src) + row * p.src_ld + group * SLIMX_INT4_GROUP * p.src_step;
  const auto load = [&](int k) { return load_element(src + k * p.src_step, kItem); };
  const uint16_t scale = int4_scale<kItem>(warp_max(larger<kItem>(0, load(lane))));
  found.nonfinite |= scale == SLIMX_NAN_BF16;
  if (lane == 0) write_scale_bf16(p, row, group, scale, bucket, found);
  if (lane % 2) return;
  const uint32_t low = int4_code(int4_element<kItem>(load(lane)), scale);
  const uint32_t codes = low | int4_code(int4_element<kItem>(load(lane + 1)), scale) << 4;
  const int64_t at = (group * SLIMX_INT4_GROUP + lane) / 2;
  bucket[p.dst + row * p.dst_ld + at] = uint8_t(codes);
  found.values += part_share(codes, p.pos + row * p.pos_ld + at);
}

template <int kItem>
__device__ __forceinline__ void quantize_int4_tile(const SlimxPiece& p, const Cut& cut, int64_t first, int32_t count,
                                                   uint8_t* shared, uint8_t* bucket, Found& found) {
  const int warp = int(threadIdx.x) / kWarp;
  if (cut.path == Path::kVectors)
    quantize_int4_vectors<kItem>(p, cut, first, count, shared, bucket, found);
  else if (warp < count)
    quantize_int4_by_warp<kItem>(p, cut, first + warp, bucket, found);
}

}  // namespace slimx
