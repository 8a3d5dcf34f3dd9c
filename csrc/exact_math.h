// exact_math.h: exp and log of exact mode, for floats and vectors of floats;
// slimx/extras/exact/operations/forward/elementary.py documents their derivation. The including file defines
// SLIMX_MATH, which declares the functions, so there is no include guard. Products and additions are rounded
// separately: compile without contraction.

// Returns e^r for |r| <= ln(2) / 2.
template <class F>
SLIMX_MATH F exp_polynomial(F r) {
  F y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  return (y * (r * r) + r) + 1.0f;
}

// Returns n of x = n ln(2) + r, for e^x = 2^n e^r: an integer that is not limited yet.
template <class F>
SLIMX_MATH F exp_power(F x) {
  return (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
}

template <class F>
SLIMX_MATH F exp_rest(F x, F n) {
  return (x - n * 0.693359375f) - n * -2.12194440e-4f;
}

#define SLIMX_EXP_LEAST -87.3365447505f  // e^x is 0 below this value
#define SLIMX_EXP_MOST 88.7228391116f    // e^x is infinite above this value

SLIMX_MATH float exact_log(float x) {
  if (!(x == x)) return x;
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t half = (bits & 0x007FFFFFu) | 0x3F000000u;
  float m, e = float(int32_t(bits >> 23) - 126);
  memcpy(&m, &half, 4);
  if (m < 0.70710678118654752440f) {
    e = e - 1.0f;
    m = m + m;
  }
  m = m - 1.0f;
  const float z = m * m;
  float y = m * 7.0376836292e-2f + -1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m + -1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m + -1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m + -2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  y = (y * m) * z;
  y = y + e * -2.12194440e-4f;
  y = y - 0.5f * z;
  return (m + y) + e * 0.693359375f;
}
