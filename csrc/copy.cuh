// copy.cuh: tiles of SLIMX_COPY and SLIMX_COPY_CHECKED, and of the checksum alone, which reads bytes without copying
// them.
#pragma once

#include "vectors.cuh"

namespace slimx {

__device__ __forceinline__ uint64_t share_of(uint4 v, uint64_t pos) {
  return word_share(v.x, pos) + word_share(v.y, pos + 4) + word_share(v.z, pos + 8) + word_share(v.w, pos + 12);
}
__device__ __forceinline__ uint64_t share_of(uint32_t v, uint64_t pos) {
  return part_share(v, pos);
}  // v contains 4 bytes or fewer

template <int kItem>
__device__ __forceinline__ uint32_t largest_of(uint4 v, uint32_t most) {
  return larger<kItem>(larger<kItem>(larger<kItem>(larger<kItem>(most, v.x), v.y), v.z), v.w);
}
template <int kItem>
__device__ __forceinline__ uint32_t largest_of(uint32_t v, uint32_t most) {
  return larger<kItem>(most, v);
}

template <class Unit>
__device__ __forceinline__ void stage_unit(Unit* to, const Unit* from) {
  if constexpr (sizeof(Unit) >= 4)
    stage(to, from);
  else
    *to = load_cached(from);
}

template <class Unit, bool kStore>
__device__ __forceinline__ void copy_tile(const SlimxPiece& p, const Cut& cut, int64_t first, int32_t count,
                                          uint8_t* shared, uint8_t* bucket, Found& found) {
  const uint8_t* src = reinterpret_cast<const uint8_t*>(p.src);
  const int64_t apart = p.src_step == p.item ? sizeof(Unit) : p.src_step;
  Walk from(first + threadIdx.x, cut.units), to = from;
#pragma unroll 2
  for (int j = 0; int(threadIdx.x) + j * kThreads < count; ++j, from.step())
    stage_unit(slot<Unit>(shared, j), reinterpret_cast<const Unit*>(src + from.at(p.src_ld, apart)));
  wait_for_stage();

  uint32_t most_halves = 0, most = 0;  // of bf16 elements, and of fp32 elements
  const bool checked = kStore && p.op == SLIMX_COPY_CHECKED;
#pragma unroll 2
  for (int j = 0; int(threadIdx.x) + j * kThreads < count; ++j, to.step()) {
    const Unit x = *slot<Unit>(shared, j);
    if (kStore) *reinterpret_cast<Unit*>(bucket + p.dst + to.at(p.dst_ld, sizeof(Unit))) = x;
    found.values += share_of(x, p.pos + to.at(p.pos_ld, sizeof(Unit)));
    if (checked && p.item == 2) most_halves = largest_of<2>(x, most_halves);
    if (checked && p.item == 4) most = largest_of<4>(x, most);
  }
  found.nonfinite |= is_nonfinite<2>(join_halves<2>(most_halves)) || is_nonfinite<4>(most);
}

// Copies elements of any size at any address, byte by byte.
template <bool kStore>
__device__ __forceinline__ void copy_items(const SlimxPiece& p, const Cut& cut, int64_t first, int32_t count,
                                           uint8_t* bucket, Found& found) {
  Walk at(first + threadIdx.x, cut.units);
#pragma unroll 1
  for (int32_t k = threadIdx.x; k < count; k += kThreads, at.step()) {
    const uint8_t* src = reinterpret_cast<const uint8_t*>(p.src) + at.at(p.src_ld, p.src_step);
    const uint64_t dst = p.dst + at.at(p.dst_ld, p.item), pos = p.pos + at.at(p.pos_ld, p.item);
    uint32_t last = 0;  // the highest four bytes of the element so far
#pragma unroll 1
    for (int b = 0; b < p.item; ++b) {
      const uint8_t byte = load_cached(src + b);
      if (kStore) bucket[dst + b] = byte;
      found.values += part_share(byte, pos + b);
      last = last >> 8 | uint32_t(byte) << 24;
    }
    if (kStore && p.op == SLIMX_COPY_CHECKED) found.nonfinite |= (last & SLIMX_INF_FP32) == SLIMX_INF_FP32;
  }
}

}  // namespace slimx
