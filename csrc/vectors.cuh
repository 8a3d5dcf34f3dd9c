// vectors.cuh: the building blocks of all tiles: a thread's iteration over a tile, its slots of shared memory, vectors
// of elements in registers, and the checksums and magnitudes that it computes.
#pragma once

#include "device.cuh"

namespace slimx {

// ---- iteration over a tile ------------------------------------------------------------------------------------------

// Iterates over every kThreads-th unit of a piece with `units` units per row, in row-major order. Only the start
// divides.
class Walk {
 public:
  __device__ Walk(uint64_t first, int32_t units)
      : row_(int32_t(first / uint32_t(units))),
        col_(int32_t(first % uint32_t(units))),
        row_step_(kThreads / units),
        col_step_(kThreads % units),
        units_(units) {}

  __device__ int32_t row() const { return row_; }
  __device__ int32_t col() const { return col_; }  // in units
  __device__ int64_t at(int64_t ld, int64_t unit_bytes) const { return row_ * ld + col_ * unit_bytes; }

  __device__ void step() {
    row_ += row_step_;
    col_ += col_step_;
    if (col_ >= units_) {
      col_ -= units_;
      ++row_;
    }
  }

 private:
  int32_t row_, col_, row_step_, col_step_, units_;
};

// Returns a thread's slot j of the stage, in shared memory; its slots are kThreads apart. On every path a thread
// accesses only its own slots, so a tile can begin before other threads have finished the previous one.
template <class Unit>
__device__ __forceinline__ Unit* slot(uint8_t* stage, int j) {
  return reinterpret_cast<Unit*>(stage + kSlot * (int(threadIdx.x) + j * kThreads));
}

// ---- results of a thread --------------------------------------------------------------------------------------------

// A thread's sums for one tensor, kept from tile to tile as long as these belong to the same tensor.
struct Found {
  int32_t tensor = -1, scale_tensor = -1;
  uint64_t values = 0, scales = 0;
  bool nonfinite = false;
};

__device__ __forceinline__ uint64_t word_share(uint32_t word, uint64_t pos) {
  return uint64_t(word) * slimx_multiplier(uint32_t(pos >> 2));
}

// The same for a value of fewer than four bytes, within the word that contains `pos`.
__device__ __forceinline__ uint64_t part_share(uint32_t part, uint64_t pos) {
  return word_share(part << (8 * (pos & 3)), pos);
}

// ---- magnitudes: the largest element as an unsigned number ----------------------------------------------------------

// The largest magnitudes of bf16 elements are kept in two halves until all elements were processed.
template <int kItem>
__device__ __forceinline__ uint32_t larger(uint32_t most, uint32_t word) {
  return kItem == 2 ? max_halves(most, word & 0x7FFF7FFFu) : max(most, word & 0x7FFFFFFFu);
}

template <int kItem>
__device__ __forceinline__ uint32_t join_halves(uint32_t most) {
  return kItem == 2 ? max(most & 0xFFFFu, most >> 16) : most;
}

template <int kItem>
__device__ __forceinline__ bool is_nonfinite(uint32_t magnitude) {
  return magnitude >= (kItem == 2 ? SLIMX_INF_BF16 : SLIMX_INF_FP32);
}

template <int kItem>
__device__ __forceinline__ float as_float(uint32_t bits) {
  return slimx_float(kItem == 2 ? bits << 16 : bits);
}

// ---- kVector elements of kItem bytes --------------------------------------------------------------------------------

template <int kItem>
struct Vector {
  static constexpr int kWords = kVector * kItem / 4;
  uint32_t words[kWords];
};

// Stages unit j of a thread, in one slot, or in two for fp32.
template <int kItem>
__device__ __forceinline__ void stage_vector(uint8_t* to, int j, const uint8_t* from) {
  if constexpr (kItem == 1) stage(slot<uint2>(to, j), reinterpret_cast<const uint2*>(from));
  if constexpr (kItem == 2) stage(slot<uint4>(to, j), reinterpret_cast<const uint4*>(from));
  if constexpr (kItem == 4) {
    stage(slot<uint4>(to, 2 * j), reinterpret_cast<const uint4*>(from));
    stage(slot<uint4>(to, 2 * j + 1), reinterpret_cast<const uint4*>(from + kSlot));
  }
}

template <int kItem>
__device__ __forceinline__ Vector<kItem> staged_vector(uint8_t* stage, int j) {
  if constexpr (kItem == 1) {
    const uint2 x = *slot<uint2>(stage, j);
    return {{x.x, x.y}};
  } else if constexpr (kItem == 2) {
    const uint4 x = *slot<uint4>(stage, j);
    return {{x.x, x.y, x.z, x.w}};
  } else {
    const uint4 x = *slot<uint4>(stage, 2 * j), y = *slot<uint4>(stage, 2 * j + 1);
    return {{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w}};
  }
}

template <int kItem>
__device__ __forceinline__ void store_vector(uint8_t* to, const Vector<kItem>& v) {
  if constexpr (kItem == 1) {
    *reinterpret_cast<uint2*>(to) = make_uint2(v.words[0], v.words[1]);
  } else {
#pragma unroll
    for (int k = 0; k < Vector<kItem>::kWords; k += 4)
      *reinterpret_cast<uint4*>(to + 4 * k) = make_uint4(v.words[k], v.words[k + 1], v.words[k + 2], v.words[k + 3]);
  }
}

template <int kItem>
__device__ __forceinline__ uint64_t share_of(const Vector<kItem>& v, uint64_t pos) {
  uint64_t sum = 0;
#pragma unroll
  for (int k = 0; k < Vector<kItem>::kWords; ++k) sum += word_share(v.words[k], pos + 4 * k);
  return sum;
}

template <int kItem>
__device__ __forceinline__ uint32_t largest_of(const Vector<kItem>& v, uint32_t most) {
#pragma unroll
  for (int k = 0; k < Vector<kItem>::kWords; ++k) most = larger<kItem>(most, v.words[k]);
  return most;
}

// Returns element k of a vector of bf16 or fp32.
template <int kItem>
__device__ __forceinline__ float element(const Vector<kItem>& v, int k) {
  if (kItem == 4) return slimx_float(v.words[k]);
  const uint32_t word = v.words[k / 2];
  return slimx_float(k % 2 ? word & 0xFFFF0000u : word << 16);
}

}  // namespace slimx
