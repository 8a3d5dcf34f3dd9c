// exact_linear.h: linear layers of exact mode, one tile of columns at a time. Included only by exact_isa.h.
//
// reference.py defines the order of operations for each element of the result. The chains of operations run along K, so
// a vector contains several rows (if there are many: weights are broadcast) or several columns (if there are few rows:
// weights are transposed). Both give the same bits.

constexpr int kFew = kWidth / 2;              // with this many rows or more, a vector contains rows
constexpr int kBroad = kWidth == 16 ? 8 : 4;  // columns at once, so that two chains and a sum for each fit in registers
static_assert(SLIMX_K_BLOCK % kWidth == 0 && kWidth % kBroad == 0, "the tiles below have no remainders in these");

// Number of columns of a tile: a multiple of kWidth whose weights, as floats, fit in a cache of 256 KiB.
static int64_t tile_columns(const LinearShape& s) {
  const int64_t fit = 65536 / s.padded() / kWidth * kWidth;
  return fit < kWidth ? kWidth : fit > 64 ? 64 : fit;
}

// Converts the rows of one group to the layout that tiles read. Few rows: [rows][padded]; many rows: [row /
// kWidth][padded][kWidth].
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

// Location of a tile's weights as floats: leaf l of column j starts at at + j * column + l * leaf.
struct Weights {
  const float* at;
  int64_t column, leaf;
};

// Returns the weights in place if they are floats and a leaf consists of whole blocks; else converts them in `room`.
template <class T>
static Weights as_weights(const T* weight, int64_t columns, const LinearShape& s, float* room) {
  if constexpr (sizeof(T) == 4)
    if (s.leaf == s.padded_leaf) return {weight, s.width, s.leaf};
  for (int64_t j = 0; j < columns; ++j)
    for (int leaf = 0; leaf < s.leaves; ++leaf)
      widen(weight + j * s.width + leaf * s.leaf, s.leaf, SLIMX_K_BLOCK, room + j * s.padded() + leaf * s.padded_leaf);
  return {room, s.padded(), s.padded_leaf};
}

// sums[j] = one leaf's dot products of kWidth rows, [n][kWidth], with column j, weight[j] [n].
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

// Adds leaves in a binary tree, parts [leaves][n]; the result is in parts[0]. Denormals are not flushed here.
static inline void join_leaves(Floats* parts, int leaves, int64_t n) {
  if (leaves == 1) return;
  const Arithmetic<false> as_they_are;
  for (; leaves > 1; leaves /= 2)
    for (int leaf = 0; leaf < leaves / 2; ++leaf)
      for (int64_t j = 0; j < n; ++j) parts[leaf * n + j] = parts[2 * leaf * n + j] + parts[(2 * leaf + 1) * n + j];
}

// Computes kWidth rows and up to kWidth columns from `column` on: block[j] contains column j of all rows.
static inline void many_rows(const float* rows, const Weights& weights, int64_t column, int64_t columns,
                             const LinearShape& s, Floats* block) {
  for (int first = 0; first < kWidth && column + first < columns; first += kBroad) {
    Floats parts[SLIMX_MOST_LEAVES * kBroad];
    for (int j = 0; j < kBroad; ++j)
      parts[j] = Floats{};  // initialized because the compiler does not know that there is at least one leaf
    for (int leaf = 0; leaf < s.leaves; ++leaf) {
      const float* at[kBroad];
      for (int j = 0; j < kBroad; ++j) {  // past the end the last column is repeated; its result is not stored
        const int64_t own = column + first + j < columns ? column + first + j : columns - 1;
        at[j] = weights.at + own * weights.column + leaf * weights.leaf;
      }
      chains_across_rows(rows + leaf * s.padded_leaf * kWidth, at, s.padded_leaf, parts + leaf * kBroad);
    }
    join_leaves(parts, s.leaves, kBroad);
    for (int j = 0; j < kBroad; ++j) block[first + j] = parts[j];
  }
}

// Computes up to kWidth columns of fewer than kFew rows: parts [leaf][row] contains all columns of a row.
template <class T>
static void few_rows(const RowBlock& rows, const T* weight, int64_t columns, const LinearShape& s, Floats* parts) {
  for (int leaf = 0; leaf < s.leaves; ++leaf) {
    Floats* sum = parts + leaf * rows.count;
    for (int64_t r = 0; r < rows.count; ++r) sum[r] = Floats{};
    for (int64_t k = 0; k < s.padded_leaf; k += SLIMX_K_BLOCK) {
      Floats block[SLIMX_K_BLOCK];  // [k][column]
      for (int part = 0; part < SLIMX_K_BLOCK; part += kWidth) {
        const int64_t left = s.leaf - k - part;
        const T* from = weight + leaf * s.leaf + k + part;
        if (columns >= kWidth && left >= kWidth)
          for (int j = 0; j < kWidth; ++j) block[part + j] = load(from + j * s.width);
        else
          for (int j = 0; j < kWidth; ++j)
            block[part + j] = j < columns && left > 0 ? load_some(from + j * s.width, left) : Floats{};
        transpose(block + part);
      }
      for (int64_t r = 0; r < rows.count; ++r) {
        const float* x = rows.at + r * s.padded() + leaf * s.padded_leaf + k;
        Floats even = {}, odd = {};
        for (int i = 0; i < SLIMX_K_BLOCK; i += 2) {
          even = multiply_add(splat(x[i]), block[i], even);
          odd = multiply_add(splat(x[i + 1]), block[i + 1], odd);
        }
        sum[r] += even + odd;
      }
    }
  }
  join_leaves(parts, s.leaves, rows.count);
}

// Computes `columns` columns, at most tile_columns, whose first weight is `weight`. `out`: first of these columns in
// the first row of [.][s.columns].
template <class T, class Out>
static void linear_tile(const RowBlock& rows, const T* weight, int64_t columns, const LinearShape& s, float* scratch,
                        Out* out) {
  if (rows.few) {
    for (int64_t column = 0; column < columns; column += kWidth) {
      Floats parts[SLIMX_MOST_LEAVES * kFew];
      few_rows(rows, weight + column * s.width, columns - column, s, parts);
      for (int64_t r = 0; r < rows.count; ++r) store_some(out + r * s.columns + column, parts[r], columns - column);
    }
    return;
  }
  const Weights weights = as_weights(weight, columns, s, scratch);
  for (int64_t r = 0; r < rows.count; r += kWidth)
    for (int64_t column = 0; column < columns; column += kWidth) {
      Floats block[kWidth] = {};
      many_rows(rows.at + r * s.padded(), weights, column, columns, s, block);
      transpose(block);
      for (int i = 0; i < kWidth && r + i < rows.count; ++i)
        store_some(out + (r + i) * s.columns + column, block[i], columns - column);
    }
}

// Number of floats of scratch memory for a tile.
static int64_t linear_scratch(const LinearShape& s) { return tile_columns(s) * s.padded(); }

// Number of floats that prepare_rows writes.
static int64_t prepared_size(int64_t rows, bool few, const LinearShape& s) {
  return s.padded() * (few ? rows : rounded_up(rows, kWidth));
}
