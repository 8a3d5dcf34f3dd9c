// delta.cuh: the kernels that make a frame of what has changed (delta.h). A thread block makes a chunk's body in the
// chunk's own place of a scratch memory; a second kernel puts the bodies one after another.
#pragma once

#include "delta.h"
#include "device.cuh"

namespace slimx {

constexpr int kWarps = kThreads / kWarp;
constexpr int kDeltaMasks = SLIMX_DELTA_CHUNK / SLIMX_DELTA_GROUP;  // bytes: a mask for each group of one-byte elements

// Shared memory of a thread block: of each warp two counts and a sum, and the groups' masks.
struct DeltaScratch {
  uint64_t sums[kWarps];
  uint32_t groups[kWarps], elements[kWarps];
};
constexpr int kDeltaShared = sizeof(DeltaScratch) + kDeltaMasks;

template <int kItem>
__device__ __forceinline__ uint32_t differing_group(const uint8_t* base, const uint8_t* fresh) {
  uint32_t mask = 0;
  if constexpr (kItem == 2) {
    const uint4 a = *reinterpret_cast<const uint4*>(base), b = *reinterpret_cast<const uint4*>(fresh);
    const uint32_t x[4] = {a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w};
#pragma unroll
    for (int k = 0; k < 4; ++k)
      mask |= uint32_t((x[k] & 0xFFFFu) != 0) << 2 * k | uint32_t(x[k] >> 16 != 0) << (2 * k + 1);
  } else {
    const uint2 a = *reinterpret_cast<const uint2*>(base), b = *reinterpret_cast<const uint2*>(fresh);
    const uint32_t x[2] = {a.x ^ b.x, a.y ^ b.y};
#pragma unroll
    for (int k = 0; k < 8; ++k) mask |= uint32_t((x[k / 4] >> 8 * (k % 4) & 0xFFu) != 0) << k;
  }
  return mask;
}

// The sum of every thread's x; all threads call, all get it.
__device__ __forceinline__ uint64_t block_sum(uint64_t x, uint64_t* sums) {
  const uint64_t own = warp_sum(x);
  __syncthreads();  // an earlier sum has been read
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = own;
  __syncthreads();
  uint64_t all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) all += sums[w];
  return all;
}

// Changed elements in the lanes before this one, of which each has `count` <= 8.
__device__ __forceinline__ uint32_t count_before(uint32_t count, uint32_t below) {
  uint32_t before = 0;
#pragma unroll
  for (int bit = 0; bit < 4; ++bit) before += count_bits(warp_ballot(count >> bit & 1) & below) << bit;
  return before;
}

// `base` and `fresh` are 16-byte aligned; base may be the host's, as it is read once. The body of chunk k is written to
// slots + k * SLIMX_DELTA_CHUNK, its bytes to sizes[k].
template <int kItem>
__global__ void __launch_bounds__(kThreads, 4)
    delta_encode(const uint8_t* __restrict__ base, const uint8_t* __restrict__ fresh, int64_t bytes,
                 uint8_t* __restrict__ slots, uint32_t* __restrict__ sizes) {
  extern __shared__ __align__(kSlot) uint8_t memory[];  // kDeltaShared
  DeltaScratch& scratch = *reinterpret_cast<DeltaScratch*>(memory);
  uint8_t* masks = memory + sizeof(DeltaScratch);
  constexpr int kGroupBytes = SLIMX_DELTA_GROUP * kItem;
  const int64_t chunks = slimx_delta_chunks(bytes);
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const uint32_t below = (1u << lane) - 1;
  for (int64_t k = blockIdx.x; k < chunks; k += gridDim.x) {
    const int64_t at = k * SLIMX_DELTA_CHUNK;
    const int own = int(min(int64_t(SLIMX_DELTA_CHUNK), bytes - at)), groups = own / kGroupBytes;
    const int first = (groups + 7) / 8;
    uint8_t* body = slots + at;
    uint64_t found = 0;  // groups, and elements in the upper half
    for (int g = int(threadIdx.x); g < groups; g += kThreads) {
      const uint32_t mask = differing_group<kItem>(base + at + g * kGroupBytes, fresh + at + g * kGroupBytes);
      masks[g] = uint8_t(mask);
      found += uint64_t(mask != 0) | uint64_t(count_bits(mask)) << 32;
    }
    found = block_sum(found, scratch.sums);
    const int changed = int(uint32_t(found)), elements = int(found >> 32);
    const int size = changed == 0 ? 0 : min(own, first + changed + elements * kItem);
    if (threadIdx.x == 0) sizes[k] = uint32_t(size);
    if (size == own)  // groups of four bytes: a chunk is a multiple of 16
      for (int b = 4 * int(threadIdx.x); b < own; b += 4 * kThreads)
        *reinterpret_cast<uint32_t*>(body + b) = load_cached(reinterpret_cast<const uint32_t*>(fresh + at + b));
    if (size == 0 || size == own) continue;
    int group_end = first, element_end = first + changed;  // bytes written by earlier rounds
    for (int from = 0; from < groups; from += kThreads) {
      const int g = from + int(threadIdx.x);
      uint32_t mask = g < groups ? masks[g] : 0;
      const uint32_t some = warp_ballot(mask != 0), count = count_bits(mask);
      const uint32_t before = count_before(count, below);
      if (lane == kWarp - 1) {
        scratch.groups[warp] = count_bits(some);
        scratch.elements[warp] = before + count;
      }
      if (lane < 4 && (from + warp * kWarp) / 8 + lane < first)
        body[(from + warp * kWarp) / 8 + lane] = uint8_t(some >> 8 * lane);
      __syncthreads();
      int group_at = group_end + int(count_bits(some & below)), element_at = element_end + int(before) * kItem;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        group_end += int(scratch.groups[w]);
        element_end += int(scratch.elements[w]) * kItem;
        if (w < warp) {
          group_at += int(scratch.groups[w]);
          element_at += int(scratch.elements[w]) * kItem;
        }
      }
      if (mask) body[group_at] = uint8_t(mask);
      for (; mask; mask &= mask - 1, element_at += kItem) {
        const uint8_t* element = fresh + at + g * kGroupBytes + lowest_bit(mask) * kItem;
        body[element_at] = load_cached(element);
        if constexpr (kItem == 2) body[element_at + 1] = load_cached(element + 1);
      }
      __syncthreads();  // the counts have been read
    }
  }
}

// Puts `sizes` and the bodies that delta_encode left in `slots` into `frame`; `*length`: its bytes.
__global__ void __launch_bounds__(kThreads, 4)
    delta_join(const uint8_t* __restrict__ slots, const uint32_t* __restrict__ sizes, int64_t chunks,
               uint8_t* __restrict__ frame, int64_t* __restrict__ length) {
  extern __shared__ __align__(kSlot) uint8_t memory[];  // kDeltaShared
  DeltaScratch& scratch = *reinterpret_cast<DeltaScratch*>(memory);
  int64_t end = 4 * chunks, known = 0;  // bytes of the bodies before chunk `known`, behind the sizes
  for (int64_t k = blockIdx.x; k < chunks; k += gridDim.x) {
    uint64_t between = 0;
    for (int64_t j = known + threadIdx.x; j < k; j += kThreads) between += load_cached(sizes + j);
    end += int64_t(block_sum(between, scratch.sums));
    known = k;
    const uint32_t size = load_cached(sizes + k);
    for (uint32_t b = threadIdx.x; b < size; b += kThreads)
      frame[end + b] = load_cached(slots + k * SLIMX_DELTA_CHUNK + b);
    if (threadIdx.x < 4) frame[4 * k + threadIdx.x] = uint8_t(size >> 8 * threadIdx.x);
    if (threadIdx.x == 0 && k == chunks - 1) *length = end + size;
  }
}

}  // namespace slimx
