// memory.cu: memory of a device that processes of one machine share, by CUDA's handles for inter-process communication.
#include <string.h>

#include "interface.cuh"

static_assert(sizeof(cudaIpcMemHandle_t) == SLIMX_CUDA_HANDLE, "handles travel as so many bytes");

namespace {

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

int slimx_cuda_allocate(int64_t bytes, uint64_t* address) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, size_t(bytes));
  *address = reinterpret_cast<uint64_t>(memory);
  if (error) cudaGetLastError();  // cleared, so that the next launch does not report the failed allocation
  return error;
}

int slimx_cuda_free(uint64_t address) { return cudaFree(pointer(address)); }

int slimx_cuda_export(uint64_t address, uint8_t* handle) {
  cudaIpcMemHandle_t made;
  const cudaError_t error = cudaIpcGetMemHandle(&made, pointer(address));
  memcpy(handle, &made, sizeof made);
  return error;
}

int slimx_cuda_open(const uint8_t* handle, uint64_t* address) {
  cudaIpcMemHandle_t given;
  memcpy(&given, handle, sizeof given);
  void* memory = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&memory, given, cudaIpcMemLazyEnablePeerAccess);
  *address = reinterpret_cast<uint64_t>(memory);
  if (error) cudaGetLastError();  // cleared, because the caller may continue without this memory
  return error;
}

int slimx_cuda_close(uint64_t address) { return cudaIpcCloseMemHandle(pointer(address)); }

int slimx_cuda_copy(uint64_t to, uint64_t from, int64_t bytes, void* stream) {
  return cudaMemcpyAsync(pointer(to), pointer(from), size_t(bytes), cudaMemcpyDefault, cudaStream_t(stream));
}
