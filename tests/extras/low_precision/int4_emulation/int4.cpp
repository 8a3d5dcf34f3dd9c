// The kernel of int4.cuh, its threads one after another.
#include "int4.cuh"
#include "int4_interface.cuh"
int slimx_int4_cuda_abi(void) { return SLIMX_INT4_ABI; }
const char* slimx_int4_cuda_error_string(int) { return "an error"; }
template <class T>
void run(const SlimxInt4& matrix, uint32_t* flags) {
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < slimx::kThreads; ++threadIdx.x) slimx::int4_round<T>(matrix, flags);
}
int slimx_int4_cuda(const SlimxInt4* matrix, uint32_t* flags, void*) {
  gridDim.x = 3;  // threads take several groups each
  matrix->item == 2 ? run<uint16_t>(*matrix, flags) : run<uint32_t>(*matrix, flags);
  return 0;
}
