// interface.cuh: the plain C interface of the CUDA library, which slimx/reshard/kernels/cuda.py declares.
//
// Functions return a cudaError_t, 0 for success; `stream` is a cudaStream_t. Calls on streams are asynchronous: none
// waits for the device, allocates, or sets anything of the device, so that they can be captured into a graph.
#pragma once

#include "reshard.h"

extern "C" {

// Changes with what this file declares, and with SLIMX_ABI, so that a stale library is refused when it is loaded.
#define SLIMX_CUDA_ABI (100 * SLIMX_ABI + 1)

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

// ---- memory of a device that processes of one machine share (memory.cu) ---------------------------------------------
//
// Each piece is an allocation of its own: a handle names a whole allocation, and whoever opens it sees all of that.
// Addresses are the calling process's. All act on the current device.

#define SLIMX_CUDA_HANDLE 64  // bytes of a handle

int slimx_cuda_allocate(int64_t bytes, uint64_t* address);
int slimx_cuda_free(uint64_t address);

// The handle by which other processes open the allocation that begins at `address`. Not the one that owns it.
int slimx_cuda_export(uint64_t address, uint8_t* handle);

// Another process's allocation, on whichever device it lies, where the current device can reach it. Close it before its
// owner frees it.
int slimx_cuda_open(const uint8_t* handle, uint64_t* address);
int slimx_cuda_close(uint64_t address);

// Queues a copy between any two places that the current device reaches.
int slimx_cuda_copy(uint64_t to, uint64_t from, int64_t bytes, void* stream);

// Writes the table for slimx_pack's rule TRITON to the device's `out` [SLIMX_TRITON_SCALES][2].
int slimx_cuda_triton_scales(float* out, void* stream);

}  // extern "C"
