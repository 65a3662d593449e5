// Gradients of attention over few keys, of at most 16 * WARPS queries and keys, whose weights P are computed again:
//
//     dP = dY V.T     dS = P (dP - sum over keys of P dP)     dQ = scale dS K     dK = scale dS.T Q     dV = P.T dY
//
// A warp has 16 queries: their P and dS are in its registers, and so is dQ. Both go through shared memory, from where a warp has
// them turned, of 16 keys: its dK and dV. A CTA takes `each` sequences of a head after one another, `period` apart. What is added
// to their scores is the same, and its gradient, the sum of their dS, stays in registers if SUMMED: in the end a CTA writes its
// own, which somebody else adds to those of other CTAs.
//
// Compiled for what few_keys.cuh is, SUMMED, RESIDENT and BUFFERS, behind FewKeysGradientsParams (few_keys_gradients.py).
#pragma once
#include "few_keys.cuh"

constexpr int TILES = (QUERIES + 15) / 16;  // of queries
constexpr u32 QUERY_BYTES = 16 * TILES * ROW_BYTES;
constexpr u32 GIVEN_AT = QUERY_BYTES, KEYS_AT = 2 * QUERY_BYTES, VALUES_AT = KEYS_AT + KEY_BYTES, BUFFER_BYTES = VALUES_AT + KEY_BYTES;
constexpr u32 WEIGHT_ROW = 32 * KEY_STEPS + 16, WEIGHT_BYTES = 16 * TILES * WEIGHT_ROW;  // no conflicts: odd times 16 bytes
constexpr u32 WEIGHTS_AT = BUFFERS * BUFFER_BYTES, SCORES_AT = WEIGHTS_AT + WEIGHT_BYTES, STAGED_AT = SCORES_AT + WEIGHT_BYTES;
static_assert(TILES <= WARPS && KEY_STEPS <= WARPS);

using Params = FewKeysGradientsParams;

TS_DEV void load(const Params& p, u32 to, int batch, int head) {
  const auto at = [&](int k) { return p.from[k] + batch * p.batch_bytes[k] + head * p.head_bytes[k]; };
  load_rows<16 * TILES>(to, at(0), p.row_bytes[0], QUERIES);
  load_rows<16 * TILES>(to + GIVEN_AT, at(3), p.row_bytes[3], QUERIES);
  load_rows<KEY_ROWS>(to + KEYS_AT, at(1), p.row_bytes[1], KEYS);
  load_rows<KEY_ROWS>(to + VALUES_AT, at(2), p.row_bytes[2], KEYS);
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

// out[16 keys, FEATURES] = weights[queries, those keys].T @ rows[queries, FEATURES]
TS_DEV void turned(Tile& tile, u32 weights, u32 rows) {
  const int l = lanes::lane(), r = l % 8, m = l / 8;
#pragma unroll
  for (int f = 0; f < CHUNKS; ++f)
#pragma unroll
    for (int k = 0; k < 4; ++k) tile.out[f][k] = 0;
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

TS_LANES_KERNEL(THREADS, RESIDENT) tilestream_few_keys_gradients(const TS_PARAM FewKeysGradientsParams p) {
  TS_LANES_SHARED(smem);
  const int head = lanes::block() % p.heads, unit = lanes::block() / p.heads, group = unit % p.period, first = unit / p.period * p.each;
  const int last = first + p.each < p.turns ? first + p.each : p.turns, own = 16 * lanes::warp(), row = own + lanes::lane() / 4;
  const u32 staged = smem + STAGED_AT + own * ROW_BYTES;
  // `rows` of result k of a sequence, from its row `at` on.
  const auto store = [&](Tile& tile, int k, int batch, int at, int rows, float by) {
    lanes::together();  // what was staged before is away
    char* const to = p.to[k] + ((long long)batch * rows + at) * p.to_row_bytes[k] + head * ROW_BYTES;
    tile.store(staged, to, p.to_row_bytes[k], rows - at, [&](int) { return by; });
  };
  load(p, smem, group + first * p.period, head);
  float held[HELD ? KEY_BLOCKS : 1][4], sums[SUMMED ? KEY_BLOCKS : 1][4] = {};
  if constexpr (HELD) {
#pragma unroll
    for (int j = 0; j < KEY_BLOCKS; ++j) added_to(p, group, head, row, j, held[j]);
  }
#pragma unroll 1
  for (int turn = first; turn < last; ++turn) {
    const int batch = group + turn * p.period;
    const u32 here = smem + (turn - first) % BUFFERS * BUFFER_BYTES, next = smem + (turn + 1 - first) % BUFFERS * BUFFER_BYTES;
    lanes::copies_here();
    lanes::all_together();
    if (BUFFERS > 1 && turn + 1 < last) load(p, next, batch + p.period, head);
    if (own < QUERIES) {
      Tile weights, scores;
      weights.score(here + own * ROW_BYTES, here + KEYS_AT);
      weights.weigh(p.scale, [&](int j, float(&v)[4]) {
        if constexpr (HELD) {
#pragma unroll
          for (int k = 0; k < 4; ++k) v[k] = held[j][k];
        } else {
          added_to(p, group, head, row, j, v);
        }
      });
      scores.score(here + GIVEN_AT + own * ROW_BYTES, here + VALUES_AT);
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
      scores.weigh_values(here + KEYS_AT);
      store(scores, 0, batch, own, QUERIES, p.scale);
    }
    lanes::all_together();
    if (own < KEYS) {
      Tile tile;
      turned(tile, smem + SCORES_AT + 2 * own, here);
      store(tile, 1, batch, own, KEYS, p.scale);
      turned(tile, smem + WEIGHTS_AT + 2 * own, here + GIVEN_AT);
      store(tile, 2, batch, own, KEYS, 1.0f);
    }
  }
  if constexpr (SUMMED) {
    float* const to = p.sums + (long long)(unit * p.heads + head) * QUERIES * KEYS;
#pragma unroll
    for (int j = 0; j < KEY_BLOCKS; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int query = row + k / 2 * 8, key = 8 * j + lanes::lane() % 4 * 2 + k % 2;
        if (query < QUERIES && key < KEYS) to[query * KEYS + key] = sums[j][k];
      }
  }
}
