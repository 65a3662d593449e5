// Attention over at most 256 keys: softmax(scale * Q K.T + what is added) V.
//
// A CTA has TILES tiles of 16 queries of a head, a warp a tile. It takes `each` sequences after one another, `period` apart, those
// with the same bias and mask, which stay in registers if HELD: with BUFFERS of 2; the next one comes while one is worked on.
// Results leave by tokens, as the next layer reads them.
//
// Compiled for what few_keys.cuh is, TILES a CTA, SPLITS of a head's queries, RESIDENT and BUFFERS, behind ShortAttentionParams
// (short_attention.py).
#pragma once
#include "few_keys.cuh"

constexpr int QUERY_ROWS = 16 * TILES;
constexpr u32 KEYS_AT = QUERY_ROWS * ROW_BYTES, VALUES_AT = KEYS_AT + KEY_BYTES, BUFFER_BYTES = VALUES_AT + KEY_BYTES;

using Params = ShortAttentionParams;

TS_DEV void load(const Params& p, u32 to, int batch, int head, int first) {
  const char* const from[3] = {p.query + (long long)first * p.row_bytes[0], p.key, p.value};
  const auto at = [&](int k) { return from[k] + batch * p.batch_bytes[k] + head * p.head_bytes[k]; };
  load_rows<QUERY_ROWS>(to, at(0), p.row_bytes[0], QUERIES - first);
  load_rows<KEY_ROWS>(to + KEYS_AT, at(1), p.row_bytes[1], KEYS);
  load_rows<KEY_ROWS>(to + VALUES_AT, at(2), p.row_bytes[2], KEYS);
}

TS_LANES_KERNEL(THREADS, RESIDENT) tilestream_short_attention(const TS_PARAM ShortAttentionParams p) {
  TS_LANES_SHARED(smem);
  const int split = lanes::block() % SPLITS, head = lanes::block() / SPLITS % p.heads, unit = lanes::block() / SPLITS / p.heads;
  const int group = unit % p.period, first = unit / p.period * p.each;
  const int last = first + p.each < p.turns ? first + p.each : p.turns, query = split * QUERY_ROWS;
  const long long row_bytes = (long long)p.heads * ROW_BYTES;
  load(p, smem, group + first * p.period, head, query);
  float held[HELD ? KEY_BLOCKS : 1][4];
  if constexpr (HELD) {
#pragma unroll
    for (int j = 0; j < KEY_BLOCKS; ++j) added_to(p, group, head, query + 16 * lanes::warp() + lanes::lane() / 4, j, held[j]);
  }
#pragma unroll 1
  for (int turn = first; turn < last; ++turn) {
    const int batch = group + turn * p.period;
    const u32 here = smem + (turn - first) % BUFFERS * BUFFER_BYTES, next = smem + (turn + 1 - first) % BUFFERS * BUFFER_BYTES;
    lanes::copies_here();
    lanes::all_together();
    if (BUFFERS > 1 && turn + 1 < last) load(p, next, batch + p.period, head, query);
#pragma unroll 1
    for (int t = lanes::warp(); t < TILES; t += WARPS) {
      const int row = query + 16 * t;
      const u32 mine = here + 16 * t * ROW_BYTES;
      if (row >= QUERIES) break;
      Tile tile;
      tile.score(mine, here + KEYS_AT);
      tile.weigh(p.scale, [&](int j, float(&v)[4]) {
        if constexpr (HELD) {
#pragma unroll
          for (int k = 0; k < 4; ++k) v[k] = held[j][k];
        } else {
          added_to(p, group, head, row + lanes::lane() / 4, j, v);
        }
      });
      tile.weigh_values(here + VALUES_AT);
      char* const to = p.out + ((long long)batch * QUERIES + row) * row_bytes + head * ROW_BYTES;
      tile.store(mine, to, row_bytes, QUERIES - row, [&](int h) { return tile.over(h); });
    }
  }
}
