// reshard_cpu.cpp: the packing kernels on the CPU: divides pieces into tiles and processes one tile per thread at a
// time.
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "arithmetic.h"
#include "cut.h"
#include "isa.h"
#include "quantize.h"
#include "reshard.h"
#include "tile.h"

using namespace slimx;

static_assert(sizeof(SlimxPiece) == 128, "the record is read by slimx/reshard/kernels/cpu.py");

namespace {

// Number of tiles that a thread takes at once; otherwise a plan of many small pieces would spend its time on the shared
// counter.
constexpr int kBatch = 4;

// ---- one tile -------------------------------------------------------------------------------------------------------

// Copies the elements of a transposed tile to `buffer`, in row order; returns the tile as a piece there.
SLIMX_INLINE SlimxPiece in_row_order(SlimxPiece p, uint8_t* buffer) {
  const uint8_t* src = reinterpret_cast<const uint8_t*>(p.src);
  for (int64_t c = 0; c < p.cols; ++c)
    for (int64_t r = 0; r < p.rows; ++r) {
      const uint8_t* from = src + c * p.src_step + r * p.src_ld;
      uint8_t* to = buffer + (r * p.cols + c) * p.item;
      if (p.item == 2)
        memcpy(to, from, 2);
      else if (p.item == 4)
        memcpy(to, from, 4);
      else
        for (int k = 0; k < p.item; ++k) to[k] = from[k];
    }
  p.src = reinterpret_cast<uint64_t>(buffer);
  p.src_ld = p.cols * p.item;
  p.src_step = p.item;
  return p;
}

template <class Isa, bool kCopy>
SLIMX_INLINE Share run_tile(SlimxPiece p, uint8_t* bucket, const float* triton_scales, uint8_t* buffer) {
  if (is_transposed(p)) p = in_row_order(p, buffer);
  if (!kCopy) return copy_tile<Isa, false, 0>(p, nullptr);
  const bool bf16_in = p.item == 2, bf16_out = p.out == 2;
  switch (p.op) {
    case SLIMX_COPY_CHECKED:
      return bf16_in ? copy_tile<Isa, true, 2>(p, bucket) : copy_tile<Isa, true, 4>(p, bucket);
    case SLIMX_FP32_TO_BF16:
      return convert_tile<Isa, uint32_t, uint16_t>(p, bucket);
    case SLIMX_BF16_TO_FP32:
      return convert_tile<Isa, uint16_t, uint32_t>(p, bucket);
    case SLIMX_QUANTIZE_FP8:
      return bf16_in ? quantize_tile<Isa, uint16_t, uint32_t>(p, bucket, triton_scales)
                     : quantize_tile<Isa, uint32_t, uint32_t>(p, bucket, triton_scales);
    case SLIMX_QUANTIZE_MXFP8:
      return bf16_in ? quantize_tile<Isa, uint16_t, uint8_t>(p, bucket, triton_scales)
                     : quantize_tile<Isa, uint32_t, uint8_t>(p, bucket, triton_scales);
    case SLIMX_QUANTIZE_INT4:
      return bf16_in ? quantize_int4_tile<Isa, uint16_t>(p, bucket) : quantize_int4_tile<Isa, uint32_t>(p, bucket);
    case SLIMX_DEQUANTIZE_FP8:
    case SLIMX_DEQUANTIZE_MXFP8:
      return bf16_out ? dequantize_tile<Isa, uint16_t>(p, bucket) : dequantize_tile<Isa, uint32_t>(p, bucket);
    default:
      return copy_tile<Isa, true, 0>(p, bucket);
  }
}

// Everything above is inlined into these three functions, one per instruction set.
using Run = Share (*)(const SlimxPiece&, uint8_t*, const float*, uint8_t*);

template <bool kCopy>
Share run_scalar(const SlimxPiece& p, uint8_t* bucket, const float* triton_scales, uint8_t* buffer) {
  return run_tile<Scalar, kCopy>(p, bucket, triton_scales, buffer);
}

#if defined(__x86_64__)
template <bool kCopy>
SLIMX_TARGET_AVX2 Share run_avx2(const SlimxPiece& p, uint8_t* bucket, const float* triton_scales, uint8_t* buffer) {
  return run_tile<Avx2, kCopy>(p, bucket, triton_scales, buffer);
}

template <bool kCopy>
SLIMX_TARGET_AVX512 Share run_avx512(const SlimxPiece& p, uint8_t* bucket, const float* triton_scales,
                                     uint8_t* buffer) {
  return run_tile<Avx512, kCopy>(p, bucket, triton_scales, buffer);
}
#endif

// Returns the function for `isa`; nullptr if the processor lacks the instruction set.
template <bool kCopy>
Run run_for(SlimxIsa isa) {
  if (!slimx_has_isa(isa)) return nullptr;
#if defined(__x86_64__)
  const SlimxIsa best = slimx_has_isa(SLIMX_ISA_AVX512) ? SLIMX_ISA_AVX512
                        : slimx_has_isa(SLIMX_ISA_AVX2) ? SLIMX_ISA_AVX2
                                                        : SLIMX_ISA_SCALAR;
  const SlimxIsa chosen = isa == SLIMX_ISA_BEST ? best : isa;
  if (chosen == SLIMX_ISA_AVX512) return run_avx512<kCopy>;
  if (chosen == SLIMX_ISA_AVX2) return run_avx2<kCopy>;
#endif
  return run_scalar<kCopy>;
}

// ---- all tiles ------------------------------------------------------------------------------------------------------

struct Output {
  uint8_t* bucket;
  uint64_t* sums;
  uint32_t* flags;
};

void add(const SlimxPiece& p, const Share& share, const Output& out) {
#pragma omp atomic
  out.sums[p.tensor] += share.values;
  if (p.scale_tensor >= 0 && share.scales != 0) {
#pragma omp atomic
    out.sums[p.scale_tensor] += share.scales;
  }
  if (share.nonfinite) {
#pragma omp atomic
    out.flags[p.tensor] |= SLIMX_NONFINITE;
  }
}

template <bool kCopy>
SlimxStatus run(const SlimxPiece* pieces, int64_t n, const Output& out, const float* triton_scales, SlimxIsa isa,
                int threads) {
  const Run run_one = run_for<kCopy>(isa);
  if (!run_one) return SLIMX_NO_SUCH_ISA;
  std::vector<SlimxPiece> tiles;
  std::vector<uint8_t> buffers;
  int64_t buffer = 0;  // bytes of one thread's buffer
  int team = 1;
  try {
    for (int64_t k = 0; k < n; ++k) {
      SlimxPiece p = pieces[k];
      if (!kCopy) p.op = SLIMX_COPY, p.out = p.item;
      cut(tiles, p, kCopy);
    }
    for (const SlimxPiece& tile : tiles)
      if (is_transposed(tile)) buffer = std::max(buffer, (tile.rows * tile.cols * tile.item + 63) / 64 * 64);
    team = int(std::clamp<int64_t>(int64_t(tiles.size()) / kBatch, 1, threads));
    buffers.resize(team * buffer);
  } catch (const std::bad_alloc&) {
    return SLIMX_NO_MEMORY;
  }
#pragma omp parallel num_threads(team)
  {
    const IeeeArithmetic arithmetic;  // numerics.h relies on this mode
    uint8_t* mine = buffers.data() + omp_get_thread_num() * buffer;
#pragma omp for schedule(dynamic, kBatch)
    for (size_t t = 0; t < tiles.size(); ++t) {
      const Share share = run_one(tiles[t], out.bucket, triton_scales, mine);
      finish_stores();
      add(tiles[t], share, out);
    }
  }
  return SLIMX_OK;
}

}  // namespace

int slimx_abi(void) { return SLIMX_ABI; }

int slimx_has_isa(SlimxIsa isa) {
#if defined(__x86_64__)
  if (isa == SLIMX_ISA_AVX512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vbmi");
  if (isa == SLIMX_ISA_AVX2) return __builtin_cpu_supports("avx2") != 0;
#endif
  return isa == SLIMX_ISA_BEST || isa == SLIMX_ISA_SCALAR;
}

void slimx_seed(const int64_t* bytes, int64_t n, uint64_t* sums) {
  for (int64_t k = 0; k < n; ++k) {
    uint64_t z = uint64_t(bytes[k]) + 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    sums[k] += z ^ (z >> 31);
  }
}

SlimxStatus slimx_pack(const SlimxPiece* pieces, int64_t n, uint8_t* bucket, uint64_t* sums, uint32_t* flags,
                       const float* triton_scales, SlimxIsa isa, int threads) {
  const auto needs_table = [](const SlimxPiece& p) { return p.rule == SLIMX_RULE_TRITON; };
  if (!triton_scales && std::any_of(pieces, pieces + n, needs_table)) return SLIMX_NO_TRITON_SCALES;
  return run<true>(pieces, n, {bucket, sums, flags}, triton_scales, isa, threads);
}

SlimxStatus slimx_checksum(const SlimxPiece* pieces, int64_t n, uint64_t* sums, SlimxIsa isa, int threads) {
  return run<false>(pieces, n, {nullptr, sums, nullptr}, nullptr, isa, threads);
}
