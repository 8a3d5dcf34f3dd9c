// reshard.cu: C interface of the CUDA library. It shares the record, the numerics and the checksum with the CPU library
// (reshard.h, numerics.h), so the same pieces give the same bucket, sums and flags, bit for bit.
#include <algorithm>

#include "interface.cuh"
#include "kernel.cuh"

using namespace slimx;

static_assert(sizeof(SlimxPiece) == 128, "the record is read by slimx/reshard/kernels/cpu.py");

namespace {

using Reshard = void (*)(const SlimxPiece*, const int64_t*, int64_t, int64_t, uint8_t*, uint64_t*, uint32_t*);

Reshard kernel_of(int32_t kernel) {
  return kernel == int32_t(Kernel::kChecksum) ? reshard<Kernel::kChecksum> : reshard<Kernel::kPack>;
}

cudaError_t is_readable(uint64_t address, bool* yes) {
  cudaPointerAttributes found;
  const cudaError_t error = cudaPointerGetAttributes(&found, reinterpret_cast<const void*>(address));
  *yes = error == cudaSuccess && found.devicePointer != nullptr;
  return error;
}

}  // namespace

int slimx_cuda_abi(void) { return SLIMX_CUDA_ABI; }

const char* slimx_cuda_error_string(int error) { return cudaGetErrorString(cudaError_t(error)); }

int slimx_cuda_devices(int* count) { return cudaGetDeviceCount(count); }

int slimx_cuda_prepare(const SlimxPiece* pieces, int64_t n, int checksum, int blocks_per_sm, int64_t* first,
                       SlimxCudaLaunch* launch) {
  const Kernel kernel = checksum ? Kernel::kChecksum : Kernel::kPack;
  int slots = 0, device = 0, processors = 0;
  count_tiles(pieces, n, kernel, first, &slots);
  *launch = {first[n], int32_t(kernel), 0, shared_bytes(slots), 0};
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device))
    return error;
  const Reshard run = kernel_of(launch->kernel);
  const auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;  // 48 KiB by default
  if (const cudaError_t error = cudaFuncSetAttribute(run, limit, shared_bytes(2 * kUnits))) return error;
  int fit = 0;
  if (const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, run, kThreads, launch->shared))
    return error;
  if (blocks_per_sm == 0) blocks_per_sm = fit;
  launch->blocks = int32_t(std::min<int64_t>(launch->tiles, int64_t(processors) * blocks_per_sm));
  return cudaSuccess;
}

int slimx_cuda_find_unreadable(const SlimxPiece* pieces, int64_t n, int64_t* index) {
  for (*index = 0; *index < n; ++*index) {
    const SlimxPiece& p = pieces[*index];
    if (p.rows == 0 || p.cols == 0) continue;
    const bool dequantizes = p.op == SLIMX_DEQUANTIZE_FP8 || p.op == SLIMX_DEQUANTIZE_MXFP8;
    const uint64_t last = p.src + (p.rows - 1) * p.src_ld + (p.cols - 1) * p.src_step;
    for (const uint64_t address : {p.src, last, dequantizes ? p.scale : p.src}) {
      bool yes = false;
      if (const cudaError_t error = is_readable(address, &yes)) return error;
      if (!yes) return cudaSuccess;
    }
  }
  return cudaSuccess;
}

int slimx_cuda_run(const SlimxPiece* pieces, const int64_t* first, int64_t n, const SlimxCudaLaunch* launch,
                   uint8_t* bucket, uint64_t* sums, uint32_t* flags, void* stream) {
  if (launch->tiles == 0) return cudaSuccess;
  kernel_of(launch->kernel)<<<launch->blocks, kThreads, launch->shared, cudaStream_t(stream)>>>(
      pieces, first, n, launch->tiles, bucket, sums, flags);
  return cudaGetLastError();
}

int slimx_cuda_triton_scales(float* out, void* stream) {
  triton_scales<<<(SLIMX_TRITON_SCALES + kThreads - 1) / kThreads, kThreads, 0, cudaStream_t(stream)>>>(out);
  return cudaGetLastError();
}
