// exact.cu: C interface of the CUDA library for exact mode.
#include "exact_attention.cuh"
#include "exact_linear.cuh"
#include "exact_rows.cuh"

using namespace slimx;

namespace {

unsigned parts(int64_t n, int64_t size) { return unsigned((n + size - 1) / size); }

// Bytes of shared memory in which a row's sum and maximum are computed.
int64_t row_bytes(int64_t n) {
  const int64_t floats = int64_t(parts(n, SLIMX_SUM_BLOCK)) * (SLIMX_LANES + 1);
  return 4 * (floats > kRowThreads ? floats : kRowThreads);
}

template <class Tile, class T, class Out>
int linear_tiles(const LinearCall<T>& call, int64_t groups, int64_t longest, void* out, void* stream) {
  const dim3 blocks(parts(call.columns, Tile::kColumns), parts(longest, Tile::kRows), unsigned(groups));
  return launch(exact_linear<T, Out, Tile>, blocks, Tile::kThreads, 0, stream, call, static_cast<Out*>(out));
}

template <class T>
int linear(const void* x, const uint64_t* weights, const int64_t* starts, int64_t groups, int64_t longest,
           int64_t columns, int64_t width, int64_t first, int64_t leaf, void* out, int wide_out, void* stream) {
  const LinearCall<T> call = {static_cast<const T*>(x), weights, starts, columns, width, first, leaf};
  const auto run = longest <= FewRows::kRows
                       ? wide_out ? linear_tiles<FewRows, T, float> : linear_tiles<FewRows, T, uint16_t>
                   : wide_out ? linear_tiles<ManyRows, T, float>
                              : linear_tiles<ManyRows, T, uint16_t>;
  return run(call, groups, longest, out, stream);
}

template <class T>
int rms_norm(const void* x, const void* weight, int64_t rows, int64_t width, float eps, void* out, void* stream) {
  return launch(exact_rms_norm<T>, dim3(unsigned(rows)), kRowThreads, row_bytes(width), stream,
                static_cast<const T*>(x), static_cast<const T*>(weight), width, eps, static_cast<T*>(out));
}

template <class T>
int silu_and_mul(const void* x, int64_t rows, int64_t width, void* out, void* stream) {
  return launch(exact_silu_and_mul<T>, dim3(unsigned(rows)), kRowThreads, 0, stream, static_cast<const T*>(x), width,
                static_cast<T*>(out));
}

template <class T>
int log_normalizer(const void* logits, const float* temperature, int64_t rows, int64_t width, float* most,
                   float* log_sum, void* stream) {
  return launch(exact_log_normalizer<T>, dim3(unsigned(rows)), kRowThreads, row_bytes(width), stream,
                static_cast<const T*>(logits), temperature, width, most, log_sum);
}

template <class T>
int attend(const SlimxExactAttention& call, float* scores, int64_t longest, int together, void* stream) {
  const int64_t shared_by = call.heads / call.groups, row_queries = shared_by < kQueries ? shared_by : kQueries;
  const int64_t rows = together ? kQueries / row_queries : 1;
  const dim3 blocks(parts(call.rows, rows), unsigned(call.groups) * parts(shared_by, row_queries));
  return launch(exact_attend<T>, blocks, kAttendThreads, 0, stream, call, scores, longest, rows, row_queries);
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

int slimx_exact_cuda_log_normalizer(const void* logits, const float* temperature, int64_t rows, int64_t width, int wide,
                                    float* most, float* log_sum, void* stream) {
  const auto run = wide ? log_normalizer<float> : log_normalizer<uint16_t>;
  return run(logits, temperature, rows, width, most, log_sum, stream);
}

int slimx_exact_cuda_attend(const SlimxExactAttention* call, float* scores, int64_t longest, int together,
                            void* stream) {
  return (call->wide ? attend<float> : attend<uint16_t>)(*call, scores, longest, together, stream);
}
