// exact_rows.cuh: operations of exact mode on the rows of a tensor, on a GPU: one thread block per row.
#pragma once

#include "exact_elements.cuh"

namespace slimx {

constexpr int kRowThreads = 64;

// ---- sums and maxima of a row: all threads must call, and all get the result ----------------------------------------

// Returns the sum of at(i) over [0, n), computed in blocks of kBlock. shared: SLIMX_LANES + 1 floats for each block.
template <int kBlock, class At>
static __device__ float row_sum(int64_t n, float* shared, At at) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  float* sums = shared + blocks * SLIMX_LANES;
  __syncthreads();
  for (int64_t task = threadIdx.x; task < blocks * SLIMX_LANES; task += kRowThreads) {
    const int64_t first = task / SLIMX_LANES * kBlock, end = first + kBlock < n ? first + kBlock : n;
    float sum = 0;
    for (int64_t i = first + task % SLIMX_LANES; i < end; i += SLIMX_LANES) sum = sum + at(i);
    shared[task] = sum;
  }
  __syncthreads();
  for (int64_t block = threadIdx.x; block < blocks; block += kRowThreads)
    sums[block] = fold(shared + block * SLIMX_LANES);
  __syncthreads();
  float sum = 0;
  for (int64_t block = 0; block < blocks; ++block) sum = sum + sums[block];
  return sum;
}

template <class At>
static __device__ float row_most(int64_t n, float* shared, At at) {
  float most = -__builtin_inff();
  for (int64_t i = threadIdx.x; i < n; i += kRowThreads) {
    const float x = at(i);
    most = x > most || x != x ? x : most;
  }
  __syncthreads();
  shared[threadIdx.x] = most;
  __syncthreads();
  for (int t = 0; t < kRowThreads; ++t) most = shared[t] > most || shared[t] != shared[t] ? shared[t] : most;
  return most;
}

// ---- operations on a row --------------------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(kRowThreads)
    exact_rms_norm(const T* x, const T* weight, int64_t n, float eps, T* out) {
  const T* row = x + blockIdx.x * n;
  const float sum =
      row_sum<SLIMX_SUM_BLOCK>(n, shared_floats(), [=](int64_t i) { return widened(row[i]) * widened(row[i]); });
  const float scale = divide(1.0f, root(divide(sum, float(n)) + eps));
  for (int64_t i = threadIdx.x; i < n; i += kRowThreads)
    put(out + blockIdx.x * n + i, (widened(row[i]) * scale) * widened(weight[i]));
}

template <class T>
__global__ void __launch_bounds__(kRowThreads) exact_silu_and_mul(const T* x, int64_t n, T* out) {
  const T* row = x + 2 * blockIdx.x * n;
  for (int64_t i = threadIdx.x; i < n; i += kRowThreads) {
    const float gate = widened(row[i]);
    put(out + blockIdx.x * n + i, divide(gate, 1.0f + exact_exp(-gate)) * widened(row[n + i]));
  }
}

template <class T>
__global__ void __launch_bounds__(kRowThreads)
    exact_log_normalizer(const T* logits, const float* temperature, int64_t n, float* most, float* log_sum) {
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

}  // namespace slimx
