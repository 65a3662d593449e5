// What follows a convolution's sums: an activation of each, and numbers of each channel.
//
// Compiled for DTYPE and ACTIVATION (depthwise.py).
#pragma once
#include "lanes.cuh"
#include "math.cuh"

enum { none, relu, silu, gelu, hardswish, relu6 };

using Element = ts::DTYPE;

TS_DEV void activate(float (&v)[2]) {
  if constexpr (ACTIVATION == silu) ts::silu_pair(v[0], v[1], v);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float six = ts::min_nan(ts::max_nan(ACTIVATION == hardswish ? v[e] + 3.0f : v[e], 0.0f), 6.0f);
    if constexpr (ACTIVATION == relu) v[e] = ts::relu(v[e]);
    if constexpr (ACTIVATION == gelu) v[e] = ts::gelu(v[e]);
    if constexpr (ACTIVATION == relu6) v[e] = six;
    if constexpr (ACTIVATION == hardswish) v[e] *= six * (1.0f / 6.0f);
  }
}

TS_DEV void two_floats(const float* from, float (&v)[2]) {
  u32 words[2];
  lanes::load_words<8>(from, words);
  v[0] = ts::float_of(words[0]), v[1] = ts::float_of(words[1]);
}
