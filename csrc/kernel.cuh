// kernel.cuh: the persistent kernel: each thread block processes every gridDim.x-th tile of a bucket.
#pragma once

#include "copy.cuh"
#include "quantize_int4.cuh"

namespace slimx {

// Returns the piece that contains tile `t`: the last k with first[k] <= t. A warp probes 32 positions at once, so the
// search in thousands of pieces takes three dependent loads. first[lo] <= t < first[hi], and all lanes pass the same
// arguments.
__device__ __forceinline__ int64_t piece_of(const int64_t* first, int64_t lo, int64_t hi, int64_t t) {
  const int lane = int(threadIdx.x) % kWarp;
  while (hi - lo > 1) {
    const int64_t step = (hi - lo + kWarp - 1) / kWarp, probe = lo + lane * step;
    const int last = highest_bit(warp_ballot(probe < hi && load_cached(first + probe) <= t));
    lo += last * step;
    hi = min(hi, lo + step);
  }
  return lo;
}

// Adds the warp's results to the sums and flags of its tensor.
__device__ __forceinline__ void flush(Found& found, uint64_t* sums, uint32_t* flags) {
  if (found.tensor < 0) return;
  const uint64_t values = warp_sum(found.values);
  const uint64_t scales = found.scale_tensor < 0 ? 0 : warp_sum(found.scales);
  const bool nonfinite = warp_ballot(found.nonfinite) != 0;
  if (threadIdx.x % kWarp == 0) {
    add_to(sums + found.tensor, values);
    if (found.scale_tensor >= 0) add_to(sums + found.scale_tensor, scales);
    if (nonfinite) or_to(flags + found.tensor, SLIMX_NONFINITE);
  }
  found = Found();
}

// `pieces` [n] and `first` [n + 1] (see count_tiles) are in memory of the device. The checksum kernel writes only sums.
template <Kernel kKernel>
__global__ void __launch_bounds__(kThreads, 4)
    reshard(const SlimxPiece* __restrict__ pieces, const int64_t* __restrict__ first, int64_t n, int64_t tiles,
            uint8_t* __restrict__ bucket, uint64_t* __restrict__ sums, uint32_t* __restrict__ flags) {
  constexpr bool kStore = kKernel != Kernel::kChecksum;
  extern __shared__ __align__(kSlot) uint8_t memory[];  // its size is shared_bytes(...)
  Scratch& scratch = *reinterpret_cast<Scratch*>(memory);
  uint8_t* shared = memory + sizeof(Scratch);  // the stage
  Found found;
  int turn = 0;
  int64_t k = 0;
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    k = piece_of(first, k, n, t);
    const SlimxPiece& p = pieces[k];
    const int32_t scale_tensor = kStore ? p.scale_tensor : -1;
    if (p.tensor != found.tensor || scale_tensor != found.scale_tensor) {
      flush(found, sums, flags);
      found.tensor = p.tensor;
      found.scale_tensor = scale_tensor;
    }
    const Cut cut = cut_of(p, kKernel);
    const int64_t begin = (t - load_cached(first + k)) * cut.tile_units, all = int64_t(cut.rows) * cut.units;
    const int32_t count = int32_t(min(int64_t(cut.tile_units), all - begin));
    switch (cut.path) {
      case Path::kCopy16:
        copy_tile<uint4, kStore>(p, cut, begin, count, shared, bucket, found);
        break;
      case Path::kCopy4:
        copy_tile<uint32_t, kStore>(p, cut, begin, count, shared, bucket, found);
        break;
      case Path::kCopy2:
        copy_tile<uint16_t, kStore>(p, cut, begin, count, shared, bucket, found);
        break;
      case Path::kCopy1:
        copy_tile<uint8_t, kStore>(p, cut, begin, count, shared, bucket, found);
        break;
      case Path::kCopyItems:
        copy_items<kStore>(p, cut, begin, count, bucket, found);
        break;
      default:
        if constexpr (kKernel == Kernel::kPack) {
          const bool quantizes = p.op == SLIMX_QUANTIZE_FP8 || p.op == SLIMX_QUANTIZE_MXFP8;
          if (p.op == SLIMX_QUANTIZE_INT4 && p.item == 2)
            quantize_int4_tile<2>(p, cut, begin, count, shared, bucket, found);
          else if (p.op == SLIMX_QUANTIZE_INT4)
            quantize_int4_tile<4>(p, cut, begin, count, shared, bucket, found);
          else if (quantizes && p.item == 2)
            quantize_tile<2>(p, cut, begin, count, shared, bucket, found, scratch, turn);
          else if (quantizes)
            quantize_tile<4>(p, cut, begin, count, shared, bucket, found, scratch, turn);
          else
            element_tile(p, cut, begin, count, shared, bucket, found);
          if (cut.path == Path::kBlock) turn ^= 1;
        }
    }
  }
  flush(found, sums, flags);
}

// Writes {s, 1 / s} of the rule TRITON for every finite bf16 amax, in the order of its bits: [SLIMX_TRITON_SCALES][2].
__global__ void triton_scales(float* __restrict__ out) {
  const uint32_t bits = blockIdx.x * kThreads + threadIdx.x;
  if (bits >= SLIMX_TRITON_SCALES) return;
  const SlimxScale s = scale_of(SLIMX_RULE_TRITON, slimx_from_bf16(uint16_t(bits)), 2);
  out[2 * bits] = s.scale;
  out[2 * bits + 1] = s.inverse;
}

}  // namespace slimx
