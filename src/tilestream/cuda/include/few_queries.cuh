// Attention of a few queries over the keys and values that they share, as where one token of each sequence is decoded.
//
// A CTA has a head of keys and the QUERIES that read it. Lanes of a group have 8 features each of a position; groups take
// positions in turn, each with a softmax of its own (a running maximum and sum: Milakov and Gimelshein 2018), which are
// put together at the end. All products are fp32: there are too few rows for the tensor cores, and keys and values are
// read once in any case.
//
// Compiled for DTYPE, QUERIES, FEATURES (of a head: 32, 64, 128 or 256), WARPS a CTA and RESIDENT CTAs an SM.
#pragma once
#include "lanes.cuh"

constexpr int LANES = 32, HALF = 8, GROUP = FEATURES / HALF, GROUPS = WARPS * LANES / GROUP;
constexpr int AHEAD = 4;                 // positions of a group that are loaded at once
constexpr int PART = FEATURES + HALF;    // floats that a warp leaves of a query: weighted values, maximum, sum
constexpr float LOG2_E = 1.44269504f, NOTHING = -3.0e38f;  // below every score
constexpr float LEAST = -1.0e38f, NEVER = -3.4e38f;        // of masks: the lowest numbers count as this, and less is left out
static_assert(GROUP >= 4 && GROUP <= LANES && (GROUP & (GROUP - 1)) == 0);

struct FewQueriesParams {
  const char *query, *key, *value, *mask;  // mask: added to scores, or null
  char* out;                               // [heads, QUERIES, FEATURES]
  long long query_stride, key_stride, value_stride, mask_stride;  // bytes from head to head
  int query_row, key_row, value_row;                              // bytes from query to query, position to position
  int positions;
  float scale;
};

using Element = ts::DTYPE;

TS_DEV void unpack(const u32 (&words)[4], float (&v)[HALF]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) v[2 * k] = Element::low(words[k]), v[2 * k + 1] = Element::high(words[k]);
}

// A softmax under way over some of the positions, with the 8 features that a lane has of what it weights.
struct Softmax {
  float most, sum, values[HALF];
  TS_DEV void begin() {
    most = NOTHING, sum = 0;
#pragma unroll
    for (int k = 0; k < HALF; ++k) values[k] = 0;
  }
  // Another position, or several that were put together: their maximum, sum and weighted values.
  TS_DEV void add(float score, float times, const float (&v)[HALF]) {
    const float now = score > most ? score : most;
    const float before = ts::ex2(most - now), weight = ts::ex2(score - now);
    sum = sum * before + times * weight;
#pragma unroll
    for (int k = 0; k < HALF; ++k) values[k] = values[k] * before + v[k] * weight;
    most = now;
  }
};

TS_DEV void put_float(u32 at, float v) { lanes::put32(at, ts::bits_of(v)); }
TS_DEV float get_float(u32 at) { return ts::float_of(lanes::get32(at)); }

// Scores of AHEAD positions from `first` on, and their values, into every query's softmax.
TS_DEV void attend(const FewQueriesParams& p, const float (&query)[QUERIES][HALF], int first, int feature, Softmax (&to)[QUERIES]) {
  const long long head = lanes::block();
  u32 keys[AHEAD][4] = {}, values[AHEAD][4] = {};
  float bias[AHEAD];
#pragma unroll
  for (int a = 0; a < AHEAD; ++a) {
    const int s = first + a * GROUPS;
    bias[a] = NOTHING;
    if (s >= p.positions) continue;
    lanes::load128(p.key + head * p.key_stride + (long long)s * p.key_row + feature * 2, keys[a]);
    lanes::load128(p.value + head * p.value_stride + (long long)s * p.value_row + feature * 2, values[a]);
    const float masked = p.mask == nullptr ? 0.0f : Element::low(lanes::load16(p.mask + head * p.mask_stride + s * 2));
    if (masked >= NEVER) bias[a] = masked * LOG2_E > LEAST ? masked * LOG2_E : LEAST;
  }
#pragma unroll
  for (int a = 0; a < AHEAD; ++a) {
    float key[HALF], value[HALF];
    unpack(keys[a], key);
    unpack(values[a], value);
#pragma unroll
    for (int r = 0; r < QUERIES; ++r) {
      float score = 0;
#pragma unroll
      for (int k = 0; k < HALF; ++k) score += query[r][k] * key[k];
#pragma unroll
      for (int far = 1; far < GROUP; far *= 2) score += lanes::across(score, far);
      if (bias[a] > NOTHING) to[r].add(score + bias[a], 1.0f, value);
    }
  }
}

TS_LANES_KERNEL(WARPS* LANES, RESIDENT) tilestream_few_queries(const TS_PARAM FewQueriesParams p) {
  TS_LANES_SHARED(base);
  const long long head = lanes::block();
  const int group = lanes::thread() / GROUP, feature = lanes::thread() % GROUP * HALF;
  float query[QUERIES][HALF];
  Softmax under_way[QUERIES];
#pragma unroll
  for (int r = 0; r < QUERIES; ++r) {
    u32 words[4];
    lanes::load128(p.query + head * p.query_stride + (long long)r * p.query_row + feature * 2, words);
    unpack(words, query[r]);
#pragma unroll
    for (int k = 0; k < HALF; ++k) query[r][k] *= p.scale * LOG2_E;
    under_way[r].begin();
  }
  for (int first = 0; first < p.positions; first += AHEAD * GROUPS) attend(p, query, first + group, feature, under_way);
#pragma unroll
  for (int r = 0; r < QUERIES; ++r) {
    Softmax& mine = under_way[r];
#pragma unroll
    for (int far = GROUP; far < LANES; far *= 2) {
      float theirs[HALF];
      const float most = lanes::across(mine.most, far), sum = lanes::across(mine.sum, far);
#pragma unroll
      for (int k = 0; k < HALF; ++k) theirs[k] = lanes::across(mine.values[k], far);
      mine.add(most, sum, theirs);
    }
    const u32 to = base + 4 * (lanes::warp() * QUERIES + r) * PART;
    if (lanes::lane() < GROUP) {
#pragma unroll
      for (int k = 0; k < HALF; ++k) put_float(to + 4 * (feature + k), mine.values[k]);
    }
    if (lanes::lane() == 0) put_float(to + 4 * FEATURES, mine.most), put_float(to + 4 * FEATURES + 4, mine.sum);
  }
  lanes::all_together();
  for (int item = lanes::thread(); item < QUERIES * GROUP; item += WARPS * LANES) {
    const int r = item / GROUP, f = item % GROUP * HALF;
    Softmax all;
    all.begin();
#pragma unroll 4
    for (int w = 0; w < WARPS; ++w) {
      const u32 from = base + 4 * (w * QUERIES + r) * PART;
      float theirs[HALF];
#pragma unroll
      for (int k = 0; k < HALF; ++k) theirs[k] = get_float(from + 4 * (f + k));
      all.add(get_float(from + 4 * FEATURES), get_float(from + 4 * FEATURES + 4), theirs);
    }
    const float share = all.sum > 0 ? 1.0f / all.sum : 0.0f;  // zeros where all is masked
    u32 words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) words[k] = Element::pack(all.values[2 * k] * share, all.values[2 * k + 1] * share);
    lanes::store128(p.out + ((head * QUERIES + r) * FEATURES + f) * 2, words);
  }
}
