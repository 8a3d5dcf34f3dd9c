// exact.h: C interface of the kernels of exact mode: forward operations with a fixed order of arithmetic.
//
// docs/numerics.md defines the contract, and slimx/extras/exact/operations/forward/reference.py implements it in torch.
// Each row of a result depends only on its own row of the input, so the bits are the same for every batch, number of
// threads and instruction set.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SLIMX_EXACT_ABI 1  // same value in slimx/extras/exact/ordered/kernel.py

// Sizes of the contract; the same values in slimx/extras/exact/operations/sizes.py and
// slimx/extras/exact/ordered/reference.py.
#define SLIMX_K_BLOCK 32      // elements in a block of a linear layer's dot product
#define SLIMX_LANES 16        // partial sums in other reductions
#define SLIMX_SUM_BLOCK 1024  // elements whose sum is computed separately
#define SLIMX_KEY_BLOCK 128   // keys whose sum is computed separately
#define SLIMX_MOST_LEAVES 64

typedef enum { SLIMX_EXACT_OK = 0, SLIMX_EXACT_NO_MEMORY = 1, SLIMX_EXACT_NO_SUCH_ISA = 2 } SlimxExactStatus;

typedef enum {
  SLIMX_EXACT_BEST = 0,
  SLIMX_EXACT_SCALAR = 1,
  SLIMX_EXACT_AVX2 = 2,
  SLIMX_EXACT_AVX512 = 3,
  SLIMX_EXACT_AMX = 4,  // for bf16 linear layers; everything else uses AVX-512
} SlimxExactIsa;

// Rows of one expert, which follow those of the previous expert, and its weight [N][K].
typedef struct {
  const void* weight;
  int64_t rows;
} SlimxExactGroup;

// Tensors are contiguous. `wide`: 1 for fp32, 0 for bf16. `threads`: maximum number of threads.

int slimx_exact_abi(void);
int slimx_exact_has_isa(SlimxExactIsa isa);  // 1 or 0

// out [T][N] = x [T][K] times the transposed weight of its group; T is the total number of rows. `leaves` divides K.
SlimxExactStatus slimx_exact_linear(const void* x, const SlimxExactGroup* groups, int64_t n_groups, int64_t columns,
                                    int64_t width, int leaves, int wide, void* out, int wide_out, SlimxExactIsa isa,
                                    int threads);

// out [rows][width] = x / sqrt(mean(x^2) + eps) * weight.
SlimxExactStatus slimx_exact_rms_norm(const void* x, const void* weight, int64_t rows, int64_t width, float eps,
                                      int wide, void* out, SlimxExactIsa isa, int threads);

// out [rows][width] = silu(x[:, :width]) * x[:, width:].
SlimxExactStatus slimx_exact_silu_and_mul(const void* x, int64_t rows, int64_t width, int wide, void* out,
                                          SlimxExactIsa isa, int threads);

// For z = logits / temperature: most [rows] = max z, log_sum [rows] = log(sum(exp(z - most))).
SlimxExactStatus slimx_exact_log_normalizer(const void* logits, const float* temperature, int64_t rows, int64_t width,
                                            int wide, float* most, float* log_sum, SlimxExactIsa isa, int threads);

typedef struct {
  const void* query;  // [rows][heads][d]
  const void* key;    // [*][groups][d]
  const void* value;  // [*][groups][dv]
  const int32_t* index;
  const int64_t* begin;   // [rows]: row r reads the keys index[begin[r]] ... index[begin[r] + length[r] - 1]
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
