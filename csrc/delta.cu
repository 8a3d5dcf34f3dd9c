// delta.cu: frames of what has changed (delta.h) of memory that a device reads.
#include <algorithm>

#include "delta.cuh"
#include "interface.cuh"

using namespace slimx;

int slimx_cuda_delta(const uint8_t* base, const uint8_t* fresh, int64_t bytes, int item, uint8_t* slots,
                     uint32_t* sizes, uint8_t* frame, int64_t* length, void* stream) {
  const int64_t chunks = slimx_delta_chunks(bytes);
  int device = 0, processors = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device))
    return error;
  const int blocks = int(std::min<int64_t>(chunks, 4 * int64_t(processors)));
  const cudaStream_t queue = cudaStream_t(stream);
  const auto encode = item == 2 ? delta_encode<2> : delta_encode<1>;
  encode<<<blocks, kThreads, kDeltaShared, queue>>>(base, fresh, bytes, slots, sizes);
  if (const cudaError_t error = cudaGetLastError()) return error;
  delta_join<<<blocks, kThreads, kDeltaShared, queue>>>(slots, sizes, chunks, frame, length);
  return cudaGetLastError();
}
