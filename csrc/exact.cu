// exact.cu: the C interface of the CUDA library of exact mode.
#include "exact_kernels.cuh"

using namespace slimx;

namespace {

unsigned parts(int64_t n, int64_t size) { return unsigned((n + size - 1) / size); }

// Bytes of shared memory for the sum and the maximum of a row.
int64_t row_bytes(int64_t n) {
  const int64_t floats = int64_t(parts(n, SLIMX_SUM_BLOCK)) * (SLIMX_LANES + 1);
  return 4 * (floats > kThreads ? floats : kThreads);
}

template <class T>
int linear(const void* x, const uint64_t* weights, const int64_t* starts, int64_t groups, int64_t longest,
           int64_t columns, int64_t width, int64_t first, int64_t leaf, void* out, int wide_out, void* stream) {
  const LinearCall<T> call = {static_cast<const T*>(x), weights, starts, columns, width, first, leaf};
  const dim3 blocks(parts(columns, kSide), parts(longest, kSide), unsigned(groups));
  return wide_out ? launch(exact_linear<T, float>, blocks, kThreads, 0, stream, call, static_cast<float*>(out))
                  : launch(exact_linear<T, uint16_t>, blocks, kThreads, 0, stream, call, static_cast<uint16_t*>(out));
}

template <class T>
int rms_norm(const void* x, const void* weight, int64_t rows, int64_t width, float eps, void* out, void* stream) {
  return launch(exact_rms_norm<T>, dim3(unsigned(rows)), kThreads, row_bytes(width), stream, static_cast<const T*>(x),
                static_cast<const T*>(weight), width, eps, static_cast<T*>(out));
}

template <class T>
int silu_and_mul(const void* x, int64_t rows, int64_t width, void* out, void* stream) {
  return launch(exact_silu_and_mul<T>, dim3(unsigned(rows)), kThreads, 0, stream, static_cast<const T*>(x), width,
                static_cast<T*>(out));
}

template <class T>
int log_normaliser(const void* logits, const float* temperature, int64_t rows, int64_t width, float* most,
                   float* log_sum, void* stream) {
  return launch(exact_log_normaliser<T>, dim3(unsigned(rows)), kThreads, row_bytes(width), stream,
                static_cast<const T*>(logits), temperature, width, most, log_sum);
}

}  // namespace

int slimx_exact_cuda_abi(void) { return SLIMX_EXACT_CUDA_ABI; }

const char* slimx_exact_cuda_error_string(int error) { return cudaGetErrorString(cudaError_t(error)); }

int slimx_exact_cuda_linear(const void* x, const uint64_t* weights, const int64_t* starts, int64_t groups,
                            int64_t longest, int64_t columns, int64_t width, int64_t first, int64_t leaf, int wide,
                            void* out, int wide_out, void* stream) {
  const auto run = wide ? linear<float> : linear<uint16_t>;
  return run(x, weights, starts, groups, longest, columns, width, first, leaf, out, wide_out, stream);
}

int slimx_exact_cuda_rms_norm(const void* x, const void* weight, int64_t rows, int64_t width, float eps, int wide,
                              void* out, void* stream) {
  return (wide ? rms_norm<float> : rms_norm<uint16_t>)(x, weight, rows, width, eps, out, stream);
}

int slimx_exact_cuda_silu_and_mul(const void* x, int64_t rows, int64_t width, int wide, void* out, void* stream) {
  return (wide ? silu_and_mul<float> : silu_and_mul<uint16_t>)(x, rows, width, out, stream);
}

int slimx_exact_cuda_log_normaliser(const void* logits, const float* temperature, int64_t rows, int64_t width, int wide,
                                    float* most, float* log_sum, void* stream) {
  const auto run = wide ? log_normaliser<float> : log_normaliser<uint16_t>;
  return run(logits, temperature, rows, width, most, log_sum, stream);
}

int slimx_exact_cuda_attend(const SlimxExactAttention* call, float* scores, int64_t longest, void* stream) {
  const dim3 blocks(unsigned(call->rows), unsigned(call->heads));
  const int64_t shared = row_bytes(SLIMX_KEY_BLOCK);
  return call->wide ? launch(exact_attend<float>, blocks, kThreads, shared, stream, *call, scores, longest)
                    : launch(exact_attend<uint16_t>, blocks, kThreads, shared, stream, *call, scores, longest);
}
