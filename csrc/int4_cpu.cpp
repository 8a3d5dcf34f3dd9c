// int4_cpu.cpp: INT4 quantization on the CPU (int4.h).
#include <algorithm>

#include "arithmetic.h"
#include "int4.h"

using namespace slimx;

namespace {

// Number of groups that a thread takes at once.
constexpr int64_t kBatch = 512;

template <class T>
uint32_t run(const SlimxInt4& m, int threads) {
  const int64_t all = m.rows * m.groups;
  const int team = int(std::clamp<int64_t>(all / kBatch, 1, threads));
  uint32_t bad = 0;
#pragma omp parallel num_threads(team) reduction(| : bad)
  {
    const IeeeArithmetic arithmetic;  // numerics.h relies on this mode
#pragma omp for schedule(static)
    for (int64_t index = 0; index < all; ++index) bad |= slimx_int4_at<T>(m, index);
  }
  return bad;
}

}  // namespace

int slimx_int4_abi(void) { return SLIMX_INT4_ABI; }

int slimx_int4(const SlimxInt4* matrix, int threads) {
  return int(matrix->item == 2 ? run<uint16_t>(*matrix, threads) : run<uint32_t>(*matrix, threads));
}
