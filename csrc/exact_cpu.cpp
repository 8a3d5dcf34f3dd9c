// exact_cpu.cpp: the kernels of exact mode on the CPU: selects the instruction set and distributes the work to threads.
#include <cpuid.h>
#include <math.h>
#include <omp.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "arithmetic.h"
#include "exact.h"
#include "exact_shapes.h"

namespace slimx {

// The following namespaces contain the same source, compiled for different instruction sets. The scalar one uses the C
// library's fused multiply-add, which uses the processor's instruction if it has one.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)  // clang has another pragma for this
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

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512,amx-tile,amx-bf16")
namespace amx {
#include "exact_amx.h"
}  // namespace amx
#pragma GCC pop_options
#endif

namespace {

// Returns the kernels for `isa`; nullptr if the processor lacks the instruction set.
const Kernels* kernels_for(SlimxExactIsa isa) {
  if (!slimx_exact_has_isa(isa)) return nullptr;
#ifdef SLIMX_HAS_KERNELS
  static const SlimxExactIsa best = slimx_exact_has_isa(SLIMX_EXACT_AVX512) ? SLIMX_EXACT_AVX512
                                    : slimx_exact_has_isa(SLIMX_EXACT_AVX2) ? SLIMX_EXACT_AVX2
                                                                            : SLIMX_EXACT_SCALAR;
  if (isa == SLIMX_EXACT_BEST) isa = best;
  if (isa == SLIMX_EXACT_AVX512 || isa == SLIMX_EXACT_AMX) return &avx512::kernels;
  if (isa == SLIMX_EXACT_AVX2) return &avx2::kernels;
  return &scalar::kernels;
#else
  return nullptr;
#endif
}

// Returns the linear kernels of kernels_for(isa), or those of AMX for bf16 unless another instruction set was
// requested.
const Linear* linear_for(SlimxExactIsa isa, bool wide) {
#ifdef SLIMX_HAS_KERNELS
  const bool may = isa == SLIMX_EXACT_BEST || isa == SLIMX_EXACT_AMX;
  if (may && !wide && slimx_exact_has_isa(SLIMX_EXACT_AMX)) return &amx::linear;
#endif
  const Kernels* kernels = kernels_for(isa);
  return kernels ? &kernels->linear : nullptr;
}

// Number of steps of a reduction that take as long as starting a thread.
constexpr int64_t kStepsPerThread = 1 << 16;

int team_for(int64_t tasks, int64_t steps, int threads) {
  return int(std::clamp<int64_t>(std::min(tasks, steps / kStepsPerThread), 1, std::max(threads, 1)));
}

// Memory for floats that starts at a multiple of a cache line. `get` returns nullptr if the allocation failed.
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

// Runs task(k, scratch) for every k < `tasks`; each thread has its own scratch memory of `floats` floats.
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

// Rows of a linear layer that one task computes with a tile's weights.
constexpr int64_t kRowsOfTask = 256;

struct Group {  // of a linear layer
  const char *x, *weight;
  char* out;
  int64_t rows;
  bool few;
  float* prepared;
};

struct Task {
  int64_t group, row, column;
};

}  // namespace
}  // namespace slimx

using namespace slimx;

int slimx_exact_abi(void) { return SLIMX_EXACT_ABI; }

int slimx_exact_has_isa(SlimxExactIsa isa) {
#ifdef SLIMX_HAS_KERNELS
  if (isa == SLIMX_EXACT_AMX) {
    static const bool has = slimx_exact_has_isa(SLIMX_EXACT_AVX512) && amx::available();
    return has;
  }
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
  const Linear* linear = linear_for(isa, wide);
  if (!linear) return SLIMX_EXACT_NO_SUCH_ISA;
  const int64_t leaf = width / leaves, item = wide ? 4 : 2, item_out = wide_out ? 4 : 2;
  const LinearShape s = {columns, width, leaves, leaf, rounded_up(leaf, SLIMX_K_BLOCK), wide != 0, wide_out != 0};
  const int64_t tile = linear->tile_columns(s);
  std::vector<Group> held;
  std::vector<Task> tasks;
  int64_t row = 0, prepared = 0;
  try {
    for (int64_t g = 0; g < n_groups; row += groups[g++].rows) {
      const int64_t rows = groups[g].rows;
      if (!rows) continue;
      for (int64_t column = 0; column < columns; column += tile)
        for (int64_t r = 0; r < rows; r += kRowsOfTask) tasks.push_back({int64_t(held.size()), r, column});
      held.push_back({static_cast<const char*>(x) + row * width * item, static_cast<const char*>(groups[g].weight),
                      static_cast<char*>(out) + row * columns * item_out, rows, rows < linear->few, nullptr});
      prepared += linear->prepared_size(rows, held.back().few, s);
    }
  } catch (const std::bad_alloc&) {
    return SLIMX_EXACT_NO_MEMORY;
  }
  const Memory memory(prepared);
  if (!memory.get()) return SLIMX_EXACT_NO_MEMORY;
  float* at = memory.get();
  for (Group& group : held) group.prepared = at, at += linear->prepared_size(group.rows, group.few, s);
  const int team = team_for(int64_t(tasks.size()), (row + 8 * int64_t(held.size())) * columns * width / 16, threads);
  const auto prepare = [&](int64_t g, float*) { linear->prepare(held[g].x, held[g].rows, s, held[g].prepared); };
  const auto compute = [&](int64_t k, float* scratch) {
    const Task& task = tasks[k];
    const Group& group = held[task.group];
    const RowBlock rows = {group.prepared + linear->prepared_size(task.row, group.few, s),
                           std::min(group.rows - task.row, kRowsOfTask), group.few};
    linear->tile(rows, group.weight + task.column * width * item, std::min(columns - task.column, tile), s, scratch,
                 group.out + (task.row * columns + task.column) * item_out);
  };
  const auto ready = for_each<true>(int64_t(held.size()), std::max(1, std::min(team, int(held.size()))), 0, prepare);
  return ready == SLIMX_EXACT_OK ? for_each<true>(int64_t(tasks.size()), team, linear->scratch(s), compute) : ready;
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

SlimxExactStatus slimx_exact_log_normalizer(const void* logits, const float* temperature, int64_t rows, int64_t width,
                                            int wide, float* most, float* log_sum, SlimxExactIsa isa, int threads) {
  const Kernels* kernels = kernels_for(isa);
  if (!kernels) return SLIMX_EXACT_NO_SUCH_ISA;
  const int64_t bytes = width * (wide ? 4 : 2);
  return for_each<false>(rows, team_for(rows, rows * width, threads), rounded_up(width, SLIMX_LANES),
                         [&](int64_t r, float* scratch) {
                           kernels->log_normalizer(static_cast<const char*>(logits) + r * bytes, width, temperature[r],
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
