// Attention of a few queries over the keys and values that they share, as where one token of each sequence is decoded.
//
// A CTA has a head of keys and the QUERIES that read it. Lanes of a group have 8 features each of a position; groups take
// positions in turn, each with a softmax of its own (a running maximum and sum: Milakov and Gimelshein 2018), which are
// put together at the end. All products are fp32: there are too few rows for the tensor cores, and keys and values are
// read once in any case.
//
// Compiled for DTYPE, QUERIES, FEATURES (of a head: 32, 64, 128 or 256), MASKED, WARPS a CTA and RESIDENT CTAs an SM,
// behind FewQueriesParams (few_queries.py).
#pragma once
#include "lanes.cuh"

constexpr int LANES = 32, HALF = 8, GROUP = FEATURES / HALF, GROUPS = WARPS * LANES / GROUP;
constexpr int AHEAD = QUERIES > 4 ? 4 : QUERIES > 2 ? 8 : 16;  // positions of a group that are loaded at once
// Where two CTAs share an SM they are loaded in two halves, one on its way while the other is worked on.
constexpr int HALVES = RESIDENT > 1 ? 2 : 1, EACH = AHEAD / HALVES;
constexpr int PART = FEATURES + HALF;    // floats that a warp leaves of a query: weighted values, maximum, sum
constexpr float LOG2_E = 1.44269504f, NOTHING = -3.0e38f;  // below every score
constexpr u32 NOWHERE = 0xffff;                            // the mask of no position: a NaN
constexpr float LEAST = -1.0e38f, NEVER = -3.4e38f;        // of masks: the lowest numbers count as this, and less is left out
static_assert(GROUP >= 4 && GROUP <= LANES && (GROUP & (GROUP - 1)) == 0);

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
  // That of other positions, put together.
  TS_DEV void add(float score, float times, const float (&v)[HALF]) {
    const float now = score > most ? score : most, before = ts::ex2(most - now), weight = ts::ex2(score - now);
    sum = sum * before + times * weight;
#pragma unroll
    for (int k = 0; k < HALF; ++k) values[k] = values[k] * before + v[k] * weight;
    most = now;
  }
};

TS_DEV void put_float(u32 at, float v) { lanes::put32(at, ts::bits_of(v)); }
TS_DEV float get_float(u32 at) { return ts::float_of(lanes::get32(at)); }

// Positions of a group that are loaded at once. Masks stay as they came until they are used: who looked at one here would
// wait for it before the next position is asked for.
struct Loaded {
  u32 keys[EACH][4], values[EACH][4], masks[EACH];
  // From `start`, the first position of the first group; nothing where that is behind the last.
  TS_DEV void load(const FewQueriesParams& p, long long head, int start, int group, int feature) {
    if (start >= p.positions) return;
#pragma unroll
    for (int a = 0; a < EACH; ++a) {
      const int s = start + group + a * GROUPS;
      const bool there = s < p.positions;
      const int at = there ? s : p.positions - 1;
      lanes::load128(p.key + head * p.key_stride + (long long)at * p.key_row + feature * 2, keys[a]);
      lanes::load128(p.value + head * p.value_stride + (long long)at * p.value_row + feature * 2, values[a]);
      masks[a] = 0;
      if constexpr (MASKED) masks[a] = lanes::load16(p.mask + head * p.mask_stride + at * 2);
      if (!there) masks[a] = NOWHERE;
    }
  }
  // Into every query's softmax. All scores are summed over the group's lanes at once: shuffles wait for each other.
  TS_DEV void attend(const float (&query)[QUERIES][HALF], Softmax (&to)[QUERIES]) const {
    float scores[QUERIES][EACH], bias[EACH];  // NOTHING: no position, or one that is masked for good
#pragma unroll
    for (int a = 0; a < EACH; ++a) {
      const float masked = Element::low(masks[a]);
      bias[a] = !(masked >= NEVER) ? NOTHING : masked * LOG2_E > LEAST ? masked * LOG2_E : LEAST;
    }
#pragma unroll
    for (int a = 0; a < EACH; ++a) {
      float key[HALF];
      unpack(keys[a], key);
#pragma unroll
      for (int r = 0; r < QUERIES; ++r) {
        scores[r][a] = 0;
#pragma unroll
        for (int k = 0; k < HALF; ++k) scores[r][a] += query[r][k] * key[k];
      }
    }
#pragma unroll
    for (int far = 1; far < GROUP; far *= 2)
#pragma unroll
      for (int r = 0; r < QUERIES; ++r)
#pragma unroll
        for (int a = 0; a < EACH; ++a) scores[r][a] += lanes::across(scores[r][a], far);
#pragma unroll
    for (int r = 0; r < QUERIES; ++r) {
      float now = to[r].most;
#pragma unroll
      for (int a = 0; a < EACH; ++a) {
        scores[r][a] = bias[a] > NOTHING ? scores[r][a] + bias[a] : NOTHING;
        now = scores[r][a] > now ? scores[r][a] : now;
      }
      const float before = ts::ex2(to[r].most - now);
      to[r].most = now;
      to[r].sum *= before;
#pragma unroll
      for (int k = 0; k < HALF; ++k) to[r].values[k] *= before;
#pragma unroll
      for (int a = 0; a < EACH; ++a) {
        scores[r][a] = bias[a] > NOTHING ? ts::ex2(scores[r][a] - now) : 0.0f;
        to[r].sum += scores[r][a];
      }
    }
#pragma unroll
    for (int a = 0; a < EACH; ++a) {
      float value[HALF];
      unpack(values[a], value);
#pragma unroll
      for (int r = 0; r < QUERIES; ++r)
#pragma unroll
        for (int k = 0; k < HALF; ++k) to[r].values[k] += scores[r][a] * value[k];
    }
  }
};

TS_LANES_KERNEL(WARPS* LANES, RESIDENT) tilestream_few_queries(const TS_PARAM FewQueriesParams p) {
  TS_LANES_SHARED(base);
  const long long head = lanes::block();
  const int group = lanes::thread() / GROUP, feature = lanes::thread() % GROUP * HALF;
  float query[QUERIES][HALF];
  u32 words[QUERIES][4];
  Softmax under_way[QUERIES];
  Loaded next[HALVES];
#pragma unroll
  for (int r = 0; r < QUERIES; ++r)
    lanes::load128(p.query + head * p.query_stride + (long long)r * p.query_row + feature * 2, words[r]);
#pragma unroll
  for (int h = 0; h < HALVES; ++h) next[h].load(p, head, h * EACH * GROUPS, group, feature);
#pragma unroll
  for (int r = 0; r < QUERIES; ++r) {
    unpack(words[r], query[r]);
#pragma unroll
    for (int k = 0; k < HALF; ++k) query[r][k] *= p.scale * LOG2_E;
    under_way[r].begin();
  }
  for (int first = 0; first < p.positions; first += AHEAD * GROUPS) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const int start = first + h * EACH * GROUPS;
      if (start >= p.positions) break;
      next[h].attend(query, under_way);
      next[h].load(p, head, start + AHEAD * GROUPS, group, feature);
    }
  }
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
  for (int item = lanes::thread(); item < QUERIES * FEATURES / 2; item += WARPS * LANES) {
    const int r = item / (FEATURES / 2), f = item % (FEATURES / 2) * 2;
    const u32 from = base + 4 * r * PART, step = 4 * QUERIES * PART;
    float most = NOTHING, sum = 0, low = 0, high = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float theirs = get_float(from + w * step + 4 * FEATURES);
      most = theirs > most ? theirs : most;
    }
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const u32 at = from + w * step;
      const float weight = ts::ex2(get_float(at + 4 * FEATURES) - most);
      sum += weight * get_float(at + 4 * FEATURES + 4);
      low += weight * get_float(at + 4 * f);
      high += weight * get_float(at + 4 * f + 4);
    }
    const float share = sum > 0 ? 1.0f / sum : 0.0f;  // zeros where all is masked
    lanes::store32(p.out + ((head * QUERIES + r) * FEATURES + f) * 2, Element::pack(low * share, high * share));
  }
}
