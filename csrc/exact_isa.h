// exact_isa.h: all kernels of exact mode for one instruction set, which form a `Kernels` (exact_shapes.h).
//
// The including file first includes exact_shapes.h, and then this file once per instruction set, in a separate
// namespace that defines SLIMX_WIDTH, multiply_add and splat. The headers below do not depend on the including file.
#ifndef SLIMX_WIDTH
#error "define SLIMX_WIDTH, multiply_add and splat"
#endif

// clang-format off: each header needs those above it
#include "exact_vector.h"
#include "exact_linear.h"
#include "exact_rows.h"
#include "exact_attention.h"
// clang-format on

static void prepare(const void* x, int64_t rows, const LinearShape& s, float* out) {
  s.wide ? prepare_rows(static_cast<const float*>(x), rows, s, out)
         : prepare_rows(static_cast<const uint16_t*>(x), rows, s, out);
}

static void tile(const RowBlock& rows, const void* weight, int64_t columns, const LinearShape& s, float* scratch,
                 void* out) {
  const auto run = [&](auto* typed, auto* to) { linear_tile(rows, typed, columns, s, scratch, to); };
  const auto with = [&](auto* to) {
    s.wide ? run(static_cast<const float*>(weight), to) : run(static_cast<const uint16_t*>(weight), to);
  };
  s.wide_out ? with(static_cast<float*>(out)) : with(static_cast<uint16_t*>(out));
}

static void rms_norm(const void* x, const void* weight, int64_t n, float eps, bool wide, float* scratch, void* out) {
  const auto run = [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    rms_norm_row(static_cast<const T*>(x), static_cast<const T*>(weight), n, eps, scratch, t);
  };
  wide ? run(static_cast<float*>(out)) : run(static_cast<uint16_t*>(out));
}

static void silu_and_mul(const void* x, int64_t n, bool wide, void* out) {
  wide ? silu_and_mul_row(static_cast<const float*>(x), n, static_cast<float*>(out))
       : silu_and_mul_row(static_cast<const uint16_t*>(x), n, static_cast<uint16_t*>(out));
}

static void log_normalizer(const void* logits, int64_t n, float temperature, bool wide, float* scratch, float* most,
                           float* log_sum) {
  wide ? log_normalizer_row(static_cast<const float*>(logits), n, temperature, scratch, most, log_sum)
       : log_normalizer_row(static_cast<const uint16_t*>(logits), n, temperature, scratch, most, log_sum);
}

static void attend(const SlimxExactAttention& a, int64_t row, int64_t group, int64_t longest, float* scratch) {
  a.wide ? attend_row<float>(a, row, group, longest, scratch) : attend_row<uint16_t>(a, row, group, longest, scratch);
}

static int64_t attention_scratch(const SlimxExactAttention& a, int64_t longest) {
  return AttentionScratch(a, longest, nullptr).size();
}

static const Kernels kernels = {{kFew, tile_columns, prepared_size, linear_scratch, prepare, tile},
                                rms_norm,
                                silu_and_mul,
                                log_normalizer,
                                attend,
                                attention_scratch};
