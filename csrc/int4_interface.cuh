// int4_interface.cuh: the plain C interface of the CUDA library for INT4, which
// slimx/extras/low_precision/int4_kernel.py declares.
#pragma once

#include "int4.h"

extern "C" {

int slimx_int4_cuda_abi(void);
const char* slimx_int4_cuda_error_string(int error);

// Queues on `stream`, a cudaStream_t, what slimx_int4 does. `matrix` itself is in host memory; the memory it points to
// and `flags` are on the device. Bit 0 of `*flags` is set if a group contains a value that is not finite. Returns a
// cudaError_t.
int slimx_int4_cuda(const SlimxInt4* matrix, uint32_t* flags, void* stream);

}  // extern "C"
