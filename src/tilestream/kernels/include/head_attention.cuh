// Attention over at most 272 keys by warpgroups: softmax(scale * Q K.T + what is added) V, where a head's keys and values lie
// whole in shared memory, and the scores of 64 queries whole in the registers of a warpgroup.
//
// Tiles of 64 queries are counted over all heads, and a CTA has some that follow each other: GROUPS consumers take them in turns,
// so that one multiplies while others are in their softmax. A producer brings what a CTA has of a head, BUFFERS of them at a time.
//
// Compiled for DTYPE, FEATURES (at most 64), QUERIES, KEYS, BUFFERS, GROUPS (two above 200 keys: ptxas has no registers for the
// scores of three), TERMS (that are added), PAIRED (two keys of them are a word) and SAFE, behind HeadAttentionParams.
#pragma once
#include "attention_tiles.cuh"

namespace ts {

using Params = ::HeadAttentionParams;
constexpr int LOADER = 4 * GROUPS, TURNS = GROUP_BARRIER + GROUPS;  // a named barrier for each group's turn to score
constexpr int KEY_BLOCKS = (KEYS + 7) / 8, KEY_STEPS = (KEYS + 15) / 16;
// Blocks of the first product, which has 256 columns at most, and of a second one for what is left.
constexpr int MOST_BLOCKS = 32, BLOCKS = KEY_BLOCKS < MOST_BLOCKS ? KEY_BLOCKS : MOST_BLOCKS, LEFT = KEY_BLOCKS - BLOCKS;
constexpr int TILES = (QUERIES + ROWS - 1) / ROWS;  // of a head
constexpr u32 KEYS_AT = TILES * CHUNK_BYTES, VALUE_BYTES = KEY_STEPS * 16 * 128, VALUES_AT = KEYS_AT + VALUE_BYTES;
constexpr u32 BUFFER_BYTES = VALUES_AT + VALUE_BYTES, BARS_AT = BUFFERS * BUFFER_BYTES;
// Registers: what the producer's warpgroup gives back of those that a CTA is launched with the others take.
constexpr int LAUNCHED = GROUPS == 3 ? 128 : 168, PRODUCER = 24, CONSUMER = GROUPS == 3 ? 160 : 240;
static_assert(PRODUCER + GROUPS * CONSUMER <= (1 + GROUPS) * LAUNCHED, "who asks for more waits for ever");
static_assert(FEATURES <= 64 && LEFT <= 2);

using Scores = Fragment<BLOCKS>;
using LastScores = Fragment<LEFT ? LEFT : 1>;
using HeadRing = Ring<BUFFERS, (int)BUFFER_BYTES>;
TS_DEV HeadRing head_ring(u32 smem) { return HeadRing(smem + BARS_AT, smem); }

// Which tiles are a CTA's, counted over all heads.
struct Share {
  int first, last;
};
TS_DEV Share share_of(const Params& p) {
  const int all = p.batches * p.heads * TILES, ctas = cta_count(), each = all / ctas, more = all % ctas, cta = cta_index();
  const int first = cta * each + (cta < more ? cta : more);
  return {first, first + each + (cta < more)};
}

// What a CTA has of the head that the tile `at` is of: tiles `from` up to `to`.
struct Part {
  int head, batch, from, to;
};
TS_DEV Part part_of(const Params& p, const Share& mine, int at) {
  const int unit = at / TILES, left = mine.last - unit * TILES;
  return {unit % p.heads, unit / p.heads, at % TILES, left < TILES ? left : TILES};
}

// Boxes of the map have at most 256 rows.
TS_DEV void load_keys(u32 to, const TensorMap* map, const Part& part, u32 bar) {
  constexpr int ROWS_A_BOX = (LEFT ? 8 : 16) * KEY_STEPS;
#pragma unroll 1
  for (int row = 0; row < 16 * KEY_STEPS; row += ROWS_A_BOX) tma_load_heads(to + 128 * row, map, 0, row, part.head, part.batch, bar);
}
TS_DEV void load_heads(const Params& p, const Share& mine, u32 smem) {
  auto ring = head_ring(smem);
#pragma unroll 1
  for (int at = mine.first; at < mine.last; ring.advance()) {
    const Part part = part_of(p, mine, at);
    ring.wait_empty();
    bar_expect(ring.full(), (part.to - part.from) * CHUNK_BYTES + 2 * VALUE_BYTES);
    load_keys(ring.addr() + KEYS_AT, &p.key, part, ring.full());
#pragma unroll 1
    for (int tile = part.from; tile < part.to; ++tile)
      tma_load_heads(ring.addr() + tile * CHUNK_BYTES, &p.query, 0, tile * ROWS, part.head, part.batch, ring.full());
    load_keys(ring.addr() + VALUES_AT, &p.value, part, ring.full());
    at += part.to - part.from;
  }
}

// The largest of a lane's scores of each row, `most` among them; those of keys that are not there are nothing.
template <int COUNT>
TS_DEV void largest(Fragment<COUNT>& s, int first, RowVector& most) {
  TS_LANES {
    const u32 t = TS_LANE;
    (void)t;
#pragma unroll
    for (int k = 4 * (COUNT - 1); k < 4 * COUNT; ++k)
      if (8 * (first + COUNT) > KEYS && 8 * first + col_of(t, COUNT - 1) + k % 2 >= KEYS) TS_REG(s, k) = nothing();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float here[2] = {TS_REG(most, j), TS_REG(s, 2 * j)};  // two at a time, which wait less for each other
#pragma unroll
      for (int k = 1; k < 2 * COUNT; ++k) here[k % 2] = max_nan(here[k % 2], TS_REG(s, k / 2 * 4 + 2 * j + k % 2));
      TS_REG(most, j) = max_nan(here[0], here[1]);
    }
  }
}
// Scores times the scale, and what is added to them: of a sequence that of its place in a period. A few blocks of keys at a time,
// so that not all are asked for before, with registers for all.
template <int COUNT>
TS_DEV void add_terms(const Params& p, const Part& part, Fragment<COUNT>& s, int first, int tile) {
  TS_LANES {
    const u32 t = TS_LANE;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if (i % 4 == 0) sync_warp();
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = tile * ROWS + row_of(t, j), query = row < QUERIES ? row : QUERIES - 1, key = 8 * first + col_of(t, i);
        const bool whole = 8 * (first + i) + 8 <= KEYS;
        float more[2] = {};
#pragma unroll
        for (int n = 0; n < TERMS; ++n) {
          const long long* const stride = p.added_bytes + 3 * n;  // of group, head, query
          const char* const at = p.added[n] + part.batch % p.period * stride[0] + part.head * stride[1] + query * stride[2];
          if (PAIRED && (whole || key < KEYS)) {
            const u32 both = *(const u32*)(at + 2 * key);
            more[0] += DTYPE::low(both), more[1] += DTYPE::high(both);
          }
#pragma unroll
          for (int k = 0; k < 2 && !PAIRED; ++k)
            if (whole || key + k < KEYS) more[k] += DTYPE::low(*(const u16*)(at + 2 * (key + k)));
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) TS_REG(s, 4 * i + 2 * j + k) = fma_(TS_REG(s, 4 * i + 2 * j + k), p.scale, more[k]);
      }
    }
  }
}
// Scores become weights, which `sum` gets. With terms they are scaled already, and are not multiplied before the largest is
// taken away: the lowest numbers of a mask times log2(e) are no number. A warp none of whose rows is a query has nothing to weigh.
template <int COUNT>
TS_DEV void weigh(Fragment<COUNT>& s, const RowVector& most, RowVector& sum, int rows, float scale) {
  TS_LANES {
    const u32 t = TS_LANE;
    if ((int)(t / 32 * 16) < rows) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float now = TS_REG(most, j) == nothing() ? 0.0f : TS_REG(most, j), from = now * scale;
        float all[2] = {TS_REG(sum, j), 0.0f};
#pragma unroll
        for (int k = 0; k < 2 * COUNT; ++k) {
          float& x = TS_REG(s, k / 2 * 4 + 2 * j + k % 2);
          x = TERMS ? exp_(x - now) : ex2(fma_(x, scale, -from));
          all[k % 2] += x;
        }
        TS_REG(sum, j) = all[0] + all[1];
      }
    }
  }
}
// Groups score one after another: all at once they would be done at the same time, and none would multiply while they are in
// their softmax. `first`: of a CTA's tiles; `last`.
TS_DEV void attend_tile(const Params& p, const Part& part, int tile, u32 buffer, int g, bool first, bool last) {
  const u32 query = buffer + tile * CHUNK_BYTES;
  Results out;
  RowVector most, sum;
  Scores s;
  LastScores left;
  Packed<2 * ((BLOCKS + 1) / 2)> weights;
  Packed<2> last_weights;
  if (!first) named_sync(TURNS + g, 256);
  score(s, query, buffer + KEYS_AT);
  if constexpr (LEFT > 0) score(left, query, buffer + KEYS_AT + BLOCKS * 8 * 128);
  mma_wait<0>();
  pin(s);
  if constexpr (LEFT > 0) pin(left);
  if (!last) named_arrive(TURNS + (g + 1) % GROUPS, 256);
  if constexpr (TERMS > 0) {
    add_terms(p, part, s, 0, tile);
    if constexpr (LEFT > 0) add_terms(p, part, left, BLOCKS, tile);
  }
  fill_rows(most, nothing());
  fill_rows(sum, 0.0f);
  largest(s, 0, most);
  if constexpr (LEFT > 0) largest(left, BLOCKS, most);
  row_max(most);
  weigh(s, most, sum, QUERIES - tile * ROWS, p.scale);
  if constexpr (LEFT > 0) weigh(left, most, sum, QUERIES - tile * ROWS, p.scale);
  pack_weights(weights, s);
  clear(out);
  pin(weights);
  if constexpr (LEFT > 0) {
    pack_weights(last_weights, left);
    pin(last_weights);
  }
  add_values(out, weights, buffer + VALUES_AT);
  if constexpr (LEFT > 0) add_values(out, last_weights, buffer + VALUES_AT + BLOCKS * 8 * 128);
  mma_wait<0>();
  pin(out);
  put_results(query, g, sum, out, SAFE);
  if (!group_leader()) return;
  tma_store_heads(&p.out, 0, tile * ROWS, part.head, part.batch, query);
  store_commit();
  store_wait_read<0>();
}
// Every group waits for every head, also where it has no tile of it: else it could take one turn of a slot for another.
TS_DEV void attend(const Params& p, const Share& mine, u32 smem, int g) {
  auto ring = head_ring(smem);
  int turn = g;  // tiles up to the group's next
#pragma unroll 1
  for (int at = mine.first; at < mine.last; ring.advance()) {
    const Part part = part_of(p, mine, at);
    const u32 buffer = ring.take();
#pragma unroll 1
    for (; turn < part.to - part.from; turn += GROUPS)
      attend_tile(p, part, part.from + turn, buffer, g, at + turn == mine.first, at + turn + 1 == mine.last);
    turn -= part.to - part.from;
    at += part.to - part.from;
    if (group_leader()) bar_arrive(ring.empty());
  }
}

TS_DEV void head_attention(const Params& p, u32 smem) {
  const int warp = warp_index();
  const Share mine = share_of(p);
  if (cta_leader()) {
    for (int i = 0; i < BUFFERS; ++i) {
      bar_init(smem + BARS_AT + 16 * i, 1);
      bar_init(smem + BARS_AT + 16 * i + 8, GROUPS);
    }
    bar_init_done();
  }
  sync_cta();
  if (warp < LOADER) {
    registers_inc<CONSUMER>();
    attend(p, mine, smem, warp / 4);
  } else {
    registers_dec<PRODUCER>();
    if (warp == LOADER && lane_in_warp() == 0) load_heads(p, mine, smem);
  }
}

}  // namespace ts

TS_RESIDENT_KERNEL(32 * (ts::LOADER + 4), 1) tilestream_head_attention(const TS_PARAM HeadAttentionParams p) {
  TS_SHARED(smem);
  ts::head_attention(p, smem);
}
