// Stationary sums: dW[out, k] = sum over rows of dY[rows, out] X[rows, k], and db[out] = sum over rows of dY.
//
// A CTA keeps one block of dW in the registers of its consumer warpgroups while its share of the rows streams past through
// one ring of shared memory: 64 rows of both operands a slot. CTAs that hold the same block, over different rows, then leave
// their partial sums in memory, and each adds a part of the block: always in the order of the splits, so that the same input
// gives the same bits.
//
// Both operands lie [rows, features], and rows are what is summed: products take them by columns (MN-major descriptors).
// The bias gradient is one more product, with ones: a fragment of eight columns, all equal.
#pragma once
#include "roles.cuh"

namespace ts {

constexpr u32 ONES_BYTES = 1024;  // eight rows of a K-major operand
constexpr int LOADS = 16;         // of partial sums, under way at once in a thread
constexpr int STEPS = ROWS / 16;  // products a slot: instructions sum over 16 rows

// What the emitter knows of one sum. Its CTAs are splits x (parts of out) x (parts of k), the last one fastest.
struct Sum {
  int kind, first, ctas;
  int out, k, out_parts, k_parts, splits;
  int left, right;            // tensor maps of dY and X, or -1: rows that bulk copies cannot address,
  int left_rows, right_rows;  // which are read by pointer
  int weight, bias;           // pointers of dW and db; -1: no bias gradient
  int partials;               // where its partial results start, in fours of floats
};

// Which block and which rows a CTA has.
struct Share {
  Sum sum;
  int out0, k0, split;
  bool with_bias;
};

// What follows from a kind S: OUT_GROUPS x K_GROUPS warpgroups, each 64 columns of dY by CHUNKS x 64 columns of X.
template <class S>
struct Block {
  static constexpr int GROUPS = S::OUT_GROUPS * S::K_GROUPS;
  static constexpr int BLOCKS = 8 * S::CHUNKS;  // of eight columns, a warpgroup
  static constexpr int LEFT = S::OUT_GROUPS, RIGHT = S::K_GROUPS * S::CHUNKS;
  static constexpr u32 SLOT_BYTES = (LEFT + RIGHT) * CHUNK_BYTES;
  static constexpr int FOURS = GROUPS * BLOCKS * 128;        // accumulators of all lanes, by fours
  static constexpr int BIAS_FOURS = S::OUT_GROUPS * ROWS / 4;
  static constexpr int ALL_FOURS = FOURS + (S::BIAS ? BIAS_FOURS : 0);
  using Slots = Ring<S::SLOTS, SLOT_BYTES>;
};

template <class S>
TS_DEV Share share_of(const Sum& sum, int cta) {
  const int part = (cta - sum.first) % (sum.out_parts * sum.k_parts), k_part = part % sum.k_parts;
  return {sum, part / sum.k_parts * S::OUT_GROUPS * 64, k_part * Block<S>::RIGHT * 64,
          (cta - sum.first) / (sum.out_parts * sum.k_parts), S::BIAS && k_part == 0};
}

template <class T>
TS_DEV void fill_ones(u32 ones) {
  TS_LANES {
    for (u32 k = 0; k < ONES_BYTES; k += 512) sts32(ones + k + 4 * TS_LANE, T::pack(1.0f, 1.0f));
  }
  fence_async_shared();
}
template <class S>
TS_DEV void init_sum(u32 smem, int warp) {
  if (S::BIAS && warp < 4) fill_ones<typename S::T>(smem + S::ONES);
  if (!cta_leader()) return;
  for (int i = 0; i < S::SLOTS; ++i) {
    bar_init(smem + S::BARS + i * 16, 1);
    bar_init(smem + S::BARS + i * 16 + 8, 4 * Block<S>::GROUPS);  // arrivals: one a warp
  }
  bar_init_done();
}

// ---- rows in
// `chunks` chunks of one operand, from column `col` on. What lies outside of the matrix is zero, and adds nothing.
template <class T, bool BULK, class P>
TS_DEV void load_chunks(const P& p, u32 dst, u32 full, int map, int pointer, int features, int col, int chunks, int row, u64 hint) {
  for (int c = 0; c < chunks; ++c, dst += CHUNK_BYTES, col += 64) {
    if (BULK) {
      if (lane_in_warp() == 0) tma_load(dst, &p.maps[map], col, row, full, hint);
      continue;
    }
    const int left = features - col, cols = left < 0 ? 0 : left < 64 ? left : 64;
    load_odd_rows<T>(dst, p.pointers[pointer], features, (int)p.strides[pointer], row, p.rows, cols == 0 ? 0 : col, cols, 64, false);
    for (int r = (int)lane_in_warp() + (p.rows - row < ROWS ? p.rows - row : ROWS); r < ROWS; r += WARP)
      for (int i = 0; i < cols; ++i) Io<T>::store1(element_addr<T>(dst, (u32)r, (u32)i), 0.0f);
  }
}
template <class S, class P>
TS_DEV void load_rows(const P& p, u32 smem, const Share& at) {
  using B = Block<S>;
  using T = typename S::T;
  constexpr bool BULK = S::LEFT_BULK && S::RIGHT_BULK;
  constexpr u32 BULK_BYTES = ((S::LEFT_BULK ? B::LEFT : 0) + (S::RIGHT_BULK ? B::RIGHT : 0)) * CHUNK_BYTES;
  if (BULK && lane_in_warp() != 0) return;
  typename B::Slots ring(smem + S::BARS, smem + S::DATA);
  // Rows that CTAs of other blocks read too are to stay in the L2 until they have.
  const u64 left_hint = at.sum.k_parts > 1 ? EVICT_NORMAL : EVICT_FIRST, right_hint = at.sum.out_parts > 1 ? EVICT_NORMAL : EVICT_FIRST;
  const int tiles = (p.rows + ROWS - 1) / ROWS;
#pragma unroll 1
  for (int tile = at.split; tile < tiles; tile += at.sum.splits) {
    const u32 left = ring.addr(), right = left + B::LEFT * CHUNK_BYTES;
    ring.wait_empty();
    if (BULK) bar_expect(ring.full(), BULK_BYTES);
    if (!S::LEFT_BULK)
      load_chunks<T, false>(p, left, ring.full(), 0, at.sum.left_rows, at.sum.out, at.out0, B::LEFT, tile * ROWS, left_hint);
    if (!S::RIGHT_BULK)
      load_chunks<T, false>(p, right, ring.full(), 0, at.sum.right_rows, at.sum.k, at.k0, B::RIGHT, tile * ROWS, right_hint);
    if (!BULK) {
      fence_async_shared();
      sync_warp();
      if (lane_in_warp() == 0) bar_expect(ring.full(), BULK_BYTES);
    }
    if (S::LEFT_BULK)
      load_chunks<T, true>(p, left, ring.full(), at.sum.left, 0, at.sum.out, at.out0, B::LEFT, tile * ROWS, left_hint);
    if (S::RIGHT_BULK)
      load_chunks<T, true>(p, right, ring.full(), at.sum.right, 0, at.sum.k, at.k0, B::RIGHT, tile * ROWS, right_hint);
    if (!BULK) sync_warp();  // a lane that ran ahead would find the parity of a turn ago
    ring.advance();
  }
}

// ---- the sum
// acc += dY.T X and bias += dY.T 1 over this CTA's rows. Every CTA of a block of out sums its bias, and one will leave it:
// tensor cores wait for the L2 here, and two versions of the loop, one without bias, in a kernel of several kinds spilled.
template <class S, class P>
TS_DEV void sum_rows(const P& p, u32 smem, const Share& at, int g, Fragment<Block<S>::BLOCKS>& acc, Fragment<1>& bias) {
  using B = Block<S>;
  using T = typename S::T;
  const u32 left = (u32)(S::OUT_GROUPS == 2 ? g : 0) * CHUNK_BYTES;
  const u32 right = (u32)(B::LEFT + (S::K_GROUPS == 2 ? g * S::CHUNKS : 0)) * CHUNK_BYTES;
  typename B::Slots ring(smem + S::BARS, smem + S::DATA);
  const int tiles = (p.rows + ROWS - 1) / ROWS;
#pragma unroll 1
  for (int tile = at.split; tile < tiles; tile += at.sum.splits) {
    const u32 slot = ring.take();
    mma_fence();
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
      const u64 a = mma_desc_columns(slot + left + (u32)k * 2048, CHUNK_BYTES);
      MmaColumns<T, B::BLOCKS, true>::shared(acc, a, mma_desc_columns(slot + right + (u32)k * 2048, CHUNK_BYTES));
      if (S::BIAS) MmaColumns<T, 1, false>::shared(bias, a, mma_desc(smem + S::ONES));
    }
    mma_commit();
    ring.advance();
    mma_wait<1>();  // the products of the slot before are over
    if (tile != at.split) ring.release();
  }
  mma_wait<0>();
}

// ---- partial sums: a float for each accumulator, the fours of a lane side by side, lane by lane; then the bias by rows
TS_DEV float* place_of_four(float* partials, const Sum& sum, int part, int fours, int split, int four) {
  return partials + ((u64)sum.partials + ((u64)part * (u32)sum.splits + (u32)split) * (u32)fours + (u32)four) * 4;
}
template <class S>
TS_DEV void leave_partial(float* partials, const Share& at, int part, int g, const Fragment<Block<S>::BLOCKS>& acc,
                          const Fragment<1>& bias) {
  using B = Block<S>;
  const bool with_bias = at.with_bias && (S::OUT_GROUPS == 2 || g == 0);
  TS_LANES {
    const u64 to = (u64)place_of_four(partials, at.sum, part, B::ALL_FOURS, at.split, g * B::BLOCKS * 128 + (int)TS_LANE);
#pragma unroll
    for (int i = 0; i < B::BLOCKS; ++i)
      store_words(to + (u64)i * 2048, bits_of(TS_REG(acc, 4 * i)), bits_of(TS_REG(acc, 4 * i + 1)), bits_of(TS_REG(acc, 4 * i + 2)),
                  bits_of(TS_REG(acc, 4 * i + 3)));
    if (with_bias && (TS_LANE & 3) == 0) {
      float* column = place_of_four(partials, at.sum, part, B::ALL_FOURS, at.split, B::FOURS);
#pragma unroll
      for (int j = 0; j < 2; ++j) store_global(column + (S::OUT_GROUPS == 2 ? g : 0) * ROWS + row_of(TS_LANE, j), TS_REG(bias, 2 * j));
    }
  }
}

// ---- the sum of all partial sums
// Accumulators 4i to 4i + 3 of lane t of warpgroup g: two columns of two rows.
template <class S>
TS_DEV void write_weight(void* to, long long stride, const Share& at, int four, const float (&v)[4]) {
  using W = Io<typename S::W>;
  constexpr int A_GROUP = Block<S>::BLOCKS * 128;
  const int g = four / A_GROUP, i = four % A_GROUP / 128;
  const u32 t = (u32)(four % 128);
  const int col = at.k0 + (S::K_GROUPS == 2 ? g * S::CHUNKS * 64 : 0) + col_of(t, i);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int row = at.out0 + (S::OUT_GROUPS == 2 ? g * ROWS : 0) + row_of(t, j);
    if (row >= at.sum.out || col >= at.sum.k) continue;
    const u64 where = (u64)row * (u64)stride + (u64)col;
    if (col + 1 == at.sum.k)
      W::global1(to, where, v[2 * j]);
    else if (stride % 2 == 0)
      W::global2(to, where, v[2 * j], v[2 * j + 1]);
    else {
      W::global1(to, where, v[2 * j]);
      W::global1(to, where + 1, v[2 * j + 1]);
    }
  }
}
template <class S>
TS_DEV void write_bias(void* to, const Share& at, int four, const float (&v)[4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n)
    if (at.out0 + 4 * four + n < at.sum.out) Io<typename S::B>::global1(to, (u64)(at.out0 + 4 * four + n), v[n]);
}
// Each of the CTAs of a block adds, and writes, its part of the block: few fours of many splits, so that the latency of the
// L2 is what counts, and loads go out together.
template <class S, class P>
TS_DEV void add_partials(const P& p, const Share& at, int part, int g) {
  using B = Block<S>;
  const int fours = B::FOURS + (at.with_bias ? B::BIAS_FOURS : 0), splits = at.sum.splits;
  const int first = (int)((long long)fours * at.split / splits), last = (int)((long long)fours * (at.split + 1) / splits);
  TS_LANES {
    for (int four = first + g * 128 + (int)TS_LANE; four < last; four += 256) {
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      for (int s = 0; s < splits; s += LOADS) {
        float v[LOADS][4];
#pragma unroll
        for (int k = 0; k < LOADS; ++k)  // the last turn loads again what it does not add
          load_floats((u64)place_of_four(p.partials, at.sum, part, B::ALL_FOURS, s + k < splits ? s + k : s, four), v[k]);
#pragma unroll
        for (int k = 0; k < LOADS; ++k)
#pragma unroll
          for (int n = 0; n < 4; ++n) sum[n] = s + k < splits ? sum[n] + v[k][n] : sum[n];
      }
      if (four < B::FOURS)
        write_weight<S>(p.pointers[at.sum.weight], p.strides[at.sum.weight], at, four, sum);
      else
        write_bias<S>(p.pointers[at.sum.bias], at, four - B::FOURS, sum);
    }
  }
}

// A flag a CTA, raised by one in every launch: between launches all are equal. Nothing is reset, so that a captured launch
// can be replayed.
template <class S, class P>
TS_DEV void consume_sum(const P& p, const Sync& sync, u32 smem, const Share& at, int g) {
  using B = Block<S>;
  const int cta = cta_index(), parts = at.sum.out_parts * at.sum.k_parts, part = (cta - at.sum.first) % parts;
  u64* const mine = sync.flags + (u64)cta * LINE;
  const u64 launch = flag_acquire(mine) + 1;
  if (g < B::GROUPS) {
    Fragment<B::BLOCKS> acc;
    Fragment<1> bias;
    clear(acc);
    clear(bias);
    sum_rows<S>(p, smem, at, g, acc, bias);
    leave_partial<S>(p.partials, at, part, g, acc, bias);
  }
  sync_warp();
  named_sync(BOTH_GROUPS, 256);
  if (g == 0) {
    if (group_leader()) flag_release(mine, launch);
    TS_LANES {
      for (int s = (int)TS_LANE; s < at.sum.splits; s += 128) {
        const int peer = at.sum.first + s * parts + part;
        flag_wait(sync, peer, launch, cta, peer, 0);
      }
    }
  }
  sync_warp();
  named_sync(BOTH_GROUPS, 256);
  add_partials<S>(p, at, part, g);
}

}  // namespace ts
