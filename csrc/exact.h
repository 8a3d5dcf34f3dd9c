// exact.h: the interface of the kernels of exact mode: forward operations whose results have one order of operations.
//
// docs/numerics.md has the contract, slimx/extras/exact/operations/forward/reference.py says it in torch. Each row of a
// result is made from its own row of the input: bits are the same for every batch, number of threads and instruction
// set.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SLIMX_EXACT_ABI 1  // also in slimx/extras/exact/ordered/kernel.py

// Sizes of the contract; also in slimx/extras/exact/operations/sizes.py and slimx/extras/exact/ordered/reference.py.
#define SLIMX_K_BLOCK 32      // elements of a block of a linear's dot product
#define SLIMX_LANES 16        // partial sums of other reductions
#define SLIMX_SUM_BLOCK 1024  // elements that are summed by themselves
#define SLIMX_KEY_BLOCK 128   // keys likewise
#define SLIMX_MOST_LEAVES 64

typedef enum { SLIMX_EXACT_OK = 0, SLIMX_EXACT_NO_MEMORY = 1, SLIMX_EXACT_NO_SUCH_ISA = 2 } SlimxExactStatus;

typedef enum {
  SLIMX_EXACT_BEST = 0,
  SLIMX_EXACT_SCALAR = 1,
  SLIMX_EXACT_AVX2 = 2,
  SLIMX_EXACT_AVX512 = 3,
  SLIMX_EXACT_AMX = 4,  // bf16 linears; the rest is AVX-512's
} SlimxExactIsa;

// The rows of one expert, after those of the experts before it, and its weight [N][K].
typedef struct {
  const void* weight;
  int64_t rows;
} SlimxExactGroup;

// Tensors are contiguous; `wide`: 1 for fp32, 0 for bf16. `threads` is the most that are used.

int slimx_exact_abi(void);
int slimx_exact_has_isa(SlimxExactIsa isa);  // 1 or 0

// out [T][N] = x [T][K] times its group's weight, transposed; T is the sum of all rows. `leaves` divides K.
SlimxExactStatus slimx_exact_linear(const void* x, const SlimxExactGroup* groups, int64_t n_groups, int64_t columns,
                                    int64_t width, int leaves, int wide, void* out, int wide_out, SlimxExactIsa isa,
                                    int threads);

// out [rows][width] = x / sqrt(mean(x^2) + eps) * weight.
SlimxExactStatus slimx_exact_rms_norm(const void* x, const void* weight, int64_t rows, int64_t width, float eps,
                                      int wide, void* out, SlimxExactIsa isa, int threads);

// out [rows][width] = silu(x[:, :width]) * x[:, width:].
SlimxExactStatus slimx_exact_silu_and_mul(const void* x, int64_t rows, int64_t width, int wide, void* out,
                                          SlimxExactIsa isa, int threads);

// Of z = logits / temperature: most [rows] = max z, log_sum [rows] = log(sum(exp(z - most))).
SlimxExactStatus slimx_exact_log_normalizer(const void* logits, const float* temperature, int64_t rows, int64_t width,
                                            int wide, float* most, float* log_sum, SlimxExactIsa isa, int threads);

typedef struct {
  const void* query;  // [rows][heads][d]
  const void* key;    // [*][groups][d]
  const void* value;  // [*][groups][dv]
  const int32_t* index;
  const int64_t* begin;   // [rows]: row r reads index[begin[r]] ... index[begin[r] + length[r] - 1]
  const int64_t* length;  // [rows], each at least 1
  const float* sinks;     // [heads], or NULL
  void* out;              // [rows][heads][dv]
  int64_t rows;
  int64_t heads;
  int64_t groups;
  int64_t d;
  int64_t dv;
  float scale;
  int32_t wide;
} SlimxExactAttention;

SlimxExactStatus slimx_exact_attend(const SlimxExactAttention* call, SlimxExactIsa isa, int threads);

#ifdef __cplusplus
}
#endif
