// exact_cpu.cpp: the kernels of exact mode on the CPU: which instruction set computes, and which thread computes what.
#include <math.h>
#include <omp.h>
#include <string.h>

#include <algorithm>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "arithmetic.h"
#include "exact.h"

namespace slimx {
namespace {

int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

struct LinearShape {
  int64_t columns, width;  // N, K
  int leaves;
  int64_t leaf, padded_leaf;  // elements of a leaf; up to a whole block
  bool wide, wide_out;
  int64_t padded() const { return leaves * padded_leaf; }
};

// What an instruction set offers; each function computes the same bits.
struct Kernels {
  int width;
  int64_t (*prepared_size)(int64_t rows, const LinearShape&);
  int64_t (*linear_scratch)(int64_t rows, const LinearShape&);
  void (*prepare)(const void* x, int64_t rows, const LinearShape&, float* out);
  void (*tile)(const float* rows, int64_t n_rows, const void* weight, int64_t columns, const LinearShape&,
               float* scratch, void* out);
  void (*rms_norm)(const void* x, const void* weight, int64_t n, float eps, bool wide, float* scratch, void* out);
  void (*silu_and_mul)(const void* x, int64_t n, bool wide, void* out);
  void (*log_normaliser)(const void* logits, int64_t n, float temperature, bool wide, float* scratch, float* most,
                         float* log_sum);
  void (*attend)(const SlimxExactAttention&, int64_t row, int64_t group, int64_t longest, float* scratch);
  int64_t (*attention_scratch)(const SlimxExactAttention&, int64_t longest);
};

}  // namespace

// Each of the following is the same source, compiled for another instruction set. The plain one fuses by the C library,
// which uses the processor's instruction where there is one.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)  // clang has another way to say it
#define SLIMX_HAS_KERNELS 1
namespace scalar {
#define SLIMX_WIDTH 4
typedef float Plain __attribute__((vector_size(16)));
static inline Plain splat(float x) { return Plain{x, x, x, x}; }
static inline Plain multiply_add(Plain a, Plain b, Plain c) {
  return Plain{fmaf(a[0], b[0], c[0]), fmaf(a[1], b[1], c[1]), fmaf(a[2], b[2], c[2]), fmaf(a[3], b[3], c[3])};
}
#include "exact_isa.h"
#undef SLIMX_WIDTH
}  // namespace scalar

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define SLIMX_WIDTH 8
static inline __m256 splat(float x) { return _mm256_set1_ps(x); }
static inline __m256 multiply_add(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
#include "exact_isa.h"
#undef SLIMX_WIDTH
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
namespace avx512 {
#define SLIMX_WIDTH 16
static inline __m512 splat(float x) { return _mm512_set1_ps(x); }
static inline __m512 multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
#include "exact_isa.h"
#undef SLIMX_WIDTH
}  // namespace avx512
#pragma GCC pop_options
#endif

namespace {

const Kernels* kernels_for(SlimxExactIsa isa) {
  if (!slimx_exact_has_isa(isa)) return nullptr;
#ifdef SLIMX_HAS_KERNELS
  if (isa == SLIMX_EXACT_BEST)
    isa = slimx_exact_has_isa(SLIMX_EXACT_AVX512) ? SLIMX_EXACT_AVX512
          : slimx_exact_has_isa(SLIMX_EXACT_AVX2) ? SLIMX_EXACT_AVX2
                                                  : SLIMX_EXACT_SCALAR;
  if (isa == SLIMX_EXACT_AVX512) return &avx512::kernels;
  if (isa == SLIMX_EXACT_AVX2) return &avx2::kernels;
  return &scalar::kernels;
#else
  return nullptr;
#endif
}

// Starting a thread costs as much as this many steps of a reduction.
constexpr int64_t kStepsPerThread = 1 << 16;

int team_for(int64_t tasks, int64_t steps, int threads) {
  return int(std::clamp<int64_t>(std::min(tasks, steps / kStepsPerThread), 1, std::max(threads, 1)));
}

// Memory for floats, at a multiple of a cache line. `get` is nullptr where there is none.
class Memory {
 public:
  explicit Memory(int64_t floats)
      : at_(static_cast<float*>(::operator new(size_t(floats) * 4 + 64, std::align_val_t(64), std::nothrow))) {}
  ~Memory() { ::operator delete(at_, std::align_val_t(64), std::nothrow); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  float* get() const { return at_; }

 private:
  float* at_;
};

// Runs task(k, scratch) for every k below `tasks`, each thread with `floats` of scratch of its own.
template <bool kFlush, class Task>
SlimxExactStatus for_each(int64_t tasks, int team, int64_t floats, Task task) {
  floats = rounded_up(floats, 16);
  const Memory scratch(team * floats);
  if (!scratch.get()) return SLIMX_EXACT_NO_MEMORY;
#pragma omp parallel num_threads(team) if (team > 1)
  {
    const Arithmetic<kFlush> arithmetic;
    float* mine = scratch.get() + omp_get_thread_num() * floats;
#pragma omp for schedule(dynamic)
    for (int64_t k = 0; k < tasks; ++k) task(k, mine);
  }
  return SLIMX_EXACT_OK;
}

struct Group {  // of a linear: its rows, and its tiles among all
  const char *x, *weight;
  char* out;
  float* prepared;
  int64_t rows, first_tile;
};

}  // namespace
}  // namespace slimx

using namespace slimx;

int slimx_exact_abi(void) { return SLIMX_EXACT_ABI; }

int slimx_exact_has_isa(SlimxExactIsa isa) {
#ifdef SLIMX_HAS_KERNELS
  if (isa == SLIMX_EXACT_AVX512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
  if (isa == SLIMX_EXACT_AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return isa == SLIMX_EXACT_BEST || isa == SLIMX_EXACT_SCALAR;
#else
  (void)isa;
  return 0;
#endif
}

SlimxExactStatus slimx_exact_linear(const void* x, const SlimxExactGroup* groups, int64_t n_groups, int64_t columns,
                                    int64_t width, int leaves, int wide, void* out, int wide_out, SlimxExactIsa isa,
                                    int threads) {
  const Kernels* kernels = kernels_for(isa);
  if (!kernels) return SLIMX_EXACT_NO_SUCH_ISA;
  const LinearShape s = {columns,   width,        leaves, width / leaves, rounded_up(width / leaves, SLIMX_K_BLOCK),
                         wide != 0, wide_out != 0};
  const int64_t tiles = (columns + kernels->width - 1) / kernels->width;
  std::vector<Group> held;
  int64_t prepared = 0, scratch = 0, row = 0;
  try {
    for (int64_t g = 0; g < n_groups; row += groups[g++].rows)
      if (groups[g].rows) {
        held.push_back({static_cast<const char*>(x) + row * width * (wide ? 4 : 2),
                        static_cast<const char*>(groups[g].weight),
                        static_cast<char*>(out) + row * columns * (wide_out ? 4 : 2), nullptr, groups[g].rows,
                        int64_t(held.size()) * tiles});
        prepared += kernels->prepared_size(groups[g].rows, s);
        scratch = std::max(scratch, kernels->linear_scratch(groups[g].rows, s));
      }
  } catch (const std::bad_alloc&) {
    return SLIMX_EXACT_NO_MEMORY;
  }
  const Memory memory(prepared);
  if (!memory.get()) return SLIMX_EXACT_NO_MEMORY;
  float* at = memory.get();
  for (Group& group : held) group.prepared = at, at += kernels->prepared_size(group.rows, s);
  const int64_t tasks = int64_t(held.size()) * tiles, steps = (row + int64_t(held.size())) * columns * width / 16;
  const int team = team_for(tasks, steps, threads);
  const auto ready =
      for_each<true>(int64_t(held.size()), std::min<int>(team, std::max<int>(held.size(), 1)), 0,
                     [&](int64_t g, float*) { kernels->prepare(held[g].x, held[g].rows, s, held[g].prepared); });
  if (ready != SLIMX_EXACT_OK) return ready;
  return for_each<true>(tasks, team, scratch, [&](int64_t k, float* mine) {
    const Group& group = held[k / tiles];
    const int64_t column = k % tiles * kernels->width, left = std::min<int64_t>(columns - column, kernels->width);
    kernels->tile(group.prepared, group.rows, group.weight + column * width * (wide ? 4 : 2), left, s, mine,
                  group.out + column * (wide_out ? 4 : 2));
  });
}

SlimxExactStatus slimx_exact_rms_norm(const void* x, const void* weight, int64_t rows, int64_t width, float eps,
                                      int wide, void* out, SlimxExactIsa isa, int threads) {
  const Kernels* kernels = kernels_for(isa);
  if (!kernels) return SLIMX_EXACT_NO_SUCH_ISA;
  const int64_t bytes = width * (wide ? 4 : 2);
  return for_each<false>(rows, team_for(rows, rows * width / 4, threads), rounded_up(width, SLIMX_LANES),
                         [&](int64_t r, float* scratch) {
                           kernels->rms_norm(static_cast<const char*>(x) + r * bytes, weight, width, eps, wide, scratch,
                                             static_cast<char*>(out) + r * bytes);
                         });
}

SlimxExactStatus slimx_exact_silu_and_mul(const void* x, int64_t rows, int64_t width, int wide, void* out,
                                          SlimxExactIsa isa, int threads) {
  const Kernels* kernels = kernels_for(isa);
  if (!kernels) return SLIMX_EXACT_NO_SUCH_ISA;
  const int64_t bytes = width * (wide ? 4 : 2);
  return for_each<false>(rows, team_for(rows, rows * width, threads), 0, [&](int64_t r, float*) {
    kernels->silu_and_mul(static_cast<const char*>(x) + 2 * r * bytes, width, wide,
                          static_cast<char*>(out) + r * bytes);
  });
}

SlimxExactStatus slimx_exact_log_normaliser(const void* logits, const float* temperature, int64_t rows, int64_t width,
                                            int wide, float* most, float* log_sum, SlimxExactIsa isa, int threads) {
  const Kernels* kernels = kernels_for(isa);
  if (!kernels) return SLIMX_EXACT_NO_SUCH_ISA;
  const int64_t bytes = width * (wide ? 4 : 2);
  return for_each<false>(rows, team_for(rows, rows * width, threads), rounded_up(width, SLIMX_LANES),
                         [&](int64_t r, float* scratch) {
                           kernels->log_normaliser(static_cast<const char*>(logits) + r * bytes, width, temperature[r],
                                                   wide, scratch, most + r, log_sum + r);
                         });
}

SlimxExactStatus slimx_exact_attend(const SlimxExactAttention* call, SlimxExactIsa isa, int threads) {
  const Kernels* kernels = kernels_for(isa);
  if (!kernels) return SLIMX_EXACT_NO_SUCH_ISA;
  int64_t longest = 0, keys = 0;
  for (int64_t r = 0; r < call->rows; ++r) longest = std::max(longest, call->length[r]), keys += call->length[r];
  const int64_t tasks = call->rows * call->groups, steps = keys * call->heads * (call->d + call->dv) / 8;
  return for_each<false>(
      tasks, team_for(tasks, steps, threads), kernels->attention_scratch(*call, longest),
      [&](int64_t k, float* scratch) { kernels->attend(*call, k / call->groups, k % call->groups, longest, scratch); });
}
