// int4.cu: C interface of INT4 quantization on a GPU (int4_interface.cuh).
#include <algorithm>

#include "int4.cuh"
#include "int4_interface.cuh"

using namespace slimx;

int slimx_int4_cuda_abi(void) { return SLIMX_INT4_ABI; }

const char* slimx_int4_cuda_error_string(int error) { return cudaGetErrorString(cudaError_t(error)); }

int slimx_int4_cuda(const SlimxInt4* matrix, uint32_t* flags, void* stream) {
  const int64_t blocks = (matrix->rows * matrix->groups + kThreads - 1) / kThreads;
  if (blocks == 0) return cudaSuccess;
  const auto kernel = matrix->item == 2 ? int4_round<uint16_t> : int4_round<uint32_t>;
  kernel<<<unsigned(std::min<int64_t>(blocks, 1 << 20)), kThreads, 0, cudaStream_t(stream)>>>(*matrix, flags);
  return cudaGetLastError();
}
