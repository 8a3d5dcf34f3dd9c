// exact_rows.h: operations of exact mode on one row. Included only by exact_isa.h. `scratch`: memory for the floats of
// one row, rounded up to a multiple of SLIMX_LANES.

template <class T>
static void rms_norm_row(const T* x, const T* weight, int64_t n, float eps, float* scratch, T* out) {
  widen(x, n, SLIMX_LANES, scratch);
  const int64_t end = (n + SLIMX_LANES - 1) / SLIMX_LANES * SLIMX_LANES;
  const float sum = row_sum(end, [&](int64_t i) { return load(scratch + i) * load(scratch + i); });
  const Floats scale = splat(1.0f / sqrtf(sum / float(n) + eps));
  for (int64_t i = 0; i < n; i += kWidth)
    store_some(out + i, (load(scratch + i) * scale) * load_some(weight + i, n - i), n - i);
}

template <class T>
static void silu_and_mul_row(const T* x, int64_t n, T* out) {
  for (int64_t i = 0; i < n; i += kWidth) {
    const Floats gate = load_some(x + i, n - i), up = load_some(x + n + i, n - i);
    store_some(out + i, (gate / (1.0f + exp(-gate))) * up, n - i);
  }
}

template <class T>
static void log_normalizer_row(const T* logits, int64_t n, float temperature, float* scratch, float* most,
                               float* log_sum) {
  const int64_t end = (n + SLIMX_LANES - 1) / SLIMX_LANES * SLIMX_LANES;
  const Floats divisor = splat(temperature);
  Floats high = splat(-__builtin_inff());
  for (int64_t i = 0; i < end; i += kWidth) {
    Floats z = load_some(logits + i, n - i < 0 ? 0 : n - i) / divisor;
    for (int64_t l = n - i < 0 ? 0 : n - i; l < kWidth; ++l) z[l] = -__builtin_inff();  // contributes nothing
    store(scratch + i, z);
    high = larger(z, high);
  }
  const float top = largest(high);
  const Floats shift = splat(top);
  const float sum = row_sum(end, [&](int64_t i) { return exp(load(scratch + i) - shift); });
  *most = top;
  *log_sum = exact_log(sum);
}
