// Gradients of a norm: of its rows, and in the same pass the sums over rows that are those of its weight and its bias.
//
//     x^ = (x - mean(x)) rstd        dx = rstd (g w - mean(g w) - x^ mean(g w x^))        sums of g x^, of g
//
// A warp has a row, a lane some of its columns, in vectors. Sums stay in its registers while rows pass; in the end a CTA adds
// up its warps' in their order, and writes one row of sums, which somebody else adds to those of other CTAs.
//
// Compiled for DTYPE, COLUMNS (a multiple of VECTOR), VECTOR (2, 4 or 8), CENTRED (LayerNorm; else RMSNorm, without means),
// WEIGHTED, BESIDE (rows that are added to dx), WARPS, RESIDENT; behind NormGradientsParams (norm_gradients.py).
#pragma once
#include "lanes.cuh"
#include "math.cuh"

constexpr int THREADS = 32 * WARPS, WORDS = VECTOR / 2, TURNS = (COLUMNS / VECTOR + 31) / 32;
constexpr int SUMS = CENTRED ? 2 : 1;         // RMSNorm has no bias
constexpr u32 OWN_SUMS = SUMS * 4 * COLUMNS;  // bytes of a warp's in shared memory

using Element = ts::DTYPE;
using Values = float[TURNS][VECTOR];  // of a row, a lane's
using Packed = u32[TURNS][WORDS];     // the same as it lies in memory: registers are what a long row lacks

TS_DEV int column(int turn) { return VECTOR * (lanes::lane() + 32 * turn); }
TS_DEV bool is_inside(int turn) { return COLUMNS % (32 * VECTOR) == 0 || column(turn) < COLUMNS; }

TS_DEV void load(const char* rows, long long row, Packed& words) {
#pragma unroll
  for (int k = 0; k < TURNS; ++k)
    if (is_inside(k)) lanes::load_words<2 * VECTOR>(rows + 2 * (row * COLUMNS + column(k)), words[k]);
}
// Zero beyond the last column.
TS_DEV float element(const Packed& words, int k, int e) {
  const float v = e & 1 ? Element::high(words[k][e / 2]) : Element::low(words[k][e / 2]);
  return is_inside(k) ? v : 0.0f;
}
// `each(k, e)` for all that a lane has of a row.
template <class F>
TS_DEV void for_own(F each) {
#pragma unroll
  for (int k = 0; k < TURNS; ++k)
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) each(k, e);
}
template <int COUNT>
TS_DEV void over_row(float (&sums)[COUNT]) {
#pragma unroll
  for (int far = 16; far > 0; far /= 2)
#pragma unroll
    for (int s = 0; s < COUNT; ++s) sums[s] += lanes::across(sums[s], far);
}

struct Operands {
  Packed g, x;
};
TS_DEV void load_row(const NormGradientsParams& p, long long row, Operands& o) {
  load(p.gradient, row, o.g);
  load(p.x, row, o.x);
}

// What a lane knows of its columns.
struct Columns {
  Packed weight;
  Values of_weight, of_bias;
};
TS_DEV float weight_of(const Columns& c, int k, int e) { return WEIGHTED ? element(c.weight, k, e) : 1.0f; }

TS_DEV void one_row(const NormGradientsParams& p, long long row, const Operands& o, Columns& c) {
  Packed beside = {};
  if (BESIDE) load(p.beside, row, beside);  // wanted last
  float mean[1] = {};
  if (CENTRED) {
    for_own([&](int k, int e) { mean[0] += element(o.x, k, e); });
    over_row(mean);
    mean[0] *= 1.0f / COLUMNS;
  }
  const auto centred = [&](int k, int e) { return is_inside(k) ? element(o.x, k, e) - mean[0] : 0.0f; };
  float sums[3] = {};  // of squares, of scaled gradients, of both multiplied
  for_own([&](int k, int e) {
    const float x = centred(k, e), scaled = element(o.g, k, e) * weight_of(c, k, e);
    sums[0] = ts::fma_(x, x, sums[0]);
    if (CENTRED) sums[1] += scaled;
    sums[2] = ts::fma_(scaled, x, sums[2]);
  });
  over_row(sums);
  const float scale = ts::rsqrt_(ts::fma_(sums[0], 1.0f / COLUMNS, p.eps));
  const float middle = sums[1] * (1.0f / COLUMNS), along = sums[2] * (1.0f / COLUMNS) * scale;
#pragma unroll
  for (int k = 0; k < TURNS; ++k) {
    u32 words[WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      float made[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int e = 2 * w + n;
        const float normal = centred(k, e) * scale, g = element(o.g, k, e);
        made[n] = scale * (ts::fma_(g, weight_of(c, k, e), -middle) - normal * along);
        if (BESIDE) made[n] += element(beside, k, e);
        c.of_weight[k][e] = ts::fma_(g, normal, c.of_weight[k][e]);
        if (CENTRED) c.of_bias[k][e] += g;
      }
      words[w] = Element::pack(made[0], made[1]);
    }
    if (is_inside(k)) lanes::store_words<2 * VECTOR>(p.out + 2 * (row * COLUMNS + column(k)), words);
  }
}

// All of a CTA's lanes: its row of sums, of what its warps have.
TS_DEV void leave_sums(const NormGradientsParams& p, u32 smem, const Columns& c) {
  const u32 own = smem + lanes::warp() * OWN_SUMS;
#pragma unroll
  for (int k = 0; k < TURNS; ++k)
    if (is_inside(k)) {
#pragma unroll
      for (int e = 0; e < VECTOR; e += 2) {
        lanes::put_pair(own + 4 * (column(k) + e), c.of_weight[k][e], c.of_weight[k][e + 1]);
        if (CENTRED) lanes::put_pair(own + 4 * (COLUMNS + column(k) + e), c.of_bias[k][e], c.of_bias[k][e + 1]);
      }
    }
  lanes::all_together();
  for (int at = lanes::thread(); at < SUMS * COLUMNS; at += THREADS) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += ts::float_of(lanes::get32(smem + w * OWN_SUMS + 4 * at));
    lanes::store_shared(p.sums + (long long)lanes::block() * SUMS * COLUMNS + at, sum);
  }
}

TS_LANES_KERNEL(32 * WARPS, RESIDENT) tilestream_norm_gradients(const TS_PARAM NormGradientsParams p) {
  TS_LANES_SHARED(smem);
  Columns c = {};
  if (WEIGHTED) load(p.weight, 0, c.weight);
  const int step = lanes::blocks() * WARPS;
  long long row = lanes::block() * WARPS + lanes::warp();
  Operands now = {}, next = {};
  if (row < p.rows) load_row(p, row, now);
#pragma unroll 1
  for (; row < p.rows; row += step) {
    if (row + step < p.rows) load_row(p, row + step, next);
    one_row(p, row, now, c);
    now = next;
  }
  leave_sums(p, smem, c);
}
