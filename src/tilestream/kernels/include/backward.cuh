// Backward chains: dX from layer to layer, and every layer's dW = dY.T X and db = sum of dY, in one kernel.
//
// A warpgroup has tiles of 64 rows of its own. dY of a layer is the left operand, in registers, of the product with that
// layer's weight; the epilogue makes the next layer's dY of it, once more in registers, and in shared memory for the sum.
// dW of all layers stay in the accumulators of both warpgroups while the rows stream past. The input of a layer comes
// once: the sum reads it, and so does the slope of the activation that made it.
//
// When the rows are over, the warpgroups of a CTA add their sums, each those of half of the layers, and leave them in
// memory; each CTA then adds a part of all CTAs' sums: always in one order, so that the same input gives the same bits.
#pragma once
#include "roles.cuh"

namespace ts {

constexpr u32 ONES_BYTES = 1024;  // eight rows of a K-major operand
constexpr int STEPS = ROWS / 16;  // products a tile: instructions sum over 16 rows

// What follows from a chain S.
template <class S>
struct Chain {
  using Slots = Ring<S::SLOTS, CHUNK_BYTES>;
  static TS_DEV Slots ring(u32 smem, int g) {
    return Slots(smem + S::BARS + (u32)g * S::SLOTS * 16, smem + S::RING + (u32)g * S::SLOTS * CHUNK_BYTES);
  }
  static TS_DEV u32 weights_bar(u32 smem) { return smem + S::BARS + 2 * S::SLOTS * 16; }
  static TS_DEV u32 tile(u32 smem, int g, int which) { return smem + S::TILES + (u32)(g * S::GROUP_TILES + which) * CHUNK_BYTES; }
};

template <class S>
TS_DEV void init_chain(u32 smem, int warp) {
  if (S::BIAS && warp < 4) {
    TS_LANES {
      for (u32 k = 0; k < ONES_BYTES; k += 512) sts32(smem + S::ONES + k + 4 * TS_LANE, S::T::pack(1.0f, 1.0f));
    }
    fence_async_shared();
  }
  if (!cta_leader()) return;
  for (int i = 0; i < 2 * S::SLOTS; ++i) {
    bar_init(smem + S::BARS + i * 16, 1);
    bar_init(smem + S::BARS + i * 16 + 8, 4);  // arrivals: one a warp
  }
  bar_init(Chain<S>::weights_bar(smem), 1);
  bar_init_done();
}

TS_DEV int tiles_of(int rows) { return (rows + ROWS - 1) / ROWS; }

// What a slot of the ring is filled with: by a tensor map, or, where that is -1, from rows that bulk copies cannot address.
struct Stream {
  int map, pointer, features;
};
template <class T, class P>
TS_DEV void load_odd_tile(u32 dst, const P& p, const Stream& from, int tile) {
  const int row = tile * ROWS, left = p.rows - row < ROWS ? p.rows - row : ROWS;
  load_odd_rows<T>(dst, p.pointers[from.pointer], from.features, (int)p.strides[from.pointer], row, p.rows, 0, from.features, 64, false);
  for (int r = (int)lane_in_warp() + left; r < ROWS; r += WARP)
    for (int i = 0; i < from.features; ++i) Io<T>::store1(element_addr<T>(dst, (u32)r, (u32)i), 0.0f);
}

// ---- in: the weights once, then of each tile the last gradient, and each layer's input
template <class S, class P>
TS_DEV void load_chain(const P& p, u32 smem, int cta, int g) {
  const bool leads = lane_in_warp() == 0;
  if (!S::ODD && !leads) return;
  const int tiles = tiles_of(p.rows);
  if (leads && g == 0 && tiles > 0 && S::WEIGHTS > 0) {
    const u32 bar = Chain<S>::weights_bar(smem);
    bar_expect(bar, S::WEIGHTS * CHUNK_BYTES);
#pragma unroll 1
    for (int k = 0; k < S::WEIGHTS; ++k) tma_load(smem + (u32)k * CHUNK_BYTES, &p.maps[S::FIRST_WEIGHT + k], 0, 0, bar, EVICT_LAST);
  }
  auto ring = Chain<S>::ring(smem, g);
#pragma unroll 1
  for (int tile = 2 * cta + g; tile < tiles; tile += 2 * S::CTAS)
#pragma unroll 1
    for (int k = 0; k < S::STREAMS; ++k) {
      const Stream from = S::stream(k);
      ring.wait_empty();
      if (!S::ODD || from.map >= 0) {
        if (leads) bar_expect(ring.full(), CHUNK_BYTES);
        if (leads) tma_load(ring.addr(), &p.maps[from.map], 0, tile * ROWS, ring.full(), EVICT_FIRST);
      } else {
        load_odd_tile<typename S::T>(ring.addr(), p, from, tile);
        fence_async_shared();
        sync_warp();
        if (leads) bar_arrive(ring.full());
      }
      if (S::ODD) sync_warp();  // a lane that ran ahead would find the parity of a turn ago
      ring.advance();
    }
}

// ---- products; sixteen rows of an operand that lies [depth, columns] are 2048 bytes
constexpr u64 SIXTEEN_ROWS = 2048 >> 4;

// acc[64, 8 BLOCKS] += a w over 16 DEPTH columns of a; w[out, k] as it lies.
template <class T, int DEPTH, int BLOCKS>
TS_DEV void times_weight(Fragment<BLOCKS>& acc, const Packed<8>& a, u32 weight) {
  const u64 w = mma_desc_columns(weight, CHUNK_BYTES);
#pragma unroll
  for (int k = 0; k < DEPTH; ++k) MmaRows<T, BLOCKS>::registers(acc, a, 4 * k, w + SIXTEEN_ROWS * k);
}
// sum[64, 8 BLOCKS] += left.T right over 16 COUNT rows, those of a tile
template <class T, int COUNT = STEPS, int BLOCKS>
TS_DEV void add_tile(Fragment<BLOCKS>& sum, u32 left, u32 right) {
  const u64 a = mma_desc_columns(left, CHUNK_BYTES), b = mma_desc_columns(right, CHUNK_BYTES);
#pragma unroll
  for (int k = 0; k < COUNT; ++k) MmaColumns<T, BLOCKS, true>::shared(sum, a + SIXTEEN_ROWS * k, b + SIXTEEN_ROWS * k);
}
// The same times ones: eight equal columns of the sum of left's rows.
template <class T, int COUNT = STEPS>
TS_DEV void add_rows(Fragment<1>& sum, u32 left, u32 ones) {
  const u64 a = mma_desc_columns(left, CHUNK_BYTES), b = mma_desc(ones);
#pragma unroll
  for (int k = 0; k < COUNT; ++k) MmaColumns<T, 1, false>::shared(sum, a + SIXTEEN_ROWS * k, b);
}

// ---- sums of both warpgroups: each gives the other what that one adds
template <int BLOCKS>
TS_DEV void give(const Fragment<BLOCKS>& sum, u32 to) {
  TS_LANES {
    const u32 at = to + 16 * TS_LANE;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      sts64(at + (u32)i * 2048, TS_REG(sum, 4 * i), TS_REG(sum, 4 * i + 1));
      sts64(at + (u32)i * 2048 + 8, TS_REG(sum, 4 * i + 2), TS_REG(sum, 4 * i + 3));
    }
  }
}
// To the CTA's partial sums: the fours of a lane side by side, lane by lane.
template <int BLOCKS>
TS_DEV void leave(const Fragment<BLOCKS>& sum, u32 given, float* partials) {
  TS_LANES {
    const u64 to = (u64)(partials + 4 * TS_LANE);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      u32 v[4];
      lds_words(given + 16 * TS_LANE + (u32)i * 2048, v);
      store_words(to + (u64)i * 2048, bits_of(TS_REG(sum, 4 * i) + float_of(v[0])), bits_of(TS_REG(sum, 4 * i + 1) + float_of(v[1])),
                  bits_of(TS_REG(sum, 4 * i + 2) + float_of(v[2])), bits_of(TS_REG(sum, 4 * i + 3) + float_of(v[3])));
    }
  }
}

// ---- the sum of all CTAs
// Accumulators 4i to 4i + 3 of lane t of a sum: two columns of two rows. TURNED: rows are columns of X.
// ROW and COL: where the sum begins in dW, or turned.
template <class W, bool TURNED, int OUT, int K, int ROW = 0, int COL = 0>
TS_DEV void write_weight(void* to, long long stride, int four, const float (&v)[4]) {
  const u32 t = (u32)(four % 128);
  const int col = COL + col_of(t, four / 128);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int row = ROW + row_of(t, j);
    if (TURNED) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
        if (row < K && col + n < OUT) Io<W>::global1(to, (u64)(col + n) * (u64)stride + (u64)row, v[2 * j + n]);
    } else if (row < OUT && col < K) {
      const u64 where = (u64)row * (u64)stride + (u64)col;
      if (K % 2 == 0) {
        Io<W>::global2(to, where, v[2 * j], v[2 * j + 1]);
      } else {
        Io<W>::global1(to, where, v[2 * j]);
        if (col + 1 < K) Io<W>::global1(to, where + 1, v[2 * j + 1]);
      }
    }
  }
}
template <class W, int OUT, int ROW = 0>
TS_DEV void write_bias(void* to, int four, const float (&v)[4]) {
  const u32 t = (u32)(four % 128);
#pragma unroll
  for (int j = 0; j < 2; ++j)
    if ((t & 3) == 0 && ROW + row_of(t, j) < OUT) Io<W>::global1(to, (u64)(ROW + row_of(t, j)), v[2 * j]);
}
// Each CTA adds, and writes, its part. Few fours of many CTAs: the latency of the L2 is what counts, so that a four is added
// by several threads, whose loads go out together: WIDTH fours at once, SLICES threads each.
template <class S, class P>
TS_DEV void add_partials(const P& p, u32 smem, int cta, int g) {
  constexpr int WIDTH = S::WIDTH, SLICES = 256 / WIDTH, LOADS = (S::CTAS + SLICES - 1) / SLICES;
  const int first = (int)((long long)S::FOURS * cta / S::CTAS), last = (int)((long long)S::FOURS * (cta + 1) / S::CTAS);
  const u32 scratch = smem + S::RING;
#pragma unroll 1
  for (int at = first; at < last; at += WIDTH) {
    TS_LANES {
      const int thread = g * 128 + (int)TS_LANE, slice = thread / WIDTH, own = at + thread % WIDTH, four = own < last ? own : last - 1;
      float v[LOADS][4], sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int k = 0; k < LOADS; ++k) {  // the last turn loads again what it does not add
        const int s = slice + k * SLICES;
        load_floats((u64)(p.partials + ((u64)(s < S::CTAS ? s : 0) * S::FOURS + (u64)four) * 4), v[k]);
      }
#pragma unroll
      for (int k = 0; k < LOADS; ++k)
#pragma unroll
        for (int n = 0; n < 4; ++n) sum[n] = slice + k * SLICES < S::CTAS ? sum[n] + v[k][n] : sum[n];
      sts64(scratch + (u32)thread * 16, sum[0], sum[1]);
      sts64(scratch + (u32)thread * 16 + 8, sum[2], sum[3]);
    }
    named_sync(BOTH_GROUPS, 256);
    if (g == 0) {
      TS_LANES {
        const int four = at + (int)TS_LANE;
        if ((int)TS_LANE < WIDTH && four < last) {
          float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
          for (int s = 0; s < SLICES; ++s) {
            u32 v[4];
            lds_words(scratch + (u32)(s * WIDTH + (int)TS_LANE) * 16, v);
#pragma unroll
            for (int n = 0; n < 4; ++n) sum[n] += float_of(v[n]);
          }
          S::write(p, four, sum);
        }
      }
    }
    sync_warp();
    named_sync(BOTH_GROUPS, 256);
  }
}

// All CTAs have left their sums: a flag each, raised by one in every launch. Nothing is reset, so that a captured launch can
// be replayed. Stores of all threads come before the barrier, and that before the release. A warp of its own does it: with a
// trap behind the products ptxas gives these 168 registers, not what was asked for.
constexpr int LEFT = 4, MET = 5, MEMBERS = 256 + 32;

template <class S>
TS_DEV void meet(const Sync& sync, int cta) {
  u64* const mine = sync.flags + (u64)cta * LINE;
  const u64 launch = flag_acquire(mine) + 1;
  named_sync(LEFT, MEMBERS);
  if (lane_in_warp() == 0) flag_release(mine, launch);
  for (int peer = (int)lane_in_warp(); peer < S::CTAS; peer += WARP) flag_wait(sync, peer, launch, cta, peer, 0);
  sync_warp();
  named_arrive(MET, MEMBERS);
}

}  // namespace ts
