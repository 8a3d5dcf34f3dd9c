// exact_linear.cuh: linear layers of exact mode on a GPU: one tile of rows and columns per thread block.
//
// The next elements of K are loaded while those in shared memory are multiplied. A thread keeps the results of several
// rows times several columns of the tile in registers. Blocks of K are independent until their sums are added in order,
// so if there are few rows, groups of threads process one block of K each and keep more loads of weights in flight.
#pragma once

#include "exact_elements.cuh"

namespace slimx {

// The threads of a thread block, and the part of a tile that each computes: rows kRows / kOwnRows apart, and likewise
// columns.
template <int kTileRows, int kTileColumns, int kThreadRows, int kThreadColumns, int kKGroups>
struct LinearTile {
  static constexpr int kRows = kTileRows, kColumns = kTileColumns;
  static constexpr int kOwnRows = kThreadRows, kOwnColumns = kThreadColumns;
  static constexpr int kRowStep = kRows / kOwnRows, kColumnStep = kColumns / kOwnColumns;
  static constexpr int kGroups = kKGroups;                      // blocks of K at a time, one per group of threads
  static constexpr int kGroupThreads = kRowStep * kColumnStep;  // whole warps, so that none diverges
  static constexpr int kThreads = kGroups * kGroupThreads;
  static constexpr int kSlab = kGroups * SLIMX_K_BLOCK;  // elements of K at a time
  static constexpr int kPitch = kSlab + 4;  // floats per row, so that consecutive rows start in different banks
  static_assert(kGroupThreads % 32 == 0 && kRows * kColumns % kThreads == 0, "every thread has its part of a tile");
};

using ManyRows = LinearTile<64, 64, 8, 4, 1>;
using FewRows = LinearTile<16, 16, 2, 4, 4>;

template <class T>
struct LinearCall {
  const T* x;
  const uint64_t* weights;
  const int64_t* starts;
  int64_t columns, width, first, leaf;
};

// A thread's units of `kRows` rows of a slab, in registers before they are stored in shared memory.
template <class T, class Tile, int kRows>
struct Slab {
  static constexpr int kUnits = Tile::kSlab / kUnit<T>;  // units in a row
  static constexpr int kOwn = kRows * kUnits / Tile::kThreads;
  static_assert(kRows * kUnits % Tile::kThreads == 0, "every thread loads as much");
  Words words[kOwn];

  // `rows`: rows of the matrix from here on; `n`: elements of each row from `from` on.
  __device__ __forceinline__ void load(const T* from, int64_t width, int64_t rows, int64_t n, bool whole) {
#pragma unroll
    for (int u = 0; u < kOwn; ++u) {
      const int at = u * Tile::kThreads + int(threadIdx.x), row = at / kUnits, k = at % kUnits * kUnit<T>;
      words[u] = row < rows && k < n ? load_unit(from + row * width + k, n - k, whole) : Words{};
    }
  }

  __device__ __forceinline__ void store(float (*to)[Tile::kPitch]) const {
#pragma unroll
    for (int u = 0; u < kOwn; ++u) {
      const int at = u * Tile::kThreads + int(threadIdx.x);
      widen_unit(words[u], static_cast<const T*>(nullptr), &to[at / kUnits][at % kUnits * kUnit<T>]);
    }
  }
};

// Computes even + odd of one block of K, for a thread's rows and columns.
template <class Tile>
static __device__ __forceinline__ void multiply_block(const float (*x)[Tile::kPitch],
                                                      const float (*weight)[Tile::kPitch], int first, int row,
                                                      int column, float (&out)[Tile::kOwnRows][Tile::kOwnColumns]) {
  float odd[Tile::kOwnRows][Tile::kOwnColumns];
#pragma unroll
  for (int r = 0; r < Tile::kOwnRows; ++r)
#pragma unroll
    for (int c = 0; c < Tile::kOwnColumns; ++c) out[r][c] = odd[r][c] = 0.0f;
#pragma unroll 1
  for (int k = first; k < first + SLIMX_K_BLOCK; k += 4) {
    Floats by[Tile::kOwnColumns];
#pragma unroll
    for (int c = 0; c < Tile::kOwnColumns; ++c) by[c] = load_floats(&weight[column + c * Tile::kColumnStep][k]);
#pragma unroll
    for (int r = 0; r < Tile::kOwnRows; ++r) {
      const Floats own = load_floats(&x[row + r * Tile::kRowStep][k]);
#pragma unroll
      for (int c = 0; c < Tile::kOwnColumns; ++c) {
        out[r][c] = chain(own.at[2], by[c].at[2], chain(own.at[0], by[c].at[0], out[r][c]));
        odd[r][c] = chain(own.at[3], by[c].at[3], chain(own.at[1], by[c].at[1], odd[r][c]));
      }
    }
  }
#pragma unroll
  for (int r = 0; r < Tile::kOwnRows; ++r)
#pragma unroll
    for (int c = 0; c < Tile::kOwnColumns; ++c) out[r][c] = chain_add(out[r][c], odd[r][c]);
}

template <class T, class Out, class Tile>
__global__ void __launch_bounds__(Tile::kThreads) exact_linear(LinearCall<T> call, Out* out) {
  constexpr int kJoined =
      Tile::kGroups > 1 ? Tile::kRows * Tile::kColumns : 1;  // elements that groups of threads add up
  alignas(16) __shared__ float x[2][Tile::kRows][Tile::kPitch], weight[2][Tile::kColumns][Tile::kPitch];
  __shared__ float parts[Tile::kGroups][kJoined];
  const int64_t start = call.starts[blockIdx.z], row = int64_t(blockIdx.y) * Tile::kRows,
                column = int64_t(blockIdx.x) * Tile::kColumns;
  const int64_t rows = call.starts[blockIdx.z + 1] - start - row, columns = call.columns - column;
  if (rows <= 0) return;
  const T* from = call.x + (start + row) * call.width + call.first;
  const T* with = reinterpret_cast<const T*>(call.weights[blockIdx.z]) + column * call.width + call.first;
  const bool whole = aligned(from, call.width) && aligned(with, call.width);
  const int group = int(threadIdx.x) / Tile::kGroupThreads, mine = int(threadIdx.x) % Tile::kGroupThreads;
  const int own_row = mine / Tile::kColumnStep, own_column = mine % Tile::kColumnStep;

  Slab<T, Tile, Tile::kRows> next_x;
  Slab<T, Tile, Tile::kColumns> next_weight;
  next_x.load(from, call.width, rows, call.leaf, whole);
  next_weight.load(with, call.width, columns, call.leaf, whole);
  float sum[Tile::kOwnRows][Tile::kOwnColumns] = {};
  constexpr int kElements = (kJoined + Tile::kThreads - 1) / Tile::kThreads;
  float joined[kElements] = {};
  int buffer = 0;
  for (int64_t k = 0; k < call.leaf; k += Tile::kSlab, buffer ^= 1) {
    // Threads that still multiply use the other buffer: all threads passed here before the previous one was filled.
    next_x.store(x[buffer]);
    next_weight.store(weight[buffer]);
    __syncthreads();
    const int64_t after = k + Tile::kSlab;
    if (after < call.leaf) {
      next_x.load(from + after, call.width, rows, call.leaf - after, whole);
      next_weight.load(with + after, call.width, columns, call.leaf - after, whole);
    }
    float part[Tile::kOwnRows][Tile::kOwnColumns];
    multiply_block<Tile>(x[buffer], weight[buffer], group * SLIMX_K_BLOCK, own_row, own_column, part);
    if constexpr (Tile::kGroups == 1) {
#pragma unroll
      for (int r = 0; r < Tile::kOwnRows; ++r)
#pragma unroll
        for (int c = 0; c < Tile::kOwnColumns; ++c) sum[r][c] = chain_add(sum[r][c], part[r][c]);
    } else {
#pragma unroll
      for (int r = 0; r < Tile::kOwnRows; ++r)
#pragma unroll
        for (int c = 0; c < Tile::kOwnColumns; ++c)
          parts[group][(own_row + r * Tile::kRowStep) * Tile::kColumns + own_column + c * Tile::kColumnStep] =
              part[r][c];
      __syncthreads();
      const int64_t left = (call.leaf - k + SLIMX_K_BLOCK - 1) / SLIMX_K_BLOCK;  // a block past the end is not added
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        for (int g = 0; g < Tile::kGroups && g < left; ++g)
          joined[e] = chain_add(joined[e], parts[g][e * Tile::kThreads + int(threadIdx.x)]);
    }
  }
  const auto write = [&](int r, int c, float value) {
    if (r < rows && c < columns) put(out + (start + row + r) * call.columns + column + c, value);
  };
  if constexpr (Tile::kGroups == 1) {
#pragma unroll
    for (int r = 0; r < Tile::kOwnRows; ++r)
#pragma unroll
      for (int c = 0; c < Tile::kOwnColumns; ++c)
        write(own_row + r * Tile::kRowStep, own_column + c * Tile::kColumnStep, sum[r][c]);
  } else {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const int at = e * Tile::kThreads + int(threadIdx.x);
      write(at / Tile::kColumns, at % Tile::kColumns, joined[e]);
    }
  }
}

}  // namespace slimx
