// exact_interface.cuh: the plain C interface of the CUDA library for exact mode: the operations of exact.h on a device.
//
// Functions return a cudaError_t, 0 for success; `stream` is a cudaStream_t. No function waits for the device or
// allocates memory.
#pragma once

#include "exact.h"

extern "C" {

#define SLIMX_EXACT_CUDA_ABI (100 * SLIMX_EXACT_ABI + 2)  // same value in slimx/extras/exact/ordered/kernel_cuda.py
#define SLIMX_EXACT_MOST_WIDTH 524288  // maximum elements of a row that is summed, limited by shared memory

int slimx_exact_cuda_abi(void);
const char* slimx_exact_cuda_error_string(int error);

// Computes one leaf of slimx_exact_linear: elements [first, first + leaf) of rows of `width` elements. weights
// [groups]: addresses; starts [groups + 1]: first row of each group; longest: rows of the largest group.
int slimx_exact_cuda_linear(const void* x, const uint64_t* weights, const int64_t* starts, int64_t groups,
                            int64_t longest, int64_t columns, int64_t width, int64_t first, int64_t leaf, int wide,
                            void* out, int wide_out, void* stream);

int slimx_exact_cuda_rms_norm(const void* x, const void* weight, int64_t rows, int64_t width, float eps, int wide,
                              void* out, void* stream);

int slimx_exact_cuda_silu_and_mul(const void* x, int64_t rows, int64_t width, int wide, void* out, void* stream);

int slimx_exact_cuda_log_normalizer(const void* logits, const float* temperature, int64_t rows, int64_t width, int wide,
                                    float* most, float* log_sum, void* stream);

// `scores` [rows][heads][longest]: scratch. longest: largest of call->length. together: 1 if neighboring rows read the
// same keys, as in a sequence; this is faster then and changes no bit.
int slimx_exact_cuda_attend(const SlimxExactAttention* call, float* scores, int64_t longest, int together,
                            void* stream);

}  // extern "C"
