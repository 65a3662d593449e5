// Squeeze and excite: of sums of a picture's tiles, [parts, channels], a gate for each channel, which two small layers make of
// the means: gate(W2 act(W1 means + b1) + b2). A CTA has a picture; all is fp32 and rounded once.
//
// Sums are loaded four channels a lane; the lanes that one row of sums does not take have other rows. A warp makes an
// element of the hidden layer, a lane one of the gate.
//
// Compiled for DTYPE, CHANNELS (a multiple of 4), HIDDEN (of 2), ACTIVATION and GATE, functions of math.cuh or below, WARPS;
// behind SqueezeParams (squeeze.py).
#pragma once
#include "lanes.cuh"
#include "math.cuh"

constexpr int THREADS = 32 * WARPS, FOURS = CHANNELS / 4, SLICES = THREADS / FOURS;
// Shared memory: four sums of each lane, the means, the hidden layer.
constexpr u32 MEANS_AT = 16 * THREADS, HIDDEN_AT = MEANS_AT + 4 * CHANNELS;
static_assert(CHANNELS % 4 == 0 && FOURS <= THREADS && HIDDEN % 2 == 0);

namespace ts {
TS_DEV float hardsigmoid(float x) { return min_nan(max_nan(x + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f); }
}  // namespace ts

using Element = ts::DTYPE;
TS_DEV float shared_float(u32 at) { return ts::float_of(lanes::get32(at)); }
TS_DEV float bias_of(const void* bias, int k) { return bias ? Element::low(lanes::load16((const char*)bias + 2 * k)) : 0.0f; }
TS_DEV void add_four(const float* from, float (&sum)[4]) {
  u32 words[4];
  lanes::load128(from, words);
#pragma unroll
  for (int e = 0; e < 4; ++e) sum[e] += ts::float_of(words[e]);
}
// The sum over COUNT 16-bit weights times floats in shared memory, of every `step`th piece from the first on. Pieces are of 16
// bytes where rows of weights may be read so.
template <int COUNT>
TS_DEV float dot(const char* weights, u32 floats, int first, int step) {
  constexpr int WORDS = COUNT % 8 ? 1 : 4;
  float sum = 0.0f;
#pragma unroll 8
  for (int k = first; k < COUNT / (2 * WORDS); k += step) {
    u32 words[WORDS];
    lanes::load_words<4 * WORDS>(weights + 4 * WORDS * k, words);
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      const u32 at = floats + 8 * (WORDS * k + w);
      sum = ts::fma_(Element::low(words[w]), shared_float(at), sum);
      sum = ts::fma_(Element::high(words[w]), shared_float(at + 4), sum);
    }
  }
  return sum;
}

TS_DEV void means(const SqueezeParams& p, u32 smem) {
  const int thread = lanes::thread(), slice = thread / FOURS, four = thread % FOURS;
  const float* const sums = p.sums + (u64)lanes::block() * p.parts * CHANNELS;
  float sum[4] = {};
  if (slice < SLICES) {
#pragma unroll 8
    for (int part = slice; part < p.parts; part += SLICES) add_four(sums + part * CHANNELS + 4 * four, sum);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) lanes::put32(smem + 16 * thread + 4 * e, ts::bits_of(sum[e]));
  lanes::all_together();
  if (slice == 0) {
    for (int other = 1; other < SLICES; ++other)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += shared_float(smem + 16 * (other * FOURS + thread) + 4 * e);
#pragma unroll
    for (int e = 0; e < 4; ++e) lanes::put32(smem + MEANS_AT + 16 * four + 4 * e, ts::bits_of(sum[e] * p.share));
  }
  lanes::all_together();
}

TS_LANES_KERNEL(32 * WARPS, 1) tilestream_squeeze(const TS_PARAM SqueezeParams p) {
  TS_LANES_SHARED(smem);
  means(p, smem);
  for (int h = lanes::warp(); h < HIDDEN; h += WARPS) {
    float sum = dot<CHANNELS>(p.w1 + 2 * h * CHANNELS, smem + MEANS_AT, lanes::lane(), 32);
#pragma unroll
    for (int far = 16; far > 0; far /= 2) sum += lanes::across(sum, far);
    if (lanes::lane() == 0) lanes::put32(smem + HIDDEN_AT + 4 * h, ts::bits_of(ts::ACTIVATION(sum + bias_of(p.b1, h))));
  }
  lanes::all_together();
  for (int c = lanes::thread(); c < CHANNELS; c += THREADS) {
    const float gate = ts::GATE(dot<HIDDEN>(p.w2 + 2 * c * HIDDEN, smem + HIDDEN_AT, 0, 1) + bias_of(p.b2, c));
    const u32 word = Element::pack(gate, 0.0f);
    lanes::store_words<2>(p.out + 2 * ((u64)lanes::block() * CHANNELS + c), &word);
  }
}
