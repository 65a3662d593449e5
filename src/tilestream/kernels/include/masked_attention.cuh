// Attention over some tiles of keys: softmax(scale * Q K.T, over the pairs that a mask keeps) V.
//
// A CTA has 128 queries of a head, two consumer warpgroups of 64. Its tiles of 64 keys come through one ring, those that either
// warpgroup has a pair in; a warpgroup passes over the other's tiles. Which these are mask_tiles.cuh says, or, in a BAND, where a
// query stands: it keeps the keys from `before` in front of it to `after` behind it. If SPLIT, a CTA of a band has 64 queries, and
// its warpgroups have every other tile of keys: what they made of them is joined at the end. The running maximum and sum are
// Milakov and Gimelshein's, "Online normalizer calculation for softmax" (2018), their use with tiles Dao's (FlashAttention, 2022).
//
// Queries stay in shared memory: in registers ptxas of CUDA 13.0 packs the weights over them (tests/lib/sass.py has the rule).
#pragma once
#include "attention_tiles.cuh"

namespace ts {

using Params = ::MaskedAttentionParams;
constexpr int HEADS = 16;
constexpr int KEYS = 64, KEY_BLOCKS = KEYS / 8, GROUPS = 2, LOADER = 4 * GROUPS;
constexpr u32 OPERAND_BYTES = CHUNKS * CHUNK_BYTES, STAGE_BYTES = 2 * OPERAND_BYTES;  // keys, and values behind them
// Shared memory: queries (later results), stages, barriers of the ring and of the queries, what each stage is.
constexpr u32 STAGES_AT = GROUPS * OPERAND_BYTES, BARS_AT = STAGES_AT + STAGES * STAGE_BYTES, QUERY_BAR = BARS_AT + 16 * STAGES;
constexpr u32 ENTRIES_AT = QUERY_BAR + 16, JOINED_AT = (ENTRIES_AT + 4 * STAGES + 127) / 128 * 128;
constexpr int OWN = SPLIT ? 1 : GROUPS;  // tiles of queries
static_assert(BAND || !SPLIT, "lists are those of 128 queries");

// Registers: what the producer's warpgroup gives back of those that a CTA is launched with the others take.
constexpr int LAUNCHED = RESIDENT == 2 ? 80 : 168, PRODUCER = 24, CONSUMER = RESIDENT == 2 ? 104 : 240;
static_assert(PRODUCER + GROUPS * CONSUMER <= (1 + GROUPS) * LAUNCHED, "who asks for more waits for ever");

// Of a tile of 64 queries and 64 keys: no pair is kept, some are, all are.
enum State : u32 { NONE, SOME, ALL };
constexpr u32 END = ~0u;  // in the place of a stage's states: no tile follows

// What a CTA works on: 128 queries of a head, and which part of the mask is theirs.
struct Place {
  int tile, head, batch, unit;
};
// Heads by sixteens, whose keys stay in the L2: of those all that have the same queries are next to each other, since they have
// the same work to do, and the last queries come first, which look at most keys where a mask is causal.
TS_DEV Place place_of(const Params& p, int cta) {
  const int all = p.heads * p.batches, first = cta / (HEADS * p.query_tiles) * HEADS;
  const int heads = all - first < HEADS ? all - first : HEADS, rest = cta - first * p.query_tiles;
  const int of_all = first + rest % heads, head = of_all % p.heads, batch = of_all / p.heads;
  return {p.query_tiles - 1 - rest / heads, head, batch, batch * p.mask_batch + head * p.mask_head};
}
// Which row of tiles the queries of warpgroup g are, among all of a mask.
TS_DEV u64 mask_row(const Params& p, const Place& at, int g) { return ((u64)at.unit * p.query_tiles + at.tile) * GROUPS + g; }
TS_DEV int first_query(const Place& at, int g) { return (at.tile * OWN + g % OWN) * ROWS; }

using TileRing = Ring<STAGES, (int)STAGE_BYTES>;
TS_DEV TileRing tile_ring(u32 smem) { return TileRing(smem + BARS_AT, smem + STAGES_AT); }

// ---- the producer: one warp
TS_DEV void load_queries(const Params& p, const Place& at, u32 smem) {
  bar_expect(smem + QUERY_BAR, OWN * OPERAND_BYTES);
  for (int g = 0; g < OWN; ++g)
    for (int c = 0; c < CHUNKS; ++c)
      tma_load_heads(smem + g * OPERAND_BYTES + c * CHUNK_BYTES, &p.query, 64 * c, first_query(at, g), at.head, at.batch, smem + QUERY_BAR);
}
TS_DEV void load_tile(const Params& p, const Place& at, u32 smem, TileRing& ring, int tile, u32 states) {
  const int head = at.head / p.heads_a_key;
  ring.wait_empty();
  sts32(smem + ENTRIES_AT + 4 * ring.slot, states | (u32)tile << 4);
  bar_expect(ring.full(), STAGE_BYTES);
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
    tma_load_heads(ring.addr() + c * CHUNK_BYTES, &p.key, 64 * c, tile * KEYS, head, at.batch, ring.full());
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
    tma_load_heads(ring.addr() + OPERAND_BYTES + c * CHUNK_BYTES, &p.value, 64 * c, tile * KEYS, head, at.batch, ring.full());
  ring.advance();
}
TS_DEV void load_end(u32 smem, TileRing& ring) {
  ring.wait_empty();
  sts32(smem + ENTRIES_AT + 4 * ring.slot, END);
  bar_arrive(ring.full());
}
// Of 64 queries and 64 keys of a band.
TS_DEV u32 band_state(const Params& p, int query, int key) {
  const int last_query = query + ROWS - 1, last_key = key + KEYS - 1;
  if (key > last_query + p.after || last_key < query - p.before) return NONE;
  return last_key <= query + p.after && key >= last_query - p.before && last_key < p.keys ? ALL : SOME;
}
TS_DEV void load_band(const Params& p, const Place& at, u32 smem) {
  const int query = first_query(at, 0), front = query - p.before, behind = query + OWN * ROWS + p.after;
  const int end = behind < p.keys ? behind : p.keys;
  auto ring = tile_ring(smem);
  load_queries(p, at, smem);
#pragma unroll 1
  for (int tile = front > 0 ? front / KEYS : 0; tile * KEYS < end; ++tile) {
    const u32 own = band_state(p, query, tile * KEYS);
    load_tile(p, at, smem, ring, tile, SPLIT ? own << 2 * (tile % GROUPS) : own | band_state(p, query + ROWS, tile * KEYS) << 2);
  }
  load_end(smem, ring);
}
TS_DEV void load_tiles(const Params& p, const Place& at, u32 smem) {
  const bool leads = lane_in_warp() == 0;
  const int words = p.state_row / 4;
  const u32* states = (const u32*)(p.states + mask_row(p, at, 0) * p.state_row);  // both warpgroups', four a word
  auto ring = tile_ring(smem);
  auto word = [&](int k) { return k < words ? load_global(states + k) | load_global(states + words + k) << 2 : 0; };
  u32 next = word((int)lane_in_warp());
  if (leads) load_queries(p, at, smem);
#pragma unroll 1
  for (int k = 0; k < words; k += WARP) {
    const u32 mine = next;
    next = word(k + WARP + (int)lane_in_warp());
#pragma unroll 1
    for (u32 left = warp_vote(mine != 0); left != 0; left &= left - 1) {
      const int lane = lowest(left);
      u32 all = (u32)warp_value((int)mine, lane);  // of a tile four bits
#pragma unroll 1
      for (int tile = 4 * (k + lane); leads && all != 0; ++tile, all >>= 8)
        if (all & 15) load_tile(p, at, smem, ring, tile, all & 15);
    }
  }
  if (leads) load_end(smem, ring);
}

// ---- a consumer warpgroup
using Scores = Fragment<KEY_BLOCKS>;
using Weights = Packed<KEY_BLOCKS>;
using Kept = Registers<u32, 4>;  // bits of 64 keys for both rows of a lane

struct Running {
  RowVector most, sum;  // of scores; of a lane's own weights
};

TS_DEV u32 bits_below(int n) { return n <= 0 ? 0 : n < 32 ? (1u << n) - 1 : ~0u; }
// Of a tile: `rows` are its bits, and `query` and `key` its first.
TS_DEV void take_kept(const Params& p, Kept& kept, const u32* rows, int query, int key) {
  TS_LANES {
    const u32 t = TS_LANE;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (BAND) {
        const int from = key + 32 * (k % 2), at = query + row_of(t, k / 2), last = at + p.after < p.keys ? at + p.after : p.keys - 1;
        TS_REG(kept, k) = bits_below(last + 1 - from) & ~bits_below(at - p.before - from);
      } else {
        TS_REG(kept, k) = load_global(rows + 2 * row_of(t, k / 2) + k % 2);
      }
    }
  }
}
TS_DEV void drop_others(Scores& s, const Kept& kept) {
  TS_LANES {
    const u32 t = TS_LANE;
#pragma unroll
    for (int k = 0; k < 4 * KEY_BLOCKS; ++k) {
      const u32 word = TS_REG(kept, k % 4 / 2 * 2 + k / 16) >> (2 * (t & 3));
      if ((word >> (8 * (k / 4 % 4) + k % 2) & 1) == 0) TS_REG(s, k) = nothing();
    }
  }
}
// Scores become weights, in the scale of the running maximum; `before` brings to it what is known of former tiles.
TS_DEV void weigh(Scores& s, Running& run, RowVector& before, float scale) {
  RowVector most;
  TS_LANES {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float here[2] = {TS_REG(s, 2 * j), TS_REG(s, 2 * j + 1)};  // two at a time, which wait less for each other
#pragma unroll
      for (int k = 2; k < 2 * KEY_BLOCKS; ++k) here[k % 2] = max_nan(here[k % 2], TS_REG(s, k / 2 * 4 + 2 * j + k % 2));
      TS_REG(most, j) = max_nan(here[0], here[1]);
    }
  }
  row_max(most);
  TS_LANES {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float now = max_nan(TS_REG(run.most, j), TS_REG(most, j));
      const float from = now == nothing() ? 0.0f : now * scale;  // of a row of which nothing was kept yet
      TS_REG(before, j) = ex2(fma_(TS_REG(run.most, j), scale, -from));
      float sum[2] = {};
#pragma unroll
      for (int k = 0; k < 2 * KEY_BLOCKS; ++k) {
        float& x = TS_REG(s, k / 2 * 4 + 2 * j + k % 2);
        x = ex2(fma_(x, scale, -from));
        sum[k % 2] += x;
      }
      TS_REG(run.most, j) = now;
      TS_REG(run.sum, j) = fma_(TS_REG(run.sum, j), TS_REG(before, j), sum[0] + sum[1]);
    }
  }
}
TS_DEV void rescale(Results& out, const RowVector& before) {
  TS_LANES {
#pragma unroll
    for (int k = 0; k < 4 * FEATURE_BLOCKS; ++k) TS_REG(out, k) *= TS_REG(before, k % 4 / 2);
  }
}
TS_DEV void attend_tile(const Params& p, u32 query, Running& run, Results& out, u32 stage, const Kept& kept, bool all) {
  Scores s;
  Weights weights;
  RowVector before;
  score(s, query, stage);
  mma_wait<0>();
  pin(s);
  if (!all) drop_others(s, kept);
  weigh(s, run, before, p.scale);
  rescale(out, before);
  pack_weights(weights, s);
  pin(weights);
  pin(out);
  add_values(out, weights, stage + OPERAND_BYTES);
  mma_wait<0>();
  pin(out);
}
// What the last warpgroup made, through shared memory to the first: each lane has the same places in both.
TS_DEV void hand_over(u32 smem, const Running& run, const Results& out) {
  TS_LANES {
    const u32 to = smem + JOINED_AT + 4 * TS_LANE;
#pragma unroll
    for (int k = 0; k < 4 * FEATURE_BLOCKS; ++k) stsf(to + 512 * k, TS_REG(out, k));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      stsf(to + 512 * (4 * FEATURE_BLOCKS + j), TS_REG(run.most, j));
      stsf(to + 512 * (4 * FEATURE_BLOCKS + 2 + j), TS_REG(run.sum, j));
    }
  }
  named_arrive(BOTH_GROUPS, 128 * GROUPS);
}
TS_DEV void join(const Params& p, u32 smem, Running& run, Results& out) {
  named_sync(BOTH_GROUPS, 128 * GROUPS);
  TS_LANES {
    const u32 at = smem + JOINED_AT + 4 * TS_LANE;
    float mine[2], other[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float most = ldsf(at + 512 * (4 * FEATURE_BLOCKS + j)), now = max_nan(TS_REG(run.most, j), most);
      const float from = now == nothing() ? 0.0f : now * p.scale;
      mine[j] = ex2(fma_(TS_REG(run.most, j), p.scale, -from));
      other[j] = ex2(fma_(most, p.scale, -from));
      TS_REG(run.sum, j) = fma_(TS_REG(run.sum, j), mine[j], ldsf(at + 512 * (4 * FEATURE_BLOCKS + 2 + j)) * other[j]);
    }
#pragma unroll
    for (int k = 0; k < 4 * FEATURE_BLOCKS; ++k)
      TS_REG(out, k) = fma_(TS_REG(out, k), mine[k % 4 / 2], ldsf(at + 512 * k) * other[k % 4 / 2]);
  }
}
TS_DEV void store_results(const Params& p, const Place& at, u32 smem, int g, Running& run, Results& out) {
  const u32 mine = smem + g * OPERAND_BYTES;
  put_results(mine, g, run.sum, out);
  if (!group_leader()) return;
  for (int c = 0; c < CHUNKS; ++c) {
    tma_store_heads(&p.out, 64 * c, first_query(at, g), at.head, at.batch, mine + c * CHUNK_BYTES);
    store_commit();
  }
  store_wait_read<0>();
}
TS_DEV void attend(const Params& p, const Place& at, u32 smem, int g) {
  auto ring = tile_ring(smem);
  const u32 query = smem + g % OWN * OPERAND_BYTES;
  const u32* bits = (const u32*)p.bits + mask_row(p, at, g) * p.state_row * (2 * ROWS);
  Results out;
  Running run;
  clear(out);
  fill_rows(run.most, nothing());
  fill_rows(run.sum, 0.0f);
  bar_wait(smem + QUERY_BAR, 0);
#pragma unroll 1
  for (;;) {
    const u32 stage = ring.take();
    const u32 entry = (u32)warp_value((int)lds32(smem + ENTRIES_AT + 4 * ring.slot), 0);
    if (entry == END) break;
    const u32 state = entry >> (2 * g) & 3;
    if (state != NONE) {
      Kept kept;
      if (state != ALL) take_kept(p, kept, bits + (entry >> 4) * (2 * ROWS), first_query(at, g), (int)(entry >> 4) * KEYS);
      attend_tile(p, query, run, out, stage, kept, state == ALL);
    }
    ring.release();
    ring.advance();
  }
  if (SPLIT && g != 0) return hand_over(smem, run, out);
  if (SPLIT) join(p, smem, run, out);
  store_results(p, at, smem, g, run, out);
}

TS_DEV void masked_attention(const Params& p, u32 smem) {
  const int warp = warp_index();
  const Place at = place_of(p, cta_index());
  if (cta_leader()) {
    for (int i = 0; i < STAGES; ++i) {
      bar_init(smem + BARS_AT + 16 * i, 1);
      bar_init(smem + BARS_AT + 16 * i + 8, 4 * GROUPS);  // one a warp
    }
    bar_init(smem + QUERY_BAR, 1);
    bar_init_done();
  }
  sync_cta();
  if (warp < LOADER) {
    registers_inc<CONSUMER>();
    attend(p, at, smem, warp / 4);
  } else {
    registers_dec<PRODUCER>();
    if (warp == LOADER && !BAND) load_tiles(p, at, smem);
    if (warp == LOADER && BAND && lane_in_warp() == 0) load_band(p, at, smem);
  }
}

}  // namespace ts

TS_RESIDENT_KERNEL(32 * (ts::LOADER + 4), RESIDENT) tilestream_masked_attention(const TS_PARAM MaskedAttentionParams p) {
  TS_SHARED(smem);
  ts::masked_attention(p, smem);
}
