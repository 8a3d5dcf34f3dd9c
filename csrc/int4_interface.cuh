// int4_interface.cuh: the plain C interface of the CUDA library of INT4, which
// slimx/extras/low_precision/int4_kernel.py declares.
#pragma once

#include "int4.h"

extern "C" {

int slimx_int4_cuda_abi(void);
const char* slimx_int4_cuda_error_string(int error);

// Queues what slimx_int4 does on `stream`, a cudaStream_t. `matrix` itself is the host's, what it points to and `flags`
// are the device's; bit 0 of `*flags` is set where a group is not finite. Returns a cudaError_t.
int slimx_int4_cuda(const SlimxInt4* matrix, uint32_t* flags, void* stream);

}  // extern "C"
