// Attention over few keys, and its gradients: a warp has 16 queries of a head, and their scores whole in registers.
//
// Queries, keys and values come as strided rows, straight from the product that made them, into shared memory, where 16 bytes of
// a row lie so that no ldmatrix meets a conflict.
//
// Compiled for DTYPE, FEATURES (of a head), QUERIES, KEYS, WARPS, TERMS (of what is added to scores), HELD (in registers), PAIRED
// (two keys of them are a word) and SAFE (a row that keeps nothing is zero), behind a kernel's parameters.
#pragma once
#include "lanes.cuh"

constexpr int LANES = 32, THREADS = WARPS * LANES, CHUNKS = FEATURES / 8;  // 16 bytes of a row each
constexpr int KEY_BLOCKS = (KEYS + 7) / 8, KEY_STEPS = (KEYS + 15) / 16, FEATURE_STEPS = FEATURES / 16;
constexpr int KEY_ROWS = 16 * KEY_STEPS;
constexpr u32 ROW_BYTES = 2 * FEATURES, KEY_BYTES = KEY_ROWS * ROW_BYTES;
constexpr float LOG2_E = 1.44269504f;
static_assert(THREADS / CHUNKS % 8 == 0 && (CHUNKS == 2 || CHUNKS == 4 || CHUNKS == 8 || CHUNKS == 16));

using Element = ts::DTYPE;

TS_DEV float nothing() { return ts::float_of(0xff800000u); }  // minus infinity
TS_DEV u32 chunk_at(int row, int chunk) {
  constexpr int ROWS_A_LINE = CHUNKS < 8 ? 8 / CHUNKS : 1, MASK = CHUNKS < 8 ? CHUNKS - 1 : 7;
  return row * ROW_BYTES + 16 * (u32)(chunk ^ (row / ROWS_A_LINE & MASK));
}

// `rows` of `from`, and zeros up to ROWS.
template <int ROWS>
TS_DEV void load_rows(u32 to, const char* from, int row_bytes, int rows) {
  constexpr int STEP = THREADS / CHUNKS;  // rows at once, by eights: they lie alike
  const int first = lanes::thread() / CHUNKS, chunk = lanes::thread() % CHUNKS;
  u32 place = to + chunk_at(first, chunk);
  from += 16 * chunk;
#pragma unroll 1
  for (int row = first; row < ROWS; row += STEP, place += STEP * ROW_BYTES)
    lanes::copy128(place, from + (row < rows ? row : 0) * (long long)row_bytes, row < rows ? 16 : 0);
}

// What is added to scores of block j of keys: of a lane's two rows two keys each. `group`: of sequences with the same.
template <class Params>
TS_DEV void added_to(const Params& p, int group, int head, int row, int j, float (&v)[4]) {
  const int key = 8 * j + lanes::lane() % 4 * 2;
#pragma unroll
  for (int k = 0; k < 4; ++k) v[k] = 0;
#pragma unroll
  for (int t = 0; t < TERMS; ++t) {
    const long long* const stride = p.added_bytes + 3 * t;  // of group, head, query
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = row + 8 * h < QUERIES ? row + 8 * h : QUERIES - 1;
      const char* const at = p.added[t] + group * stride[0] + head * stride[1] + query * stride[2] + 2 * key;
      if (PAIRED && key < KEYS) {
        u32 both;
        both = *(const u32*)at;
        v[2 * h] += Element::low(both), v[2 * h + 1] += Element::high(both);
      }
#pragma unroll
      for (int k = 0; k < 2 && !PAIRED; ++k)
        if (key + k < KEYS) v[2 * h + k] += Element::low(*(const u16*)(at + 2 * k));
    }
  }
}

struct Tile {
  float scores[KEY_BLOCKS][4], out[CHUNKS][4], sum[2];

  // Four matrices by ldmatrix: of lane l row l % 8 of matrix l / 8. Two of them lie below each other, two beside each other.
  TS_DEV void score(u32 queries, u32 keys) {
    const int l = lanes::lane(), r = l % 8, m = l / 8;
    u32 q[FEATURE_STEPS][4];
#pragma unroll
    for (int f = 0; f < FEATURE_STEPS; ++f) lanes::matrices(q[f], queries + chunk_at(m % 2 * 8 + r, 2 * f + m / 2));
#pragma unroll
    for (int j = 0; j < KEY_BLOCKS; j += 2) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        scores[j][k] = 0;
        if (j + 1 < KEY_BLOCKS) scores[j + 1][k] = 0;
      }
#pragma unroll
      for (int f = 0; f < FEATURE_STEPS; ++f) {
        u32 both[4];
        lanes::matrices(both, keys + 8 * j * ROW_BYTES + chunk_at(m / 2 * 8 + r, 2 * f + m % 2));
        lanes::product<Element>(scores[j], q[f], both[0], both[1]);
        if (j + 1 < KEY_BLOCKS) lanes::product<Element>(scores[j + 1], q[f], both[2], both[3]);
      }
    }
  }
  // What a row's weights are multiplied with, to add up to one; of a row of which nothing is kept zero, or no number.
  TS_DEV float over(int h) const { return SAFE && sum[h] == 0.0f ? 0.0f : ts::rcp_normal(sum[h]); }
  TS_DEV float of_row(float v, bool most) {
#pragma unroll
    for (int far = 1; far < 4; far *= 2) {
      const float other = lanes::across(v, far);
      v = most ? ts::max_nan(v, other) : v + other;
    }
    return v;
  }
  // Scores become weights. `added`: of block j.
  template <class Added>
  TS_DEV void weigh(float scale, Added added) {
    float most[2][2] = {{nothing(), nothing()}, {nothing(), nothing()}};  // two at a time, which wait less for each other
#pragma unroll
    for (int j = 0; j < KEY_BLOCKS; ++j) {
      float more[4];
      if (TERMS) added(j, more);
      if (TERMS && !HELD && j % 4 == 3) lanes::together();  // so that not all are asked for before, with registers for all
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float& s = scores[j][k];
        s = TERMS ? ts::fma_(s, scale, more[k]) : s;
        if (8 * j + 8 > KEYS && 8 * j + lanes::lane() % 4 * 2 + k % 2 >= KEYS) s = nothing();
        most[k / 2][k % 2] = ts::max_nan(most[k / 2][k % 2], s);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float now = of_row(ts::max_nan(most[h][0], most[h][1]), true), total[2] = {};
      now = now == nothing() ? 0.0f : now;  // nothing is kept
      const float to = scale * LOG2_E, from = now * to;
#pragma unroll
      for (int j = 0; j < KEY_BLOCKS; ++j)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float& s = scores[j][2 * h + k];
          // The lowest numbers of a mask times log2(e) are no number.
          s = ts::ex2(TERMS ? (s - now) * LOG2_E : ts::fma_(s, to, -from));
          total[k] += s;
        }
      sum[h] = of_row(total[0] + total[1], false);
    }
  }
  TS_DEV void weigh_values(u32 values) {
    const int l = lanes::lane(), r = l % 8, m = l / 8;
#pragma unroll
    for (int f = 0; f < CHUNKS; ++f)
#pragma unroll
      for (int k = 0; k < 4; ++k) out[f][k] = 0;
#pragma unroll
    for (int j = 0; j < KEY_STEPS; ++j) {
      u32 weights[4] = {};
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (2 * j + k / 2 < KEY_BLOCKS)
          weights[k] = Element::pack(scores[2 * j + k / 2][k % 2 * 2], scores[2 * j + k / 2][k % 2 * 2 + 1]);
#pragma unroll
      for (int f = 0; f < FEATURE_STEPS; ++f) {
        u32 both[4];
        lanes::matrices_turned(both, values + 16 * j * ROW_BYTES + chunk_at(m % 2 * 8 + r, 2 * f + m / 2));
        lanes::product<Element>(out[2 * f], weights, both[0], both[1]);
        lanes::product<Element>(out[2 * f + 1], weights, both[2], both[3]);
      }
    }
  }
  // Results times `by(h)`, of the lane's row h, through `place`, of which nobody reads more, to `rows` rows of `to`.
  template <class By>
  TS_DEV void store(u32 place, char* to, long long row_bytes, int rows, By by) {
    const int l = lanes::lane();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float over = by(h);
#pragma unroll
      for (int f = 0; f < CHUNKS; ++f)
        lanes::put32(place + chunk_at(l / 4 + 8 * h, f) + l % 4 * 4, Element::pack(out[f][2 * h] * over, out[f][2 * h + 1] * over));
    }
    lanes::together();
#pragma unroll
    for (int k = 0; k < CHUNKS / 2; ++k) {
      const int row = (k * LANES + l) / CHUNKS, chunk = (k * LANES + l) % CHUNKS;
      u32 words[4];
      lanes::get128(place + chunk_at(row, chunk), words);
      if (row < rows) lanes::store128(to + row * row_bytes + 16 * chunk, words);
    }
  }
};
