// exact_attention.h: attention of exact mode for one row and one group of heads. Included only by exact_isa.h.

struct AttentionScratch {  // for one row and group: floats, each array at a multiple of SLIMX_LANES
  int64_t share, d, dv, slots;
  float *query, *block, *scores, *mixed, *sums;

  AttentionScratch(const SlimxExactAttention& a, int64_t longest, float* at)
      : share(a.heads / a.groups),
        d(rounded_up(a.d, SLIMX_LANES)),
        dv(rounded_up(a.dv, SLIMX_LANES)),
        slots(rounded_up(longest, SLIMX_LANES)),
        query(at),                 // [share][d]
        block(query + share * d),  // keys [kWidth][d], or values [SLIMX_KEY_BLOCK][dv]
        scores(block + (kWidth * d > SLIMX_KEY_BLOCK * dv ? kWidth * d : SLIMX_KEY_BLOCK * dv)),  // [share][slots]
        mixed(scores + share * slots),                                                            // [share][dv]
        sums(mixed + share * dv) {}                                                               // [share]

  int64_t size() const { return sums + rounded_up(share, SLIMX_LANES) - query; }
};

// Returns row `at` of a tensor whose rows have n elements, as floats: in place, or converted into `room` with zeros up
// to a multiple of SLIMX_LANES.
static inline const float* as_floats(const float* rows, int64_t at, int64_t n, float* room) {
  if (n % SLIMX_LANES == 0) return rows + at * n;
  widen(rows + at * n, n, SLIMX_LANES, room);
  return room;
}

static inline const float* as_floats(const uint16_t* rows, int64_t at, int64_t n, float* room) {
  widen(rows + at * n, n, SLIMX_LANES, room);
  return room;
}

template <class T>
static void score_keys(const SlimxExactAttention& a, int64_t row, int64_t group, const AttentionScratch& s) {
  const int32_t* index = a.index + a.begin[row];
  const int64_t length = a.length[row];
  for (int64_t h = 0; h < s.share; ++h)
    widen(static_cast<const T*>(a.query) + (row * a.heads + group * s.share + h) * a.d, a.d, SLIMX_LANES,
          s.query + h * s.d);
  for (int64_t start = 0; start < length; start += kWidth) {
    const float* key[kWidth];
    for (int j = 0; j < kWidth; ++j) {  // past the end the last key is repeated; its scores are not read
      const int64_t at = start + j < length ? index[start + j] : index[length - 1];
      key[j] = as_floats(static_cast<const T*>(a.key), at * a.groups + group, a.d, s.block + j * s.d);
    }
    for (int64_t h = 0; h < s.share; ++h) {
      const float* query = s.query + h * s.d;
      Lanes lanes[kWidth];
      for (int64_t i = 0; i < s.d; i += SLIMX_LANES)
        for (int p = 0; p < kParts; ++p) {
          const Floats q = load(query + i + p * kWidth);
          for (int j = 0; j < kWidth; ++j)
            lanes[j].part[p] = multiply_add(q, load(key[j] + i + p * kWidth), lanes[j].part[p]);
        }
      Floats sums[kWidth];
      for (int j = 0; j < kWidth; ++j) sums[j] = folded(lanes[j]);
      store(s.scores + h * s.slots + start, totals(sums) * a.scale);
    }
  }
}

// Converts the scores of one head to weights, with zeros up to a multiple of SLIMX_LANES; returns what a sink adds to
// the sum of the weights.
static float weigh_keys(float* scores, int64_t n, const float* sink) {
  Floats high = splat(sink ? *sink : -__builtin_inff());
  for (int64_t j = 0; j < n; j += kWidth) {
    Floats x = load(scores + j);
    for (int64_t l = n - j; l < kWidth; ++l) x[l] = -__builtin_inff();
    high = larger(x, high);
  }
  const float most = largest(high);
  for (int64_t j = 0; j < rounded_up(n, SLIMX_LANES); j += kWidth) {
    Floats x = exp(load(scores + j) - most);
    for (int64_t l = n - j < 0 ? 0 : n - j; l < kWidth; ++l) x[l] = 0;
    store(scores + j, x);
  }
  return sink ? exp(splat(*sink - most))[0] : 0.0f;
}

// mixed[h] += sum over n keys of weight[h][j] * values[j], for kHeads heads and kCount vectors of the values' elements.
template <int kHeads, int kCount>
static inline void join_values(const float* weight, int64_t slots, const float* const* values, int64_t i, int64_t n,
                               int64_t dv, float* mixed) {
  Floats part[kHeads][kCount] = {};
  for (int64_t j = 0; j < n; ++j)
    for (int c = 0; c < kCount; ++c) {
      const Floats value = load(values[j] + i + c * kWidth);
      for (int h = 0; h < kHeads; ++h) part[h][c] = multiply_add(splat(weight[h * slots + j]), value, part[h][c]);
    }
  for (int h = 0; h < kHeads; ++h)
    for (int c = 0; c < kCount; ++c) {
      float* to = mixed + h * dv + i + c * kWidth;
      store(to, load(to) + part[h][c]);
    }
}

template <int kHeads>
static inline void join_heads(const float* weight, int64_t slots, const float* const* values, int64_t n, int64_t dv,
                              float* mixed) {
  int64_t i = 0;
  for (; i + 4 * kWidth <= dv; i += 4 * kWidth) join_values<kHeads, 4>(weight, slots, values, i, n, dv, mixed);
  for (; i < dv; i += kWidth) join_values<kHeads, 1>(weight, slots, values, i, n, dv, mixed);
}

template <class T>
static void mix_values(const SlimxExactAttention& a, int64_t row, int64_t group, const AttentionScratch& s) {
  constexpr int kHeads = kWidth == 16 ? 2 : 1;  // the sums of this many heads fit in registers
  const int32_t* index = a.index + a.begin[row];
  for (int64_t i = 0; i < s.share * s.dv; ++i) s.mixed[i] = 0;
  for (int64_t start = 0; start < a.length[row]; start += SLIMX_KEY_BLOCK) {
    const int64_t left = a.length[row] - start, n = left < SLIMX_KEY_BLOCK ? left : SLIMX_KEY_BLOCK;
    const float* values[SLIMX_KEY_BLOCK];
    for (int64_t j = 0; j < n; ++j)
      values[j] =
          as_floats(static_cast<const T*>(a.value), index[start + j] * a.groups + group, a.dv, s.block + j * s.dv);
    const float* weight = s.scores + start;
    for (int64_t h = 0; h < s.share; ++h)
      s.sums[h] += block_sum(rounded_up(n, SLIMX_LANES), [&](int64_t j) { return load(weight + h * s.slots + j); });
    int64_t h = 0;
    for (; h + kHeads <= s.share; h += kHeads)
      join_heads<kHeads>(weight + h * s.slots, s.slots, values, n, s.dv, s.mixed + h * s.dv);
    for (; h < s.share; ++h) join_heads<1>(weight + h * s.slots, s.slots, values, n, s.dv, s.mixed + h * s.dv);
  }
}

// Computes the query heads of `group` for row `row`.
template <class T>
static void attend_row(const SlimxExactAttention& a, int64_t row, int64_t group, int64_t longest, float* scratch) {
  const AttentionScratch s(a, longest, scratch);
  const int64_t first = group * s.share;
  score_keys<T>(a, row, group, s);
  for (int64_t h = 0; h < s.share; ++h)
    s.sums[h] = weigh_keys(s.scores + h * s.slots, a.length[row], a.sinks ? a.sinks + first + h : nullptr);
  mix_values<T>(a, row, group, s);
  for (int64_t h = 0; h < s.share; ++h) {
    T* out = static_cast<T*>(a.out) + (row * a.heads + first + h) * a.dv;
    const Floats sum = splat(s.sums[h]);
    for (int64_t i = 0; i < a.dv; i += kWidth) store_some(out + i, load(s.mixed + h * s.dv + i) / sum, a.dv - i);
  }
}
