// exact_vector.h: vectors of kWidth floats, and the operations on them that the kernels of exact mode use.
//
// Included only by exact_isa.h, once per instruction set, so there is no include guard. Needs SLIMX_WIDTH, multiply_add
// and splat. Compile with -ffp-contract=off, so that only multiply_add is fused.

constexpr int kWidth = SLIMX_WIDTH;
typedef float Floats __attribute__((vector_size(4 * SLIMX_WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * SLIMX_WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * SLIMX_WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * SLIMX_WIDTH)));

// ---- memory: float, or uint16_t for bf16 ----------------------------------------------------------------------------

static inline Floats load(const float* p) {
  Floats x;
  memcpy(&x, p, sizeof x);
  return x;
}

static inline Floats load(const uint16_t* p) {
  Halves x;
  memcpy(&x, p, sizeof x);
  return (Floats)(__builtin_convertvector(x, Words) << 16);
}

static inline void store(float* p, Floats x) { memcpy(p, &x, sizeof x); }

static inline void store(uint16_t* p, Floats x) {  // rounded to nearest even; NaN becomes 0x7FC0
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const Halves halves = __builtin_convertvector(x == x ? rounded : Words{} + 0x7FC0u, Halves);
  memcpy(p, &halves, sizeof halves);
}

// Loads the first n elements, and zeros after them.
template <class T>
static inline Floats load_some(const T* p, int64_t n) {
  if (n >= kWidth) return load(p);
  T some[kWidth] = {};
  for (int64_t l = 0; l < n; ++l) some[l] = p[l];
  return load(some);
}

template <class T>
static inline void store_some(T* p, Floats x, int64_t n) {
  if (n >= kWidth) return store(p, x);
  T some[kWidth];
  store(some, x);
  for (int64_t l = 0; l < n; ++l) p[l] = some[l];
}

// out[0, n) = x, followed by zeros up to a multiple of `unit`, which is a multiple of kWidth.
template <class T>
static inline void widen(const T* x, int64_t n, int64_t unit, float* out) {
  const int64_t end = (n + unit - 1) / unit * unit;
  for (int64_t i = 0; i < end; i += kWidth) store(out + i, i < n ? load_some(x + i, n - i) : Floats{});
}

// ---- transposing ----------------------------------------------------------------------------------------------------

template <int kStep, size_t... kLane>
static inline void exchange(Floats& a, Floats& b, std::index_sequence<kLane...>) {
  const Floats low = __builtin_shufflevector(a, b, int(kLane & kStep ? kWidth + kLane - kStep : kLane)...);
  b = __builtin_shufflevector(a, b, int(kLane & kStep ? kWidth + kLane : kLane + kStep)...);
  a = low;
}

template <int kStep = 1>
static inline void transpose(Floats* x) {  // [kWidth][kWidth], in place
  if constexpr (kStep < kWidth) {
    for (int i = 0; i < kWidth; ++i)
      if (!(i & kStep)) exchange<kStep>(x[i], x[i + kStep], std::make_index_sequence<kWidth>());
    transpose<2 * kStep>(x);
  }
}

// ---- sums in lanes --------------------------------------------------------------------------------------------------

constexpr int kParts = SLIMX_LANES / kWidth;

struct Lanes {  // SLIMX_LANES partial sums
  Floats part[kParts] = {};
};

// Adds the upper half to the lower one until one vector is left, and then until one number is left.
static inline Floats folded(Lanes lanes) {
  for (int half = kParts / 2; half; half /= 2)
    for (int p = 0; p < half; ++p) lanes.part[p] += lanes.part[p + half];
  return lanes.part[0];
}

static inline float total(const Lanes& lanes) {
  const Floats last = folded(lanes);
  float x[kWidth];
  memcpy(x, &last, sizeof x);
  for (int half = kWidth / 2; half; half /= 2)
    for (int l = 0; l < half; ++l) x[l] += x[l + half];
  return x[0];
}

// a and b each contain sums of 2 kHalf lanes, one after the other; returns those of a, then those of b, in kHalf lanes
// each.
template <int kHalf, size_t... kLane>
static inline Floats fold_pair(Floats a, Floats b, std::index_sequence<kLane...>) {
  const Floats low = __builtin_shufflevector(a, b, int(kLane / kHalf * 2 * kHalf + kLane % kHalf)...);
  const Floats high = __builtin_shufflevector(a, b, int(kLane / kHalf * 2 * kHalf + kLane % kHalf + kHalf)...);
  return low + high;
}

// Returns the totals of kWidth sums in lanes, one in each element.
template <int kHalf = kWidth / 2>
static inline Floats totals(Floats* folded) {
  for (int i = 0; i < kHalf; ++i)
    folded[i] = fold_pair<kHalf>(folded[2 * i], folded[2 * i + 1], std::make_index_sequence<kWidth>());
  if constexpr (kHalf > 1) return totals<kHalf / 2>(folded);
  return folded[0];
}

static inline Floats larger(Floats a, Floats b) { return a > b || a != a ? a : b; }  // NaN is kept

static inline float largest(Floats x) {
  float most = x[0];
  for (int l = 1; l < kWidth; ++l) most = x[l] > most || x[l] != x[l] ? x[l] : most;
  return most;
}

// Returns the sum of a block of n values, a multiple of SLIMX_LANES; at(i) returns kWidth of them from i on.
template <class At>
static inline float block_sum(int64_t n, At at) {
  Lanes lanes;
  for (int64_t i = 0; i < n; i += SLIMX_LANES)
    for (int p = 0; p < kParts; ++p) lanes.part[p] += at(i + p * kWidth);
  return total(lanes);
}

// Returns the sum of any number of values: the sums of SLIMX_SUM_BLOCK values each, added in order.
template <class At>
static inline float row_sum(int64_t n, At at) {
  float sum = 0;
  for (int64_t i = 0; i < n; i += SLIMX_SUM_BLOCK)
    sum += block_sum(n - i < SLIMX_SUM_BLOCK ? n - i : SLIMX_SUM_BLOCK, [&](int64_t j) { return at(i + j); });
  return sum;
}

// ---- functions ------------------------------------------------------------------------------------------------------

#define SLIMX_MATH static inline
#include "exact_math.h"
#undef SLIMX_MATH

static inline Floats exp(Floats x) {
  Floats n = exp_power(x);
  n = n < -127.0f ? splat(-127.0f) : n;
  n = n > 128.0f ? splat(128.0f) : n;
  const Ints whole = __builtin_convertvector(n == n ? n : Floats{}, Ints), low = whole >> 1;  // 2^128 takes two steps
  Floats y = exp_polynomial(exp_rest(x, n)) * (Floats)((low + 127) << 23) * (Floats)((whole - low + 127) << 23);
  y = x < SLIMX_EXP_LEAST ? Floats{} : y;
  y = x > SLIMX_EXP_MOST ? splat(__builtin_inff()) : y;
  return x == x ? y : splat(__builtin_nanf(""));
}
