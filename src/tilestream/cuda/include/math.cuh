// Elementwise functions on fp32 values; the tile ops of the same names.
#pragma once

namespace ts {

TS_DEV float relu(float x) { return max_nan(x, 0.0f); }
TS_DEV float exp_(float x) { return ex2(x * 1.4426950408889634f); }
TS_DEV float log_(float x) { return lg2(x) * 0.6931471805599453f; }
TS_DEV float sigmoid(float x) { return rcp(1.0f + exp_(-x)); }
// x * sigmoid(x) is NaN at -inf in eager as well (-inf * 0).
TS_DEV float silu(float x) { return x * sigmoid(x); }
// 1 - 2/(e^2x + 1): absolute error 1e-7; small arguments by the odd series, where that would cancel.
TS_DEV float tanh_(float x) {
  float x2 = x * x;
  float small = x * fma_(x2, fma_(x2, fma_(x2, -0.05396825f, 0.13333333f), -0.33333333f), 1.0f);
  float large = 1.0f - 2.0f * rcp(1.0f + exp_(2.0f * x));
  return x2 < 0.0625f ? small : large;
}
// Abramowitz and Stegun 7.1.26: absolute error 1.5e-7.
TS_DEV float erf_(float x) {
  float a = x < 0.0f ? -x : x;
  float t = rcp(fma_(0.3275911f, a, 1.0f));
  float p = t * fma_(t, fma_(t, fma_(t, fma_(t, 1.061405429f, -1.453152027f), 1.421413741f), -0.284496736f), 0.254829592f);
  float y = 1.0f - p * exp_(-a * a);
  return x < 0.0f ? -y : y;
}
TS_DEV float gelu(float x) { return 0.5f * x * (1.0f + erf_(x * 0.70710678118654752f)); }
TS_DEV float gelu_tanh(float x) { return 0.5f * x * (1.0f + tanh_(0.79788456080286536f * fma_(0.044715f * x * x, x, x))); }
TS_DEV float softplus(float x, float beta, float threshold) {
  float bx = beta * x;
  // log1p by its series where 1 + e^bx would lose digits
  float e = exp_(bx);
  float l = e < 0.0078125f ? e * fma_(e, fma_(e, 0.33333333f, -0.5f), 1.0f) : log_(1.0f + e);
  return bx > threshold ? x : l / beta;
}
// Arguments beyond a few pi need the reduction: the fast sine is only good near zero.
TS_DEV float turns(float x) {
  float n = round_(x * 0.15915494309189535f);
  return fma_(n, 1.7484556e-7f, fma_(n, -6.2831854820251465f, x));
}
TS_DEV float sin_(float x) { return sin_reduced(turns(x)); }
TS_DEV float cos_(float x) { return cos_reduced(turns(x)); }
TS_DEV float neg(float x) { return -x; }
TS_DEV float abs_(float x) { return x < 0.0f ? -x : (x == 0.0f ? 0.0f : x); }
TS_DEV float sqrt_(float x) { return sqr(x); }
TS_DEV float rsqrt_(float x) { return rsq(x); }
TS_DEV float reciprocal(float x) { return 1.0f / x; }
TS_DEV float square(float x) { return x * x; }
TS_DEV float add(float a, float b) { return a + b; }
TS_DEV float sub(float a, float b) { return a - b; }
TS_DEV float mul(float a, float b) { return a * b; }
TS_DEV float div(float a, float b) { return a / b; }
TS_DEV float maximum(float a, float b) { return max_nan(a, b); }
TS_DEV float minimum(float a, float b) { return min_nan(a, b); }

}  // namespace ts
