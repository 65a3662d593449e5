// Backward chains of layers up to 128 wide. What differs from backward.cuh: a warpgroup has 64 rows of dX, and of dW 64 rows
// too, summed over the rows of both, so that one layer's sums are half as many registers. Both read each other's gradients,
// from shared memory, and meet behind each layer; columns go by chunks of 64.
//
// The ring is the CTA's: a slot is 128 rows of one chunk, the first warpgroup's 64 and the second's behind them.
#pragma once
#include "backward.cuh"

namespace ts {

constexpr u32 SLOT_BYTES = 2 * CHUNK_BYTES;
constexpr int PAIR_ROWS = 2 * ROWS, PAIR_STEPS = PAIR_ROWS / 16;

// What a slot of the ring is filled with, or a box of weights.
struct Box {
  int map, column, row;
};

// What follows from a chain S.
template <class S>
struct Wide {
  using Slots = Ring<S::SLOTS, SLOT_BYTES>;
  static TS_DEV Slots ring(u32 smem) { return Slots(smem + S::BARS, smem + S::RING); }
  static TS_DEV u32 weights_bar(u32 smem) { return smem + S::BARS + S::SLOTS * 16; }
  static TS_DEV u32 tile(u32 smem, int which, int chunk) { return smem + S::TILES + (u32)(which * S::TILE_CHUNKS + chunk) * SLOT_BYTES; }
};

template <class S>
TS_DEV void init_wide(u32 smem, int warp) {
  if (S::BIAS && warp < 4) {
    TS_LANES {
      for (u32 k = 0; k < ONES_BYTES; k += 512) sts32(smem + S::ONES + k + 4 * TS_LANE, S::T::pack(1.0f, 1.0f));
    }
    fence_async_shared();
  }
  if (!cta_leader()) return;
  for (int i = 0; i < S::SLOTS; ++i) {
    bar_init(smem + S::BARS + i * 16, 1);
    bar_init(smem + S::BARS + i * 16 + 8, 8);  // arrivals: one a warp of either group
  }
  bar_init(Wide<S>::weights_bar(smem), 1);
  bar_init_done();
}

TS_DEV int pairs_of(int rows) { return (rows + PAIR_ROWS - 1) / PAIR_ROWS; }

// ---- in: the weights once, then of each pair of tiles the last gradient, and each layer's input
template <class S, class P>
TS_DEV void load_wide(const P& p, u32 smem, int cta) {
  if (lane_in_warp() != 0) return;
  const int pairs = pairs_of(p.rows);
  if (cta < pairs && S::WEIGHTS > 0) {
    const u32 bar = Wide<S>::weights_bar(smem);
    bar_expect(bar, S::WEIGHTS * CHUNK_BYTES);
#pragma unroll 1
    for (int k = 0; k < S::WEIGHTS; ++k) {
      const Box box = S::weight(k);
      tma_load(smem + (u32)k * CHUNK_BYTES, &p.maps[box.map], box.column, box.row, bar, EVICT_LAST);
    }
  }
  auto ring = Wide<S>::ring(smem);
#pragma unroll 1
  for (int pair = cta; pair < pairs; pair += S::CTAS)
#pragma unroll 1
    for (int k = 0; k < S::LOADS; ++k) {
      const Box box = S::load(k);
      ring.wait_empty();
      bar_expect(ring.full(), SLOT_BYTES);
#pragma unroll
      for (int g = 0; g < 2; ++g)
        tma_load(ring.addr() + (u32)g * CHUNK_BYTES, &p.maps[box.map], box.column, pair * PAIR_ROWS + g * ROWS, ring.full(), EVICT_FIRST);
      ring.advance();
    }
}

// ---- products
// acc[64, 64] += a w over 16 DEPTH columns of a, this warpgroup's rows of one chunk or two; w[out, 64] as it lies.
template <class T, int DEPTH>
TS_DEV void times_weight(Fragment<8>& acc, u32 first, u32 second, u32 weight) {
  const u64 w = mma_desc_columns(weight, CHUNK_BYTES);
#pragma unroll
  for (int k = 0; k < DEPTH; ++k) MmaMixed<T, 8>::shared(acc, mma_desc(k < 4 ? first : second) + 2 * (k % 4), w + SIXTEEN_ROWS * k);
}
// sum[64, 8 BLOCKS] += left.T right over the rows of both tiles
template <class T, int BLOCKS>
TS_DEV void add_pair(Fragment<BLOCKS>& sum, u32 left, u32 right) {
  add_tile<T, PAIR_STEPS>(sum, left, right);
}
// The same times ones: eight equal columns of the sum of left's rows.
template <class T>
TS_DEV void add_pair_rows(Fragment<1>& sum, u32 left, u32 ones) {
  add_rows<T, PAIR_STEPS>(sum, left, ones);
}

// To the CTA's partial sums: the fours of a lane side by side, lane by lane.
template <int BLOCKS>
TS_DEV void leave_own(const Fragment<BLOCKS>& sum, float* partials) {
  TS_LANES {
    const u64 to = (u64)(partials + 4 * TS_LANE);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
      store_words(to + (u64)i * 2048, bits_of(TS_REG(sum, 4 * i)), bits_of(TS_REG(sum, 4 * i + 1)), bits_of(TS_REG(sum, 4 * i + 2)),
                  bits_of(TS_REG(sum, 4 * i + 3)));
  }
}

}  // namespace ts
