// interface.cuh: the plain C interface of the CUDA library, which slimx/reshard/kernel_cuda.py declares.
//
// Functions return a cudaError_t, 0 for success; `stream` is a cudaStream_t. Calls on streams are asynchronous: none
// waits for the device, allocates, or sets anything of the device, so that they can be captured into a graph.
#pragma once

#include "reshard.h"

extern "C" {

// How the kernel is launched for one bucket's pieces on one device.
typedef struct {
  int64_t tiles;
  int32_t kernel;  // slimx::Kernel
  int32_t blocks;  // thread blocks: as many as the device runs at once, or `tiles` where those are fewer
  int32_t shared;  // bytes of shared memory in a thread block
  int32_t reserved;
} SlimxCudaLaunch;

int slimx_cuda_abi(void);
const char* slimx_cuda_error_string(int error);

// The number of devices that this process can use.
int slimx_cuda_devices(int* count);

// Cuts `pieces` [n], in host memory, into tiles: first[k] = tiles before piece k, for k = 0 .. n. `checksum`: for their
// checksums alone. `blocks_per_sm`: 0 for as many as fit.
int slimx_cuda_prepare(const SlimxPiece* pieces, int64_t n, int checksum, int blocks_per_sm, int64_t* first,
                       SlimxCudaLaunch* launch);

// The first piece, in *index, of which the current device cannot read a corner of the source, or the first scale; n
// where there is none.
int slimx_cuda_find_unreadable(const SlimxPiece* pieces, int64_t n, int64_t* index);

// What slimx_pack (or slimx_checksum, where prepared so; it leaves bucket and flags alone) does, in one launch on
// `stream`. `pieces`, `first`, `bucket`, `sums` and `flags` are the device's, and pieces hold addresses that it can
// read. Their contents are the caller's to check.
int slimx_cuda_run(const SlimxPiece* pieces, const int64_t* first, int64_t n, const SlimxCudaLaunch* launch,
                   uint8_t* bucket, uint64_t* sums, uint32_t* flags, void* stream);

// Writes the table for slimx_pack's rule TRITON to the device's `out` [SLIMX_TRITON_SCALES][2].
int slimx_cuda_triton_scales(float* out, void* stream);

}  // extern "C"
