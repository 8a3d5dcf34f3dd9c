// exact_linear.h: linears of exact mode, one tile of columns at a time. Included once for each instruction set.
//
// Order of operations, for each element of the result: see reference.py. The chains run along K, so vectors lie across
// rows (many rows: weights are broadcast) or across columns (few rows: weights are transposed); both give the same
// bits.

constexpr int kFew = kWidth / 2;              // from so many rows on vectors lie across rows
constexpr int kBroad = kWidth == 16 ? 8 : 4;  // columns at once: two chains and a sum for each fit the registers
static_assert(SLIMX_K_BLOCK % kWidth == 0 && kWidth % kBroad == 0, "the tiles below have no remainders in these");

// The rows of one group as tiles read them. Few rows: [rows][padded], many: [row / kWidth][padded][kWidth].
template <class T>
static void prepare_rows(const T* x, int64_t rows, const LinearShape& s, float* out) {
  for (int leaf = 0; leaf < s.leaves; ++leaf) {
    const T* from = x + leaf * s.leaf;
    float* to = out + leaf * s.padded_leaf * (rows < kFew ? 1 : kWidth);
    if (rows < kFew) {
      for (int64_t r = 0; r < rows; ++r) widen(from + r * s.width, s.leaf, SLIMX_K_BLOCK, to + r * s.padded());
      continue;
    }
    for (int64_t r = 0; r < rows; r += kWidth, to += s.padded() * kWidth)
      for (int64_t k = 0; k < s.padded_leaf; k += kWidth) {
        Floats block[kWidth];
        for (int i = 0; i < kWidth; ++i)
          block[i] = r + i < rows && k < s.leaf ? load_some(from + (r + i) * s.width + k, s.leaf - k) : Floats{};
        transpose(block);
        for (int i = 0; i < kWidth; ++i) store(to + (k + i) * kWidth, block[i]);
      }
  }
}

// sums[j] = the leaf's dot products of kWidth rows, [n][kWidth], with the column weight[j] [n].
static inline void chains_across_rows(const float* rows, const float* const* weight, int64_t n, Floats* sums) {
  Floats sum[kBroad] = {};
  for (int64_t k = 0; k < n; k += SLIMX_K_BLOCK) {
    Floats even[kBroad] = {}, odd[kBroad] = {};
    for (int i = 0; i < SLIMX_K_BLOCK; i += 2) {
      const Floats x = load(rows + (k + i) * kWidth), y = load(rows + (k + i + 1) * kWidth);
      for (int j = 0; j < kBroad; ++j) {
        even[j] = multiply_add(x, splat(weight[j][k + i]), even[j]);
        odd[j] = multiply_add(y, splat(weight[j][k + i + 1]), odd[j]);
      }
    }
    for (int j = 0; j < kBroad; ++j) sum[j] += even[j] + odd[j];
  }
  for (int j = 0; j < kBroad; ++j) sums[j] = sum[j];
}

// Leaves in a binary tree, parts [leaves][n]; the result is parts[0]. Denormals count here.
static inline void join_leaves(Floats* parts, int leaves, int n) {
  const Arithmetic<false> as_they_are;
  for (; leaves > 1; leaves /= 2)
    for (int leaf = 0; leaf < leaves / 2; ++leaf)
      for (int j = 0; j < n; ++j) parts[leaf * n + j] = parts[2 * leaf * n + j] + parts[(2 * leaf + 1) * n + j];
}

// `columns` <= kBroad columns of all rows. sums: [row / kWidth][kWidth columns][kWidth], the first kBroad of a block.
template <class T>
static void many_rows(const float* rows, int64_t n_rows, const T* weight, int64_t columns, const LinearShape& s,
                      float* wide, Floats* sums) {
  const float* at[SLIMX_MOST_LEAVES][kBroad];
  for (int leaf = 0; leaf < s.leaves; ++leaf)
    for (int j = 0; j < kBroad; ++j) {  // columns past the end are computed as the last one and not stored
      const T* from = weight + (j < columns ? j : columns - 1) * s.width + leaf * s.leaf;
      if constexpr (sizeof(T) == 4)
        if (s.leaf == s.padded_leaf) {
          at[leaf][j] = from;
          continue;
        }
      float* to = wide + j * s.padded() + leaf * s.padded_leaf;
      widen(from, s.leaf, SLIMX_K_BLOCK, to);
      at[leaf][j] = to;
    }
  for (int64_t r = 0; r < n_rows; r += kWidth, rows += s.padded() * kWidth, sums += kWidth) {
    Floats parts[SLIMX_MOST_LEAVES * kBroad];
    for (int j = 0; j < kBroad; ++j) parts[j] = Floats{};  // the compiler cannot know that there is a leaf
    for (int leaf = 0; leaf < s.leaves; ++leaf)
      chains_across_rows(rows + leaf * s.padded_leaf * kWidth, at[leaf], s.padded_leaf, parts + leaf * kBroad);
    if (s.leaves > 1) join_leaves(parts, s.leaves, kBroad);
    for (int j = 0; j < kBroad; ++j) sums[j] = parts[j];
  }
}

// kWidth columns of fewer than kFew rows: parts [leaf][row].
template <class T>
static void few_rows(const float* rows, int64_t n_rows, const T* weight, int64_t columns, const LinearShape& s,
                     Floats* parts) {
  for (int leaf = 0; leaf < s.leaves; ++leaf) {
    Floats* sum = parts + leaf * n_rows;
    for (int64_t r = 0; r < n_rows; ++r) sum[r] = Floats{};
    for (int64_t k = 0; k < s.padded_leaf; k += SLIMX_K_BLOCK) {
      Floats block[SLIMX_K_BLOCK];  // [k][column]
      for (int part = 0; part < SLIMX_K_BLOCK; part += kWidth) {
        const int64_t left = s.leaf - k - part;
        for (int j = 0; j < kWidth; ++j)
          block[part + j] =
              j < columns && left > 0 ? load_some(weight + j * s.width + leaf * s.leaf + k + part, left) : Floats{};
        transpose(block + part);
      }
      for (int64_t r = 0; r < n_rows; ++r) {
        const float* x = rows + r * s.padded() + leaf * s.padded_leaf + k;
        Floats even = {}, odd = {};
        for (int i = 0; i < SLIMX_K_BLOCK; i += 2) {
          even = multiply_add(splat(x[i]), block[i], even);
          odd = multiply_add(splat(x[i + 1]), block[i + 1], odd);
        }
        sum[r] += even + odd;
      }
    }
  }
  if (s.leaves > 1) join_leaves(parts, s.leaves, int(n_rows));
}

// kWidth columns from `weight` on, of which `columns` exist, of one group's prepared rows; out [rows][s.columns].
template <class T, class Out>
static void linear_tile(const float* rows, int64_t n_rows, const T* weight, int64_t columns, const LinearShape& s,
                        float* scratch, Out* out) {
  if (n_rows < kFew) {
    Floats parts[SLIMX_MOST_LEAVES * kFew];
    few_rows(rows, n_rows, weight, columns, s, parts);
    for (int64_t r = 0; r < n_rows; ++r) store_some(out + r * s.columns, parts[r], columns);
    return;
  }
  Floats* sums = reinterpret_cast<Floats*>(scratch);
  float* wide = scratch + (n_rows + kWidth) * kWidth;
  for (int j = 0; j < kWidth && j < columns; j += kBroad)
    many_rows(rows, n_rows, weight + j * s.width, columns - j < kBroad ? columns - j : kBroad, s, wide, sums + j);
  for (int64_t r = 0; r < n_rows; r += kWidth) {
    Floats* block = sums + r;
    transpose(block);
    for (int i = 0; i < kWidth && r + i < n_rows; ++i) store_some(out + (r + i) * s.columns, block[i], columns);
  }
}

// Floats of scratch for a tile of a group of `rows`.
static int64_t linear_scratch(int64_t rows, const LinearShape& s) {
  return (rows + kWidth) * kWidth + kBroad * s.padded();
}

// Floats that prepare_rows writes.
static int64_t prepared_size(int64_t rows, const LinearShape& s) {
  return s.padded() * (rows < kFew ? rows : (rows + kWidth - 1) / kWidth * kWidth);
}
