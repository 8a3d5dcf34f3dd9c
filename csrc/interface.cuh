// interface.cuh: the plain C interface of the CUDA library, which slimx/reshard/kernels/cuda.py declares.
//
// Functions return a cudaError_t, 0 for success; `stream` is a cudaStream_t. Calls on streams are asynchronous: they
// neither wait for the device nor allocate memory nor change settings of the device, so they can be captured into a
// graph.
#pragma once

#include "reshard.h"

extern "C" {

// Changes with the declarations of this file and with SLIMX_ABI, so that a stale library is refused when it is loaded.
#define SLIMX_CUDA_ABI (100 * SLIMX_ABI + 1)

// The launch of the kernel for one bucket's pieces on one device.
typedef struct {
  int64_t tiles;
  int32_t kernel;  // slimx::Kernel
  int32_t blocks;  // thread blocks: as many as the device runs at once, or `tiles` if these are fewer
  int32_t shared;  // bytes of shared memory of a thread block
  int32_t reserved;
} SlimxCudaLaunch;

int slimx_cuda_abi(void);
const char* slimx_cuda_error_string(int error);

// Writes the number of devices that this process can use to `*count`.
int slimx_cuda_devices(int* count);

// Divides `pieces` [n], in host memory, into tiles: first[k] = number of tiles before piece k, for k = 0 .. n.
// `checksum`: 1 to launch only their checksums. `blocks_per_sm`: 0 for as many as fit.
int slimx_cuda_prepare(const SlimxPiece* pieces, int64_t n, int checksum, int blocks_per_sm, int64_t* first,
                       SlimxCudaLaunch* launch);

// Writes to *index the first piece whose source the current device cannot read at one of its corners, or whose first
// scale it cannot read; n if there is none.
int slimx_cuda_find_unreadable(const SlimxPiece* pieces, int64_t n, int64_t* index);

// Does what slimx_pack does in one launch on `stream`; or what slimx_checksum does if prepared for it, without using
// bucket and flags. `pieces`, `first`, `bucket`, `sums` and `flags` are in memory of the device, and the pieces contain
// addresses that it can read. The caller must have checked their contents.
int slimx_cuda_run(const SlimxPiece* pieces, const int64_t* first, int64_t n, const SlimxCudaLaunch* launch,
                   uint8_t* bucket, uint64_t* sums, uint32_t* flags, void* stream);

// ---- memory of a device that processes of one machine share (memory.cu) ---------------------------------------------
//
// Each allocation is separate: a handle names a whole allocation, and a process that opens it can access all of it.
// Addresses are those of the calling process. All functions use the current device.

#define SLIMX_CUDA_HANDLE 64  // bytes of a handle

int slimx_cuda_allocate(int64_t bytes, uint64_t* address);
int slimx_cuda_free(uint64_t address);

// Returns the handle by which other processes, but not the owner itself, open the allocation that starts at `address`.
int slimx_cuda_export(uint64_t address, uint8_t* handle);

// Opens another process's allocation, on any device that the current device can reach. Close it before its owner frees
// it.
int slimx_cuda_open(const uint8_t* handle, uint64_t* address);
int slimx_cuda_close(uint64_t address);

// Queues a copy between any two addresses that the current device can reach.
int slimx_cuda_copy(uint64_t to, uint64_t from, int64_t bytes, void* stream);

// Writes the table for slimx_pack's rule TRITON to `out` [SLIMX_TRITON_SCALES][2], in memory of the device.
int slimx_cuda_triton_scales(float* out, void* stream);

}  // extern "C"
