// Gradients of attention over few keys, whose weights P are computed again:
//
//     dP = dY V.T     dS = P (dP - sum over keys of P dP)     dQ = scale dS K     dK = scale dS.T Q     dV = P.T dY
//
// A warp has 16 queries: their P and dS are in its registers, and so is dQ. Both go through shared memory, from where a warp has
// them turned, of 16 keys: its dK and dV.
//
// A CTA takes `each` sequences of a head after one another, `period` apart. What is added to their scores is the same, and its
// gradient, the sum of their dS, stays in registers if SUMMED: in the end a CTA writes its own, which somebody else adds to those
// of other CTAs. If LONG, a head has more queries than warps have room for: a CTA takes `each` blocks of them after one another,
// over the same keys, and in the end writes its own dK and dV in fp32.
//
// Compiled for what few_keys.cuh is, SUMMED, LONG, RESIDENT and BUFFERS, behind FewKeysGradientsParams (few_keys_gradients.py).
#pragma once
#include "few_keys.cuh"

constexpr int TILES = LONG ? WARPS : (QUERIES + 15) / 16, ROWS = 16 * TILES;  // of queries at a time
constexpr int SPANS = (QUERIES + ROWS - 1) / ROWS;                            // of so many, in a head
constexpr u32 QUERY_BYTES = ROWS * ROW_BYTES, GIVEN_AT = QUERY_BYTES, PAIR_BYTES = 2 * QUERY_BYTES;
constexpr u32 BUFFER_BYTES = PAIR_BYTES + (LONG ? 0 : 2 * KEY_BYTES), KEPT_AT = BUFFERS * BUFFER_BYTES;
constexpr u32 WEIGHT_ROW = 32 * KEY_STEPS + 16, WEIGHT_BYTES = ROWS * WEIGHT_ROW;  // no conflicts: odd times 16 bytes
constexpr u32 WEIGHTS_AT = KEPT_AT + (LONG ? 2 * KEY_BYTES : 0), SCORES_AT = WEIGHTS_AT + WEIGHT_BYTES;
constexpr u32 STAGED_AT = SCORES_AT + WEIGHT_BYTES;
static_assert(TILES <= WARPS && KEY_STEPS <= WARPS && !(LONG && (HELD || SUMMED)));

using Params = FewKeysGradientsParams;

TS_DEV const char* head_of(const Params& p, int k, int batch, int head) {
  return p.from[k] + batch * p.batch_bytes[k] + head * p.head_bytes[k];
}
TS_DEV void load_keys(const Params& p, u32 to, int batch, int head) {
  load_rows<KEY_ROWS>(to, head_of(p, 1, batch, head), p.row_bytes[1], KEYS);
  load_rows<KEY_ROWS>(to + KEY_BYTES, head_of(p, 2, batch, head), p.row_bytes[2], KEYS);
}
// What is new: of the next sequence all, or queries from `first` on and the gradients of their results.
TS_DEV void load(const Params& p, u32 to, int batch, int head, int first) {
  load_rows<ROWS>(to, head_of(p, 0, batch, head) + first * (long long)p.row_bytes[0], p.row_bytes[0], QUERIES - first);
  load_rows<ROWS>(to + GIVEN_AT, head_of(p, 3, batch, head) + first * (long long)p.row_bytes[3], p.row_bytes[3], QUERIES - first);
  if (!LONG) load_keys(p, to + PAIR_BYTES, batch, head);
}

// Of a lane's two rows of 16 x keys, in the weights' place of a warp's queries.
TS_DEV void put(u32 rows, const float (&v)[KEY_BLOCKS][4]) {
  const u32 at = rows + lanes::lane() / 4 * WEIGHT_ROW + lanes::lane() % 4 * 4;
#pragma unroll
  for (int j = 0; j < 2 * KEY_STEPS; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      lanes::put32(at + 8 * h * WEIGHT_ROW + 16 * j, j < KEY_BLOCKS ? Element::pack(v[j][2 * h], v[j][2 * h + 1]) : 0u);
}

// out[16 keys, FEATURES] += weights[queries, those keys].T @ rows[queries, FEATURES]
TS_DEV void turned(Tile& tile, u32 weights, u32 rows) {
  const int l = lanes::lane(), r = l % 8, m = l / 8;
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    u32 a[4];
    lanes::matrices_turned(a, weights + (16 * t + m / 2 * 8 + r) * WEIGHT_ROW + m % 2 * 16);
#pragma unroll
    for (int f = 0; f < FEATURE_STEPS; ++f) {
      u32 both[4];
      lanes::matrices_turned(both, rows + 16 * t * ROW_BYTES + chunk_at(m % 2 * 8 + r, 2 * f + m / 2));
      lanes::product<Element>(tile.out[2 * f], a, both[0], both[1]);
      lanes::product<Element>(tile.out[2 * f + 1], a, both[2], both[3]);
    }
  }
}

TS_DEV void clear(Tile& tile) {
#pragma unroll
  for (int f = 0; f < CHUNKS; ++f)
#pragma unroll
    for (int k = 0; k < 4; ++k) tile.out[f][k] = 0;
}

TS_LANES_KERNEL(THREADS, RESIDENT) tilestream_few_keys_gradients(const TS_PARAM FewKeysGradientsParams p) {
  TS_LANES_SHARED(smem);
  const int head = lanes::block() % p.heads, unit = lanes::block() / p.heads, own = 16 * lanes::warp();
  const int groups = LONG ? p.period * p.turns : p.period, group = unit % groups, first = unit / groups * p.each;
  const int all = LONG ? SPANS : p.turns, last = first + p.each < all ? first + p.each : all;
  const auto batch_of = [&](int turn) { return LONG ? group : group + turn * p.period; };
  const auto query_of = [&](int turn) { return LONG ? turn * ROWS : 0; };
  const u32 staged = smem + STAGED_AT + own * ROW_BYTES;
  // `rows` of result k of a sequence, from its row `at` on.
  const auto store = [&](Tile& tile, int k, int batch, int at, int rows, float by) {
    lanes::together();  // what was staged before is away
    char* const to = p.to[k] + ((long long)batch * rows + at) * p.to_row_bytes[k] + head * ROW_BYTES;
    tile.store(staged, to, p.to_row_bytes[k], rows - at, [&](int) { return by; });
  };
  load(p, smem, batch_of(first), head, query_of(first));
  if (LONG) load_keys(p, smem + KEPT_AT, group, head);
  float held[HELD ? KEY_BLOCKS : 1][4], sums[SUMMED ? KEY_BLOCKS : 1][4] = {};
  if constexpr (HELD) {
#pragma unroll
    for (int j = 0; j < KEY_BLOCKS; ++j) added_to(p, group, head, own + lanes::lane() / 4, j, held[j]);
  }
  Tile by_key, by_value;  // what becomes dK and dV
  if (LONG) clear(by_key), clear(by_value);
#pragma unroll 1
  for (int turn = first; turn < last; ++turn) {
    const int batch = batch_of(turn), query = query_of(turn) + own;
    const u32 here = smem + (turn - first) % BUFFERS * BUFFER_BYTES, next = smem + (turn + 1 - first) % BUFFERS * BUFFER_BYTES;
    const u32 keys = LONG ? smem + KEPT_AT : here + PAIR_BYTES;
    lanes::copies_here();
    lanes::all_together();
    if (BUFFERS > 1 && turn + 1 < last) load(p, next, batch_of(turn + 1), head, query_of(turn + 1));
    if (LONG || own < QUERIES) {  // rows beyond the last are zeros, and so are their gradients
      Tile weights, scores;
      weights.score(here + own * ROW_BYTES, keys);
      weights.weigh(p.scale, [&](int j, float(&v)[4]) {
        if constexpr (HELD) {
#pragma unroll
          for (int k = 0; k < 4; ++k) v[k] = held[j][k];
        } else {
          added_to(p, group % p.period, head, query + lanes::lane() / 4, j, v);
        }
      });
      scores.score(here + GIVEN_AT + own * ROW_BYTES, keys + KEY_BYTES);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float over = weights.over(h);
        float both[2] = {};
#pragma unroll
        for (int j = 0; j < KEY_BLOCKS; ++j)
#pragma unroll
          for (int k = 2 * h; k < 2 * h + 2; ++k) {
            weights.scores[j][k] *= over;
            both[k % 2] += weights.scores[j][k] * scores.scores[j][k];
          }
        const float mean = scores.of_row(both[0] + both[1], false);
#pragma unroll
        for (int j = 0; j < KEY_BLOCKS; ++j)
#pragma unroll
          for (int k = 2 * h; k < 2 * h + 2; ++k) {
            scores.scores[j][k] = weights.scores[j][k] * (scores.scores[j][k] - mean);
            if constexpr (SUMMED) sums[j][k] += scores.scores[j][k];
          }
      }
      put(smem + WEIGHTS_AT + own * WEIGHT_ROW, weights.scores);
      put(smem + SCORES_AT + own * WEIGHT_ROW, scores.scores);
      scores.weigh_values(keys);
      store(scores, 0, batch, query, QUERIES, p.scale);
    }
    lanes::all_together();
    if (own < KEYS) {
      if (!LONG) clear(by_key), clear(by_value);
      turned(by_key, smem + SCORES_AT + 2 * own, here);
      if (!LONG) store(by_key, 1, batch, own, KEYS, p.scale);
      turned(by_value, smem + WEIGHTS_AT + 2 * own, here + GIVEN_AT);
      if (!LONG) store(by_value, 2, batch, own, KEYS, 1.0f);
    }
  }
  const int row = own + lanes::lane() / 4, column = lanes::lane() % 4 * 2;
  if constexpr (SUMMED) {
    float* const to = p.sums + (long long)(unit * p.heads + head) * QUERIES * KEYS;
#pragma unroll
    for (int j = 0; j < KEY_BLOCKS; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int query = row + k / 2 * 8, key = 8 * j + column + k % 2;
        if (query < QUERIES && key < KEYS) to[query * KEYS + key] = sums[j][k];
      }
  }
  if constexpr (LONG) {
    float* const to = p.sums + ((long long)unit * KEYS * 2 * p.heads + head) * FEATURES;
#pragma unroll
    for (int f = 0; f < CHUNKS; ++f)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int key = row + k / 2 * 8, at = 8 * f + column + k % 2;
        if (key < KEYS) {
          to[(long long)key * 2 * p.heads * FEATURES + at] = by_key.out[f][k] * p.scale;
          to[(long long)(key * 2 + 1) * p.heads * FEATURES + at] = by_value.out[f][k];
        }
      }
  }
}
