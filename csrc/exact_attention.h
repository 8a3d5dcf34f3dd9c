// exact_attention.h: attention of exact mode, one row and one group of heads. Included once for each instruction set.

struct AttentionScratch {  // of one row and group: floats, each at a multiple of SLIMX_LANES
  int64_t share, d, dv, slots;
  float *query, *block, *scores, *mixed, *sums;

  AttentionScratch(const SlimxExactAttention& a, int64_t longest, float* at)
      : share(a.heads / a.groups),
        d(rounded_up(a.d, SLIMX_LANES)),
        dv(rounded_up(a.dv, SLIMX_LANES)),
        slots(rounded_up(longest, SLIMX_LANES)),
        query(at),                 // [share][d]
        block(query + share * d),  // a key [d], or the values [SLIMX_KEY_BLOCK][dv]
        scores(block + (d > SLIMX_KEY_BLOCK * dv ? d : SLIMX_KEY_BLOCK * dv)),  // [share][slots]
        mixed(scores + share * slots),                                          // [share][dv]
        sums(mixed + share * dv) {}                                             // [share]

  int64_t size() const { return sums + rounded_up(share, SLIMX_LANES) - query; }
};

// mixed += the sum of weight[j] * values[j], for kCount vectors of n values.
template <int kCount>
static inline void join_values(const float* weight, const float* values, int64_t n, int64_t stride, float* mixed) {
  Floats part[kCount] = {};
  for (int64_t j = 0; j < n; ++j)
    for (int c = 0; c < kCount; ++c)
      part[c] = multiply_add(splat(weight[j]), load(values + j * stride + c * kWidth), part[c]);
  for (int c = 0; c < kCount; ++c) store(mixed + c * kWidth, load(mixed + c * kWidth) + part[c]);
}

template <class T>
static void score_keys(const SlimxExactAttention& a, int64_t row, int64_t group, const AttentionScratch& s) {
  const int64_t first = group * s.share;
  const int32_t* index = a.index + a.begin[row];
  for (int64_t h = 0; h < s.share; ++h)
    widen(static_cast<const T*>(a.query) + (row * a.heads + first + h) * a.d, a.d, SLIMX_LANES, s.query + h * s.d);
  for (int64_t j = 0; j < a.length[row]; ++j) {
    widen(static_cast<const T*>(a.key) + (index[j] * a.groups + group) * a.d, a.d, SLIMX_LANES, s.block);
    for (int64_t h = 0; h < s.share; ++h) {
      Lanes lanes;
      for (int64_t i = 0; i < s.d; i += SLIMX_LANES)
        for (int p = 0; p < kParts; ++p) {
          const int64_t at = i + p * kWidth;
          lanes.part[p] = multiply_add(load(s.query + h * s.d + at), load(s.block + at), lanes.part[p]);
        }
      s.scores[h * s.slots + j] = total(lanes) * a.scale;
    }
  }
}

// Scores of one head become weights; returns what a sink adds to their sum.
static float weigh_keys(float* scores, int64_t n, const float* sink) {
  float most = scores[0];
  for (int64_t j = 1; j < n; ++j) most = scores[j] > most || scores[j] != scores[j] ? scores[j] : most;
  if (sink) most = *sink > most ? *sink : most;
  const Floats shift = splat(most);
  for (int64_t j = 0; j < n; j += kWidth) store(scores + j, exp(load_some(scores + j, n - j) - shift));
  return sink ? exp(splat(*sink - most))[0] : 0.0f;
}

template <class T>
static void mix_values(const SlimxExactAttention& a, int64_t row, int64_t group, const AttentionScratch& s) {
  const int32_t* index = a.index + a.begin[row];
  for (int64_t i = 0; i < s.share * s.dv; ++i) s.mixed[i] = 0;
  for (int64_t start = 0; start < a.length[row]; start += SLIMX_KEY_BLOCK) {
    const int64_t left = a.length[row] - start, n = left < SLIMX_KEY_BLOCK ? left : SLIMX_KEY_BLOCK;
    for (int64_t j = 0; j < n; ++j) {
      const T* value = static_cast<const T*>(a.value) + (index[start + j] * a.groups + group) * a.dv;
      widen(value, a.dv, SLIMX_LANES, s.block + j * s.dv);
    }
    for (int64_t h = 0; h < s.share; ++h) {
      const float* weight = s.scores + h * s.slots + start;
      float sum = 0, *mixed = s.mixed + h * s.dv;
      for (int64_t j = 0; j < n; ++j) sum += weight[j];
      s.sums[h] += sum;
      int64_t i = 0;
      for (; i + 4 * kWidth <= s.dv; i += 4 * kWidth) join_values<4>(weight, s.block + i, n, s.dv, mixed + i);
      for (; i < s.dv; i += kWidth) join_values<1>(weight, s.block + i, n, s.dv, mixed + i);
    }
  }
}

// The query heads of `group` of row `row`.
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
