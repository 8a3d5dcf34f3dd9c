// exact_amx.h: bf16 linear layers of exact mode with AMX, one tile of columns at a time.
//
// TDPBF16PS adds to each element of a tile the sum of two chains of fused multiply-adds that start from zero, over the
// even and the odd ones of 32 products, with denormals as zeros (Intel SDM, volume 2). The contract's order of
// arithmetic was chosen to be that of this instruction. Here the left operand is the weight as it is in memory, and
// each row of the result contains a column of the output: 16 columns by 16 rows.

constexpr int kSide = 16;       // rows of a tile, and 32-bit words in each of them
constexpr int kTileBlocks = 2;  // blocks of 16 columns, and of 16 rows, at once: four results in registers
constexpr int kTileColumns = 64;

using avx512::Floats;

// Returns true if the processor has AMX and the system lets this process use it (Linux requires a request).
static bool available() {
  unsigned a, b, c, d;
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kBf16 | kTiles)) != (kBf16 | kTiles)) return false;
  constexpr int kRequestPermission = 0x1023,
                kTileData = 18;  // arguments of arch_prctl: the request, and the number of the tile state
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  TileConfig() {
    for (int t = 0; t < 8; ++t) row_bytes[t] = 4 * kSide, rows[t] = kSide;
  }
};

// Transposes pairs of elements: [row / 16][padded / 2 pairs][16 rows], with zeros after the last row and element.
static void prepare(const void* x, int64_t rows, const LinearShape& s, float* out) {
  const uint16_t* from = static_cast<const uint16_t*>(x);
  for (int64_t r = 0; r < rows; r += kSide)
    for (int leaf = 0; leaf < s.leaves; ++leaf)
      for (int64_t k = 0; k < s.padded_leaf; k += SLIMX_K_BLOCK, out += kSide * kSide) {
        Floats block[kSide] = {};
        const int64_t left = s.leaf - k, n = left < SLIMX_K_BLOCK ? left : SLIMX_K_BLOCK;
        for (int i = 0; i < kSide && r + i < rows; ++i)
          memcpy(block + i, from + (r + i) * s.width + leaf * s.leaf + k, 2 * n);
        avx512::transpose(block);
        memcpy(out, block, sizeof block);
      }
}

static int64_t prepared_size(int64_t rows, bool, const LinearShape& s) {
  return rounded_up(rows, kSide) * s.padded() / 2;
}

// Computes one leaf of 16 kColumns columns by 16 kRows rows: parts [kColumns][kRows][16][16]. `pairs`: distance in
// floats between two blocks of rows.
template <int kColumns, int kRows>
static inline void chains(const uint16_t* weight, int64_t width, const float* rows, int64_t pairs, int64_t n,
                          float* parts) {
  const uint16_t* below = weight + kSide * width;
  _tile_zero(0);
  if (kRows > 1) _tile_zero(1);
  if (kColumns > 1) _tile_zero(2);
  if (kColumns > 1 && kRows > 1) _tile_zero(3);
  for (int64_t k = 0; k < n; k += SLIMX_K_BLOCK, rows += kSide * kSide) {
    _tile_loadd(4, weight + k, 2 * width);
    _tile_loadd(6, rows, 4 * kSide);
    _tile_dpbf16ps(0, 4, 6);
    if (kRows > 1) {
      _tile_loadd(7, rows + pairs, 4 * kSide);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (kColumns > 1) {
      _tile_loadd(5, below + k, 2 * width);
      _tile_dpbf16ps(2, 5, 6);
      if (kRows > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  constexpr int kSize = kSide * kSide;
  _tile_stored(0, parts, 4 * kSide);
  if (kRows > 1) _tile_stored(1, parts + kSize, 4 * kSide);
  if (kColumns > 1) _tile_stored(2, parts + kRows * kSize, 4 * kSide);
  if (kColumns > 1 && kRows > 1) _tile_stored(3, parts + (kRows + 1) * kSize, 4 * kSide);
}

// Returns a tile's weights with whole blocks and 16 columns: in place, or copied to `room` with zeros appended.
struct Weights {
  const uint16_t* at;
  int64_t column, leaf;
};

static Weights as_weights(const uint16_t* weight, int64_t columns, const LinearShape& s, uint16_t* room) {
  if (s.leaf == s.padded_leaf && columns % kSide == 0) return {weight, s.width, s.leaf};
  memset(room, 0, rounded_up(columns, kSide) * s.padded() * 2);
  for (int64_t j = 0; j < columns; ++j)
    for (int leaf = 0; leaf < s.leaves; ++leaf)
      memcpy(room + j * s.padded() + leaf * s.padded_leaf, weight + j * s.width + leaf * s.leaf, 2 * s.leaf);
  return {room, s.padded(), s.padded_leaf};
}

// Computes kColumns x kRows blocks of 16, starting at `column` and row `r`.
template <int kColumns, int kRows, class Out>
static inline void blocks(const RowBlock& rows, int64_t r, const Weights& weights, int64_t column, int64_t columns,
                          const LinearShape& s, float* parts, Out* out) {
  constexpr int kSize = kColumns * kRows * kSide * kSide;
  const int64_t pairs = kSide * s.padded() / 2;
  const float* own = rows.at + r / kSide * pairs;
  for (int leaf = 0; leaf < s.leaves; ++leaf)
    chains<kColumns, kRows>(weights.at + column * weights.column + leaf * weights.leaf, weights.column,
                            own + leaf * (kSide * s.padded_leaf / 2), pairs, s.padded_leaf, parts + leaf * kSize);
  Floats* sums = reinterpret_cast<Floats*>(parts);
  avx512::join_leaves(sums, s.leaves, kSize / kSide);
  for (int c = 0; c < kColumns; ++c)
    for (int b = 0; b < kRows; ++b) {
      Floats* block = sums + (c * kRows + b) * kSide;
      avx512::transpose(block);
      const int64_t first = r + b * kSide, at = column + c * kSide;
      for (int i = 0; i < kSide && first + i < rows.count; ++i)
        avx512::store_some(out + (first + i) * s.columns + at, block[i], columns - at);
    }
}

template <class Out>
static void linear_tile(const RowBlock& rows, const uint16_t* weight, int64_t columns, const LinearShape& s,
                        float* scratch, Out* out) {
  const int64_t parts = s.leaves * kTileBlocks * kTileBlocks * kSide * kSide;
  const Weights weights = as_weights(weight, columns, s, reinterpret_cast<uint16_t*>(scratch + parts));
  const TileConfig config;
  _tile_loadconfig(&config);
  for (int64_t column = 0; column < columns; column += kTileBlocks * kSide)
    for (int64_t r = 0; r < rows.count; r += kTileBlocks * kSide) {
      const bool two_columns = columns - column > kSide, two_rows = rows.count - r > kSide;
      if (two_columns && two_rows)
        blocks<2, 2>(rows, r, weights, column, columns, s, scratch, out);
      else if (two_columns)
        blocks<2, 1>(rows, r, weights, column, columns, s, scratch, out);
      else if (two_rows)
        blocks<1, 2>(rows, r, weights, column, columns, s, scratch, out);
      else
        blocks<1, 1>(rows, r, weights, column, columns, s, scratch, out);
    }
  _tile_release();
}

static void tile(const RowBlock& rows, const void* weight, int64_t columns, const LinearShape& s, float* scratch,
                 void* out) {
  const uint16_t* typed = static_cast<const uint16_t*>(weight);
  s.wide_out ? linear_tile(rows, typed, columns, s, scratch, static_cast<float*>(out))
             : linear_tile(rows, typed, columns, s, scratch, static_cast<uint16_t*>(out));
}

static int64_t tile_columns(const LinearShape&) { return kTileColumns; }

static int64_t linear_scratch(const LinearShape& s) {
  return s.leaves * kTileBlocks * kTileBlocks * kSide * kSide + kTileColumns * s.padded() / 2;
}

static const Linear linear = {0, tile_columns, prepared_size, linear_scratch, prepare, tile};
