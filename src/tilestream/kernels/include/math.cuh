// Elementwise functions on fp32 values; the tile ops of the same names.
#pragma once

namespace ts {

TS_DEV float abs_(float x) { return float_of(bits_of(x) & 0x7fffffffu); }
TS_DEV float relu(float x) { return max_nan(x, 0.0f); }
TS_DEV float exp_(float x) { return ex2(x * 1.4426950408889634f); }
// Near 0, where exp(x) - 1 would cancel, a polynomial: relative error 1e-7.
TS_DEV float expm1_(float x) {
  float p = fma_(x, fma_(x, fma_(x, fma_(x, fma_(x, 1.9775133e-4f, 1.4064788e-3f), 8.3346758e-3f), 4.1663788e-2f), 0.16666643f), 0.5f);
  float small = fma_(x * x, p, x);
  float large = exp_(x) - 1.0f;
  return abs_(x) < 0.69f ? small : large;
}
TS_DEV float log_(float x) { return lg2(x) * 0.6931471805599453f; }
TS_DEV float sigmoid(float x) { return rcp_normal(1.0f + exp_(-x)); }
// x * sigmoid(x) is NaN at -inf in eager as well (-inf * 0).
TS_DEV float silu(float x) { return x * sigmoid(x); }
// Of two values by one reciprocal: 1 / a = b (1 / ab). The special function unit takes eight cycles for a warp's values, in
// which as many other instructions are issued. Below -43 a factor is cut off, lest the product overflow: x 2^-62 there.
TS_DEV void silu_pair(float x, float y, float (&both)[2]) {
  const float a = 1.0f + ex2(min_number(-1.4426950408889634f * x, 62.0f)), b = 1.0f + ex2(min_number(-1.4426950408889634f * y, 62.0f));
  const float r = rcp_normal(a * b);
  both[0] = x * (b * r);
  both[1] = y * (a * r);
}
// 1 - 2/(e^2x + 1): absolute error 1e-7; small arguments by the odd series, where that would cancel. With the shorter
// reciprocal ptxas interleaves so many of them that it spills.
TS_DEV float tanh_(float x) {
  float x2 = x * x;
  float small = x * fma_(x2, fma_(x2, fma_(x2, -0.05396825f, 0.13333333f), -0.33333333f), 1.0f);
  float large = 1.0f - 2.0f * rcp(1.0f + exp_(2.0f * x));
  return x2 < 0.0625f ? small : large;
}
// 1 - erf(a) for a >= 0, and e = exp(-a a). Abramowitz and Stegun 7.1.26: absolute error 1.5e-7.
TS_DEV float erfc_(float a, float e) {
  float t = rcp_normal(fma_(0.3275911f, a, 1.0f));
  return t * fma_(t, fma_(t, fma_(t, fma_(t, 1.061405429f, -1.453152027f), 1.421413741f), -0.284496736f), 0.254829592f) * e;
}
// Phi(x) + x phi(x)
TS_DEV float gelu_slope(float x) {
  float e = exp_(-0.5f * x * x);
  float tail = 0.5f * erfc_(abs_(x) * 0.70710678118654752f, e);
  return fma_(0.3989422804f * x, e, x < 0.0f ? tail : 1.0f - tail);
}
// x Phi(x), with s = |x| sqrt(log2(e) / 2), so that 2^(-s s) = exp(-x x / 2). Of Phi the tail is computed: below zero
// nothing cancels.
TS_DEV float gelu(float x) {
  float s = abs_(x) * 0.84932180028801905f;
  float t = rcp_normal(fma_(0.27273748f, s, 1.0f)), e = ex2(-s * s);
  float p = fma_(t, fma_(t, fma_(t, fma_(t, 0.5307027145f, -0.7265760135f), 0.7107068705f), -0.142248368f), 0.127414796f);
  float tail = p * t * e;
  return x * (x < 0.0f ? tail : 1.0f - tail);
}
TS_DEV float gelu_tanh(float x) { return 0.5f * x * (1.0f + tanh_(0.79788456080286536f * fma_(0.044715f * x * x, x, x))); }
// The host passes 1 / beta: an exact division costs more than the rest.
TS_DEV float softplus(float x, float beta, float inverse, float threshold) {
  float bx = beta * x;
  // log1p by its series where 1 + e^bx would lose digits
  float e = exp_(bx);
  float l = e < 0.0078125f ? e * fma_(e, fma_(e, 0.33333333f, -0.5f), 1.0f) : lg2_normal(1.0f + e) * 0.6931471805599453f;
  return bx > threshold ? x : l * inverse;
}
// sin(r + n pi) = (-1)^n sin(r), by a polynomial on [-pi/2, pi/2]: relative error 1e-7, where the hardware's sine has an
// absolute one, and as fast. ROUND puts n into the low bits of the sum. Beyond 2^22 pi an fp32 step is a radian: noise.
constexpr float ROUND = 12582912.0f;
TS_DEV float sin_beside(float x, float n, float rounded) {
  float r = fma_(n, 8.7422777e-8f, fma_(n, -3.1415927410125732f, x));
  float r2 = r * r;
  float p = fma_(r2, fma_(r2, fma_(r2, 2.6056489e-6f, -1.9809547e-4f), 8.3330655e-3f), -0.1666666f);
  return float_of(bits_of(fma_(r * r2, p, r)) ^ bits_of(rounded) << 31);
}
TS_DEV float sin_(float x) {
  float rounded = fma_(x, 0.31830988618379067f, ROUND);
  return sin_beside(x, rounded - ROUND, rounded);
}
TS_DEV float cos_(float x) {
  float rounded = fma_(x, 0.31830988618379067f, -0.5f) + ROUND;
  return -sin_beside(x, (rounded - ROUND) + 0.5f, rounded);
}
TS_DEV float neg(float x) { return -x; }
TS_DEV float sqrt_(float x) { return sqr(x); }
TS_DEV float rsqrt_(float x) { return rsq(x); }
TS_DEV float reciprocal(float x) { return quotient(1.0f, x); }
TS_DEV float square(float x) { return x * x; }
TS_DEV float add(float a, float b) { return a + b; }
TS_DEV float sub(float a, float b) { return a - b; }
TS_DEV float mul(float a, float b) { return a * b; }
TS_DEV float div(float a, float b) { return quotient(a, b); }
TS_DEV float maximum(float a, float b) { return max_nan(a, b); }
TS_DEV float minimum(float a, float b) { return min_nan(a, b); }
TS_DEV float relu_backward(float a, float b) { return b <= 0.0f ? 0.0f : a; }

}  // namespace ts
