// exact_kernels.cuh: the CUDA kernels of exact mode. Orders of operations are those of
// slimx/numerics/exact/forward/reference.py.
//
// A thread block computes one tile of a linear, or one row. Which thread computes what changes no bit: sums are made by
// one thread from first to last, or in the contract's lanes.
#pragma once

#include <string.h>

#include "exact_device.cuh"
#include "exact_interface.cuh"

namespace slimx {

#define SLIMX_MATH static __device__ __forceinline__
#include "exact_math.h"
#undef SLIMX_MATH

constexpr int kThreads = 64;
constexpr int kSide = 32;  // rows and columns of a linear's tile
constexpr int kOwn = 4;    // rows and columns of it that are one thread's
static_assert(kSide / kOwn * (kSide / kOwn) == kThreads, "every thread has its part of a tile");

static __device__ __forceinline__ float widened(float x) { return x; }
static __device__ __forceinline__ float widened(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

static __device__ __forceinline__ void put(float* to, float x) { *to = x; }
static __device__ __forceinline__ void put(uint16_t* to, float x) {  // to nearest even; NaN becomes 0x7FC0
  uint32_t bits;
  memcpy(&bits, &x, 4);
  *to = x == x ? uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16) : uint16_t(0x7FC0);
}

static __device__ __forceinline__ float exact_exp(float x) {
  if (!(x == x)) return x;
  if (x < SLIMX_EXP_LEAST) return 0.0f;
  if (x > SLIMX_EXP_MOST) return __builtin_inff();
  const float n = exp_power(x);
  const int32_t whole = int32_t(n), low = whole >> 1;
  const uint32_t bits[2] = {uint32_t(low + 127) << 23, uint32_t(whole - low + 127) << 23};
  float powers[2];
  memcpy(powers, bits, sizeof powers);
  return exp_polynomial(exp_rest(x, n)) * powers[0] * powers[1];
}

// ---- linears --------------------------------------------------------------------------------------------------------

template <class T>
struct LinearCall {
  const T* x;
  const uint64_t* weights;
  const int64_t* starts;
  int64_t columns, width, first, leaf;
};

// Rows of a block of K, or zeros, in shared memory.
template <class T>
static __device__ __forceinline__ void stage(float (*to)[SLIMX_K_BLOCK + 1], const T* from, int64_t width, int64_t rows,
                                             int64_t n) {
  for (int i = threadIdx.x; i < kSide * SLIMX_K_BLOCK; i += kThreads) {
    const int row = i / SLIMX_K_BLOCK, k = i % SLIMX_K_BLOCK;
    to[row][k] = row < rows && k < n ? widened(from[row * width + k]) : 0.0f;
  }
}

template <class T, class Out>
__global__ void __launch_bounds__(kThreads) exact_linear(LinearCall<T> call, Out* out) {
  __shared__ float x[kSide][SLIMX_K_BLOCK + 1], weight[kSide][SLIMX_K_BLOCK + 1];
  const int64_t start = call.starts[blockIdx.z], row = int64_t(blockIdx.y) * kSide,
                column = int64_t(blockIdx.x) * kSide;
  const int64_t rows = call.starts[blockIdx.z + 1] - start - row, columns = call.columns - column;
  if (rows <= 0) return;
  const T* from = call.x + (start + row) * call.width + call.first;
  const T* with = reinterpret_cast<const T*>(call.weights[blockIdx.z]) + column * call.width + call.first;
  const int own_row = threadIdx.x / (kSide / kOwn) * kOwn, own_column = threadIdx.x % (kSide / kOwn) * kOwn;
  float sum[kOwn][kOwn] = {};
  for (int64_t k = 0; k < call.leaf; k += SLIMX_K_BLOCK) {
    __syncthreads();
    stage(x, from + k, call.width, rows, call.leaf - k);
    stage(weight, with + k, call.width, columns, call.leaf - k);
    __syncthreads();
    float even[kOwn][kOwn] = {}, odd[kOwn][kOwn] = {};
    for (int i = 0; i < SLIMX_K_BLOCK; i += 2)
      for (int r = 0; r < kOwn; ++r)
        for (int c = 0; c < kOwn; ++c) {
          even[r][c] = chain(x[own_row + r][i], weight[own_column + c][i], even[r][c]);
          odd[r][c] = chain(x[own_row + r][i + 1], weight[own_column + c][i + 1], odd[r][c]);
        }
    for (int r = 0; r < kOwn; ++r)
      for (int c = 0; c < kOwn; ++c) sum[r][c] = chain_add(sum[r][c], chain_add(even[r][c], odd[r][c]));
  }
  for (int r = 0; r < kOwn; ++r)
    for (int c = 0; c < kOwn; ++c)
      if (own_row + r < rows && own_column + c < columns)
        put(out + (start + row + own_row + r) * call.columns + column + own_column + c, sum[r][c]);
}

// ---- sums and maxima of a row: every thread calls, and gets the result ----------------------------------------------

static __device__ __forceinline__ float fold(float* lanes) {
  for (int half = SLIMX_LANES / 2; half; half /= 2)
    for (int l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
  return lanes[0];
}

// at(i) summed over [0, n) in blocks of kBlock. shared: SLIMX_LANES + 1 floats for each block.
template <int kBlock, class At>
static __device__ float row_sum(int64_t n, float* shared, At at) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  float* sums = shared + blocks * SLIMX_LANES;
  __syncthreads();
  for (int64_t task = threadIdx.x; task < blocks * SLIMX_LANES; task += kThreads) {
    const int64_t first = task / SLIMX_LANES * kBlock, end = first + kBlock < n ? first + kBlock : n;
    float sum = 0;
    for (int64_t i = first + task % SLIMX_LANES; i < end; i += SLIMX_LANES) sum = sum + at(i);
    shared[task] = sum;
  }
  __syncthreads();
  for (int64_t block = threadIdx.x; block < blocks; block += kThreads) sums[block] = fold(shared + block * SLIMX_LANES);
  __syncthreads();
  float sum = 0;
  for (int64_t block = 0; block < blocks; ++block) sum = sum + sums[block];
  return sum;
}

template <class At>
static __device__ float row_most(int64_t n, float* shared, At at) {
  float most = -__builtin_inff();
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    const float x = at(i);
    most = x > most || x != x ? x : most;
  }
  __syncthreads();
  shared[threadIdx.x] = most;
  __syncthreads();
  for (int t = 0; t < kThreads; ++t) most = shared[t] > most || shared[t] != shared[t] ? shared[t] : most;
  return most;
}

// ---- operations on a row --------------------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(kThreads) exact_rms_norm(const T* x, const T* weight, int64_t n, float eps, T* out) {
  const T* row = x + blockIdx.x * n;
  const float sum =
      row_sum<SLIMX_SUM_BLOCK>(n, shared_floats(), [=](int64_t i) { return widened(row[i]) * widened(row[i]); });
  const float scale = divide(1.0f, root(divide(sum, float(n)) + eps));
  for (int64_t i = threadIdx.x; i < n; i += kThreads)
    put(out + blockIdx.x * n + i, (widened(row[i]) * scale) * widened(weight[i]));
}

template <class T>
__global__ void __launch_bounds__(kThreads) exact_silu_and_mul(const T* x, int64_t n, T* out) {
  const T* row = x + 2 * blockIdx.x * n;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    const float gate = widened(row[i]);
    put(out + blockIdx.x * n + i, divide(gate, 1.0f + exact_exp(-gate)) * widened(row[n + i]));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    exact_log_normaliser(const T* logits, const float* temperature, int64_t n, float* most, float* log_sum) {
  const T* row = logits + blockIdx.x * n;
  const float divisor = temperature[blockIdx.x];
  const auto z = [=](int64_t i) { return divide(widened(row[i]), divisor); };
  const float high = row_most(n, shared_floats(), z);
  const float sum = row_sum<SLIMX_SUM_BLOCK>(n, shared_floats(), [=](int64_t i) { return exact_exp(z(i) - high); });
  if (threadIdx.x == 0) {
    most[blockIdx.x] = high;
    log_sum[blockIdx.x] = exact_log(sum);
  }
}

// ---- attention: one row and one head --------------------------------------------------------------------------------

template <class T>
static __device__ float score(const T* query, const T* key, int64_t d, float scale) {
  float lanes[SLIMX_LANES] = {};
  int64_t i = 0;
  for (; i + SLIMX_LANES <= d; i += SLIMX_LANES)
    for (int l = 0; l < SLIMX_LANES; ++l) lanes[l] = multiply_add(widened(query[i + l]), widened(key[i + l]), lanes[l]);
  for (int l = 0; l < SLIMX_LANES; ++l)
    if (i + l < d) lanes[l] = multiply_add(widened(query[i + l]), widened(key[i + l]), lanes[l]);
  return fold(lanes) * scale;
}

template <class T>
__global__ void __launch_bounds__(kThreads) exact_attend(SlimxExactAttention a, float* scores, int64_t longest) {
  const int64_t row = blockIdx.x, head = blockIdx.y, group = head / (a.heads / a.groups), n = a.length[row];
  const int32_t* index = a.index + a.begin[row];
  const T *key = static_cast<const T*>(a.key), *value = static_cast<const T*>(a.value);
  const T* query = static_cast<const T*>(a.query) + (row * a.heads + head) * a.d;
  float *own = scores + (row * a.heads + head) * longest, *shared = shared_floats();
  for (int64_t j = threadIdx.x; j < n; j += kThreads)
    own[j] = score(query, key + (index[j] * a.groups + group) * a.d, a.d, a.scale);
  __syncthreads();
  float most = row_most(n, shared, [=](int64_t j) { return own[j]; });
  if (a.sinks) most = a.sinks[head] > most ? a.sinks[head] : most;
  __syncthreads();
  for (int64_t j = threadIdx.x; j < n; j += kThreads) own[j] = exact_exp(own[j] - most);
  __syncthreads();
  float sum = a.sinks ? exact_exp(a.sinks[head] - most) : 0.0f;
  for (int64_t start = 0; start < n; start += SLIMX_KEY_BLOCK) {
    const int64_t count = n - start < SLIMX_KEY_BLOCK ? n - start : SLIMX_KEY_BLOCK;
    sum = sum + row_sum<SLIMX_SUM_BLOCK>(count, shared, [=](int64_t j) { return own[start + j]; });
  }
  T* out = static_cast<T*>(a.out) + (row * a.heads + head) * a.dv;
  for (int64_t i = threadIdx.x; i < a.dv; i += kThreads) {
    float mixed = 0;
    for (int64_t start = 0; start < n; start += SLIMX_KEY_BLOCK) {
      const int64_t end = start + SLIMX_KEY_BLOCK < n ? start + SLIMX_KEY_BLOCK : n;
      float part = 0;
      for (int64_t j = start; j < end; ++j)
        part = multiply_add(own[j], widened(value[(index[j] * a.groups + group) * a.dv + i]), part);
      mixed = mixed + part;
    }
    put(out + i, divide(mixed, sum));
  }
}

}  // namespace slimx
