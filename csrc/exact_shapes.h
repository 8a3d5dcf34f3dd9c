// exact_shapes.h: the types by which the CPU kernels of exact mode are called, the same for each instruction set.
#pragma once

#include <stdint.h>

#include "exact.h"

namespace slimx {

static inline int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

struct LinearShape {
  int64_t columns, width;  // N, K
  int leaves;
  int64_t leaf, padded_leaf;  // elements of a leaf; the same rounded up to whole blocks
  bool wide, wide_out;
  int64_t padded() const { return leaves * padded_leaf; }
};

// Rows in the layout of Linear::prepare: all rows of a group if there are few, else up to kRowsOfTask of them.
struct RowBlock {
  const float* at;
  int64_t count;
  bool few;
};

struct Linear {
  int few;  // groups with fewer rows have another layout
  int64_t (*tile_columns)(const LinearShape&);
  int64_t (*prepared_size)(int64_t rows, bool few, const LinearShape&);  // number of floats that `prepare` writes
  int64_t (*scratch)(const LinearShape&);  // number of floats of scratch memory for a tile
  void (*prepare)(const void* x, int64_t rows, const LinearShape&, float* out);
  void (*tile)(const RowBlock&, const void* weight, int64_t columns, const LinearShape&, float* scratch, void* out);
};

// The kernels of one instruction set; each function computes the same bits for all of them.
struct Kernels {
  Linear linear;
  void (*rms_norm)(const void* x, const void* weight, int64_t n, float eps, bool wide, float* scratch, void* out);
  void (*silu_and_mul)(const void* x, int64_t n, bool wide, void* out);
  void (*log_normalizer)(const void* logits, int64_t n, float temperature, bool wide, float* scratch, float* most,
                         float* log_sum);
  void (*attend)(const SlimxExactAttention&, int64_t row, int64_t group, int64_t longest, float* scratch);
  int64_t (*attention_scratch)(const SlimxExactAttention&, int64_t longest);
};

}  // namespace slimx
