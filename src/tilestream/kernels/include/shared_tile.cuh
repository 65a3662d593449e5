// A feed-forward block on few rows, over the whole grid. CTA (r, g, s) multiplies row tile r with its columns of the
// first layer, hands them to its group g, and multiplies the group's part of the middle with its columns s of the second;
// what the groups have is added by the kernel's tail. K has the shape, Params the operands (product.cu.j2).
//
// One layer (K::FIRSTS == 0) is the second half of it: group g sums over its part of the input's columns, and a CTA has columns
// of each of several results, side by side.
//
// What stands in front of the first layer, a norm, is done once: each CTA takes some rows of the tile and leaves them in the
// L2, from where all load them as the left operand.
//
// A producer warpgroup: warp 0 loads left operands (the input, then the middle), warp 1 weights, both layers through one
// ring, so that the second's are on their way while the middle is exchanged; warp 2 hands the middle over; warp 3 clears
// the result where partial results are added to it. One or two consumer warpgroups have 64 rows each. A tile of fewer
// rows than 64 takes no more shared memory than it has: products read 64 rows all the same, of which the last are whatever
// lies behind, and nobody stores what becomes of them.
#pragma once
#include "marks.cuh"
#include "pixel_panels.cuh"
#include "tile_results.cuh"

namespace ts {

template <class K>
using LeftRing = Ring<K::LEFT_STAGES, K::DEPTH * K::ROWS * 2>;
template <class K>
using WeightRing = Ring<K::WEIGHT_STAGES, K::WEIGHT_BYTES>;
// Behind the rings' barriers: more of them, what epoch it is, two times a word a warp for sums over a row of the operand, and
// the barriers of a gathered middle.
enum Word : u32 { MIDDLE_DONE = 0, MIDDLE_READY = 8, RESULT_CLEARED = 16, EPOCH = 24, OPERAND_DONE = 32, ROW_SCRATCH = 64, GATHERED_BARS = 128 };
template <class K>
TS_DEV u32 word_at(u32 smem, Word word) { return smem + K::BARS + 16 * (K::LEFT_STAGES + K::WEIGHT_STAGES) + word; }

template <class K>
TS_DEV void init_shared_tile(const Position& me, u32 smem) {
  constexpr u32 WARPS = 4 * K::WARPGROUPS;
  for (int i = 0; i < K::LEFT_STAGES + K::WEIGHT_STAGES; ++i) {
    bar_init(smem + K::BARS + 16 * i, 1);
    bar_init(smem + K::BARS + 16 * i + 8, WARPS);
  }
  bar_init(word_at<K>(smem, OPERAND_DONE), WARPS);
  bar_init(word_at<K>(smem, MIDDLE_DONE), WARPS);
  bar_init(word_at<K>(smem, MIDDLE_READY), 1);
  bar_init(word_at<K>(smem, RESULT_CLEARED), 1);
  if constexpr (K::BY_CLUSTER) {
    init_parts<K::COLUMNS>(word_at<K>(smem, GATHERED_BARS), me.column, WARPS);
    expect_parts<K::COLUMNS, PART_BYTES<K>>(word_at<K>(smem, GATHERED_BARS), me.column);
  }
  bar_init_done();
}

// ---- producers

// Panels of 64 columns of a matrix from (x, y) on: as many rows as the map's boxes have, `pitch` bytes apart.
template <int DEPTH>
TS_DEV void load_panels(u32 dst, const TensorMap* map, int x, int y, u32 bar, u32 pitch) {
#pragma unroll
  for (int h = 0; h < DEPTH / 64; ++h) tma_load(dst + h * pitch, map, x + 64 * h, y, bar, EVICT_NORMAL);
}

// `count` stages of the input, from column x on.
template <class K, class P>
TS_DEV void load_pixels(const P& p, const Position& me, LeftRing<K>& ring, int x, int count) {
  const FirstPixel at = first_pixel<K>(p.first_row + me.row_tile * K::ROWS);
#pragma unroll 1
  for (int i = 0; i < count; ++i, ring.advance()) {
    ring.wait_empty();
    bar_expect(ring.full(), K::DEPTH * K::ROWS * 2);
    load_pixel_panels<K>(ring.addr(), &p.input, at, x + i * K::DEPTH, ring.full());
  }
}

// The same of a matrix: columns of `map` from (x, y) on.
template <class K, int COLUMNS>
TS_DEV void load_rows(LeftRing<K>& ring, const TensorMap* map, int x, int y, int box_rows, int count) {
#pragma unroll 1
  for (int i = 0; i < count; ++i, ring.advance()) {
    ring.wait_empty();
    bar_expect(ring.full(), COLUMNS * box_rows * 2);
    load_panels<COLUMNS>(ring.addr(), map, x + i * K::DEPTH, y, ring.full(), K::ROWS * 128);
  }
}

template <class K, class P>
TS_DEV void load_left(const P& p, const Position& me, u32 smem) {
  LeftRing<K> ring(smem + K::BARS, smem + K::LEFT);
  const int x = K::FIRSTS > 0 ? 0 : me.group * K::GROUP_COLUMNS, count = K::FIRSTS > 0 ? K::STEPS : me.steps;
  if constexpr (K::TAPS > 0)
    load_pixels<K>(p, me, ring, x, count);
  else
    load_rows<K, K::FIRST_PANELS>(ring, &p.input, x, me.row_tile * K::ROWS, p.box_rows, count);
  if constexpr (K::FIRSTS > 0 && !K::HELD) {
    bar_wait(word_at<K>(smem, MIDDLE_READY), 0);
    fence_async_global();
    load_rows<K, K::DEPTH>(ring, &p.middle, 0, (me.row_tile * K::GROUPS + me.group) * K::ROWS, p.box_rows, me.steps);
  }
}

// The rows of the operand: made by as many CTAs of the row tile as there are rows, if there are so many.
template <class K>
TS_DEV void await_operand(const Team& team, const Position& me, u32 smem) {
  constexpr int CTAS = K::GROUPS * K::COLUMNS;
  const u64 epoch = team.next_epoch(OPERAND);
  bar_wait(word_at<K>(smem, OPERAND_DONE), 0);
  if (lane_in_warp() == 0) team.announce(OPERAND, epoch);
  await_peers(team, OPERAND, epoch, me.row_tile * CTAS, 1, me.rows < CTAS ? me.rows : CTAS);
  fence_async_global();
}

template <class K, class P>
TS_DEV void load_weights(const P& p, const Position& me, u32 smem) {
  WeightRing<K> ring(smem + K::BARS + 16 * K::LEFT_STAGES, smem + K::WEIGHTS);
  if constexpr (K::FIRSTS > 0) {
    const int column = me.group * K::GROUP_COLUMNS + middle_part<K>(me) * K::MIDDLE;
#pragma unroll 1
    for (int i = 0; i < K::STEPS; ++i, ring.advance()) {
      ring.wait_empty();
      bar_expect(ring.full(), K::FIRST_PANELS * K::MIDDLE * K::FIRSTS * 2);
#pragma unroll
      for (int f = 0; f < K::FIRSTS; ++f)
        load_panels<K::FIRST_PANELS>(ring.addr() + f * K::MIDDLE * 128, &p.firsts[f], i * K::DEPTH, K::offset(f) + column, ring.full(),
                              K::FIRSTS * K::MIDDLE * 128);
    }
  }
#pragma unroll 1
  for (int i = 0; i < me.steps; ++i, ring.advance()) {
    ring.wait_empty();
    bar_expect(ring.full(), K::DEPTH * K::OUT_COLUMNS * 2);
#pragma unroll
    for (int f = 0; f < K::LASTS * K::PRODUCTS; ++f) {
      const int x = me.group * K::GROUP_COLUMNS + i * K::DEPTH, y = me.column * K::width(f);
      if constexpr (K::BY_COLUMNS) {  // panels of 64 columns, a row of each for each of the depth
#pragma unroll
        for (int q = 0; q < K::width(f) / 64; ++q)
          tma_load(ring.addr() + (K::start(f) / 64 + q) * K::DEPTH * 128, &p.lasts[f], y + 64 * q, x, ring.full(), EVICT_NORMAL);
      } else {
        load_panels<K::DEPTH>(ring.addr() + K::start(f) * 128, &p.lasts[f], x, y, ring.full(), K::OUT_COLUMNS * 128);
      }
    }
  }
}

// The all-gather of the middle: when this CTA's columns are in the L2 it says so, and waits for the others of its group.
// Through the cluster it sends them. What epoch it is, partial sums ask as well: all that is left to do of one layer, and
// where each CTA makes the middle for itself.
template <class K>
TS_DEV void hand_over(const Team& team, const Position& me, u32 smem) {
  await_kernel_before();
  const u64 epoch = team.next_epoch(K::HELD || K::FIRSTS == 0 ? PARTIAL : MIDDLE);
  if (lane_in_warp() == 0) {
    sts32(word_at<K>(smem, EPOCH), (u32)epoch);
    sts32(word_at<K>(smem, EPOCH) + 4, (u32)(epoch >> 32));
  }
  if constexpr (K::BY_CLUSTER) {
    send_part<K::COLUMNS, PART_BYTES<K>>(smem + K::GATHER, word_at<K>(smem, GATHERED_BARS), me.column, 0);
    await_parts<K::COLUMNS>(team, word_at<K>(smem, GATHERED_BARS), cta_of<K>(me.row_tile, me.group, 0), 0);
  } else if constexpr (K::FIRSTS > 0 && !K::HELD) {
    bar_wait(word_at<K>(smem, MIDDLE_DONE), 0);
    if (lane_in_warp() == 0) team.announce(MIDDLE, epoch);
    await_peers(team, MIDDLE, epoch, cta_of<K>(me.row_tile, me.group, 0), cta_of<K>(0, 0, 1), K::COLUMNS);
  }
  if (lane_in_warp() == 0) bar_arrive(word_at<K>(smem, MIDDLE_READY));
}

// Zeros in the rows of its part of the result that this group has; then it waits for the other groups.
template <class K, class P>
TS_DEV void clear_result(const P& p, const Team& team, const Position& me, u32 smem) {
  await_kernel_before();
  const u64 epoch = team.next_epoch(CLEARED);
  constexpr int PIECES = K::OUT_COLUMNS / 8;
  const u32 zeros[4] = {0, 0, 0, 0};
  const int rows = me.rows < K::ROWS ? me.rows : K::ROWS;
#pragma unroll 4
  for (int q = (int)lane_in_warp(); q < (rows - me.group + K::GROUPS - 1) / K::GROUPS * PIECES; q += WARP) {
    const int row = q / PIECES * K::GROUPS + me.group;
    const Place at = place<K>(p, me.column, q % PIECES * 8);
    if (at.column < at.columns) store_shared_words((u16*)at.data + (me.row_tile * K::ROWS + row) * at.stride + at.column, zeros);
  }
  sync_warp();
  if (lane_in_warp() == 0) team.announce(CLEARED, epoch);
  await_peers(team, CLEARED, epoch, cta_of<K>(me.row_tile, 0, me.column), cta_of<K>(0, 1, 0), K::GROUPS);
  fence_async_global();
  if (lane_in_warp() == 0) bar_arrive(word_at<K>(smem, RESULT_CLEARED));
}

// ---- consumers

// COUNT elements of a vector of SIZE to shared memory, as fp32, by THREADS threads; zeros beyond its end.
template <class V, int COUNT, int SIZE, int THREADS>
TS_DEV void copy_vector(const void* from, u32 to, int first, int offset, int t) {
#pragma unroll 1
  for (int k = t; k < COUNT; k += THREADS) stsf(to + 4 * k, first + k < SIZE ? Io<V>::param(from, offset + first + k) : 0.0f);
}

// The middle of this CTA's columns, rounded, through shared memory that the left ring does not use now, to the L2; or to this
// CTA's part of the gathered middle.
template <class K, class P, int BLOCKS>
TS_DEV void store_middle(const P& p, const Fragment<BLOCKS> (&acc)[K::FIRSTS], const Position& me, u32 smem, int g, u32 t) {
  constexpr int PITCH = share<K>(K::MIDDLE) * 2 + 16;  // 16 bytes more than the columns take: rows start on other banks
  const u32 stage = smem + K::LEFT + g * 64 * PITCH;
  const int mine = first_column<K>(g, K::MIDDLE), row0 = first_row<K>(g);
  const int part = middle_part<K>(me) * K::MIDDLE + mine, first = me.group * K::GROUP_COLUMNS + part;
  if (t + 128 * g >= K::LIVE_THREADS) return;
  TS_EACH(t, K::LIVE_THREADS) {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float v[2];
        float x[2][K::FIRSTS];
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
          for (int f = 0; f < K::FIRSTS; ++f) x[e][f] = TS_REG(acc[f], 4 * i + 2 * j + e);
        K::middle(smem + K::VECTORS, mine + col_of(t, i), x, v);
        if constexpr (K::HELD) {
          if (K::ROWS < 16 && row_of(t, j) >= K::ROWS) continue;
          const u32 at = smem + K::GATHER + ((part / 8 + i) * K::ROWS + row0 + row_of(t, j)) * 16 + (t & 3) * 4;
          sts32(at, first + 8 * i < K::HID ? K::T::pack(v[0], v[1]) : 0);  // padding, whatever act(0) is
        } else {
          sts32(stage + row_of(t, j) * PITCH + col_of(t, i) * 2, K::T::pack(v[0], v[1]));
        }
      }
  }
  if constexpr (K::HELD) {
    TS_EACH(t, K::LIVE_THREADS) {
#pragma unroll 1
      for (int q = (int)t + 128 * g; q < (GATHERED<K> - K::GROUP_COLUMNS) / 8 * K::ROWS * 2; q += K::LIVE_THREADS)
        sts64(smem + K::GATHER + K::GROUP_COLUMNS * K::ROWS * 2 + q * 8, 0.0f, 0.0f);
    }
    return;
  }
  sync_warp();  // each warp copies the 16 rows that it wrote
  constexpr int PIECES = share<K>(K::MIDDLE) / 8;
  TS_EACH(t, K::LIVE_THREADS) {
    const int warp = (int)(t >> 5), base = (me.row_tile * K::GROUPS + me.group) * K::ROWS;
#pragma unroll 4
    for (int q = (int)(t & 31); q < 16 * PIECES; q += 32) {
      const int row = warp * 16 + q / PIECES, column = me.column * K::MIDDLE + mine + q % PIECES * 8;
      u32 words[4];
      lds_words(stage + row * PITCH + q % PIECES * 16, words);
      if (me.group * K::GROUP_COLUMNS + column >= K::HID) words[0] = words[1] = words[2] = words[3] = 0;  // padding, whatever act(0) is
      if (row0 + row < me.rows) store_shared_words((u16*)p.middle_data + (u64)(base + row0 + row) * K::GROUP_COLUMNS + column, words);
    }
  }
}

// Rows of the operand that this CTA makes: every CTAS-th of its row tile, by all threads; or each of them, where it is alone
// with them (K::OWN_ROWS), a warp a row.
template <class K, class P>
TS_DEV void make_operand(const P& p, const Position& me, u32 smem, u32 t) {
  constexpr int CTAS = K::GROUPS * K::COLUMNS, THREADS = 128 * K::WARPGROUPS;
  await_kernel_before();
  const int rows = me.rows < K::ROWS ? me.rows : K::ROWS, start = me.row_tile * K::ROWS;
  if constexpr (K::OWN_ROWS) {
#pragma unroll 1
    for (int row = (int)(t >> 5); row < rows; row += THREADS / 32) {
      const RowsInPanels<K::DEPTH, K::ROWS> to = {smem + K::LEFT, row, me.group * K::GROUP_COLUMNS, K::GROUP_COLUMNS};
      K::template before<1>(p, to, start + row, 0, t & 31);
    }
    fence_async_shared();
    named_sync(BOTH_GROUPS, THREADS);
  } else {
#pragma unroll 1
    for (int row = me.cta - me.row_tile * CTAS; row < rows; row += CTAS) {
      const RowsInMemory to = {(u16*)p.operand_data + (u64)(start + row) * K::INNER, K::INNER};
      K::template before<1>(p, to, start + row, word_at<K>(smem, ROW_SCRATCH), t);
      named_sync(BOTH_GROUPS, THREADS);  // the scratch is read: the next row may write it
    }
    group_arrive(word_at<K>(smem, OPERAND_DONE));
  }
}

// Both rings, or that of weights alone where left operands do not come through theirs. What comes LATE is waited for last:
// a look at the other's barrier behind it would cost 0.1 us.
template <class K, bool LEFT, bool LATE>
struct BothRings {
  LeftRing<K>& left;
  WeightRing<K>& weights;
  TS_DEV void wait_full() {
    if (LEFT && !LATE) left.wait_full();
    weights.wait_full();
    if (LEFT && LATE) left.wait_full();
  }
  TS_DEV void release() {
    if (LEFT) left.release();
    weights.release();
  }
  TS_DEV void advance() {
    left.advance();
    weights.advance();
  }
};

template <class K, class P>
TS_DEV void consume(const P& p, const Team& team, const Position& me, u32 smem, int g) {
  constexpr int THREADS = 128 * K::WARPGROUPS;
  const u32 t = lane_in_group();
  LeftRing<K> left(smem + K::BARS, smem + K::LEFT);
  WeightRing<K> weights(smem + K::BARS + 16 * K::LEFT_STAGES, smem + K::WEIGHTS);
  if constexpr (K::BEFORE)
    make_operand<K>(p, me, smem, lane_in_group() + 128 * g);
  const bool leads = t == 0 && g == 0;
  mark(ROWS_MADE, leads);
  TS_EACH(t, 128) {
    K::load_vectors(p, smem + K::VECTORS, me.group * K::GROUP_COLUMNS + middle_part<K>(me) * K::MIDDLE, me.column, (int)t + 128 * g);
  }
  const u32 mine = first_row<K>(g) * 128;  // in a panel
  if constexpr (K::FIRSTS == 0) {
    named_sync(BOTH_GROUPS, THREADS);  // the vectors are there
    mark(VECTORS_THERE, leads);
  } else {
    Fragment<share<K>(K::MIDDLE) / 8> acc[K::FIRSTS];
#pragma unroll
    for (int f = 0; f < K::FIRSTS; ++f) clear(acc[f]);
    BothRings<K, true, false> pages = {left, weights};
    sum_pages(pages, 0, K::STEPS, [&](int i) {
      mark(FIRST_STAGE, leads && i == 0);
      mma_fence();
#pragma unroll
      for (int f = 0; f < K::FIRSTS; ++f)
        multiply<typename K::T, K::FIRST_DEPTH, K::ROWS, false, false, false>(
            acc[f], (left.addr() + mine) >> 4, (weights.addr() + (f * K::MIDDLE + first_column<K>(g, K::MIDDLE)) * 128) >> 4, K::FIRSTS * K::MIDDLE * 8);
    });
    mma_wait<0>();
#pragma unroll
    for (int f = 0; f < K::FIRSTS; ++f) pin(acc[f]);  // or what reads them moves in front of the wait (C7514)
    pages.release();
    mark(FIRST_SUM, leads);
    // The other warpgroup's last stage may lie where this one stages; and the vectors are there.
    named_sync(BOTH_GROUPS, THREADS);
    store_middle<K>(p, acc, me, smem, g, t);
    fence_async_shared();
    if constexpr (K::OWN_MIDDLE)
      named_sync(BOTH_GROUPS, THREADS);
    else
      group_arrive(K::BY_CLUSTER ? word_at<K>(smem, GATHERED_BARS) + 8 * me.column : word_at<K>(smem, MIDDLE_DONE));
    mark(MIDDLE_STORED, leads);
  }
  Fragment<share<K>(K::OUT_COLUMNS) / 8> acc;
  const u32 half = first_column<K>(g, K::OUT_COLUMNS) * 128;
  clear(acc);
  BothRings<K, !K::HELD && !K::OWN_ROWS, true> pages = {left, weights};
  int come = 0;
  sum_pages(pages, 0, me.steps, [&](int i) {
    if constexpr (K::BY_CLUSTER) {
#pragma unroll 1
      for (; come < K::COLUMNS && come * K::MIDDLE < (i + 1) * K::DEPTH; ++come) bar_wait(word_at<K>(smem, GATHERED_BARS) + 8 * come, 0);
    }
    mark(MIDDLE_BACK, leads && i == 0);
    mma_fence();
    const u32 from = K::HELD ? smem + K::GATHER + first_row<K>(g) * 16 + i * (K::DEPTH * K::ROWS * 2) : left.addr() + mine;
    constexpr u32 PITCH = K::BY_COLUMNS ? K::DEPTH * 8 : K::OUT_COLUMNS * 8;
    multiply<typename K::T, K::DEPTH, K::ROWS, K::HELD, false, K::BY_COLUMNS>(acc, from >> 4, (weights.addr() + half) >> 4, PITCH);
  });
  mma_wait<0>();
  pin(acc);
  mark(SECOND_SUM, leads);
  if (K::TAIL == REDUCE_ADD || stages_result<K>()) named_sync(BOTH_GROUPS, THREADS);  // all left operands were read: their ring is free
  if (t + 128 * g >= K::LIVE_THREADS) {
    if (K::TAIL == CLUSTER) cluster_sync();
    return;
  }
  const auto ahead = [&](u32 lane, int i) { return load_beside<K>(p, me, g, lane, i); };
  const auto finish = [&](u32 lane, int i, const float(&v)[4], const Beside<K>& beside) { store_block<K>(p, me, smem, g, lane, i, v, beside); };
  if constexpr (K::TAIL == NO_TAIL) {
    store_result<K>(p, acc, me, smem, g, t);
  } else if constexpr (K::TAIL == PARTIALS) {
    bar_wait(word_at<K>(smem, MIDDLE_READY), 0);  // for a group without hidden columns too: the epoch is there
    const u64 epoch = lds32(word_at<K>(smem, EPOCH)) | (u64)lds32(word_at<K>(smem, EPOCH) + 4) << 32;
    float* tile = p.partial + (u64)(me.row_tile * K::COLUMNS + me.column) * K::GROUPS * (share<K>(K::OUT_COLUMNS) / 8 * K::LIVE_THREADS * 4);
    const int first = cta_of<K>(me.row_tile, 0, me.column), stride = cta_of<K>(0, 1, 0);
    constexpr int BLOCKS = share<K>(K::OUT_COLUMNS) / 8;
    if constexpr (K::TAGGED)
      reduce_scatter_tagged<BLOCKS, K::GROUPS, K::LIVE_THREADS>(acc, tile, me.group, t + 128 * g, team, epoch, first, stride, ahead, finish);
    else
      reduce_scatter_l2<BLOCKS, K::GROUPS, K::LIVE_THREADS>(acc, tile, me.group, t + 128 * g, team, epoch, first, stride, ahead, finish);
  } else if constexpr (K::TAIL == CLUSTER) {
    reduce_scatter_dsm<share<K>(K::OUT_COLUMNS) / 8, K::GROUPS, K::LIVE_THREADS>(acc, smem + K::SCATTER, me.group, t + 128 * g, ahead, finish);
  } else {
    constexpr int GROUP_ROWS = K::ROWS < 64 ? K::ROWS : 64, SHARE = share<K>(K::OUT_COLUMNS);
    reduce_add<typename K::Result, SHARE / 8, K::ADD_WIDTH, GROUP_ROWS>(
        acc, &p.sums, me.column * K::OUT_COLUMNS + first_column<K>(g, K::OUT_COLUMNS), me.row_tile * K::ROWS + first_row<K>(g),
        smem + K::LEFT + g * 64 * SHARE * 2, word_at<K>(smem, RESULT_CLEARED), g, t);
  }
}

template <class K, class P>
TS_DEV void run_shared_tile(const P& p, u32 smem) {
  const int warp = warp_index(), group = warp >> 2;
  const Position me = position<K>(cta_index(), p.rows);
  if (me.rows <= 0) return;  // a row tile of none: nobody waits for its CTAs
  const Team team = {p.flags, p.dump, p.limit_ns, me.cta, K::ROW_TILES * K::GROUPS * K::COLUMNS};
  mark(STARTED, cta_leader());
  mark(START_NS, cta_leader());
  if (cta_leader()) init_shared_tile<K>(me, smem);
  let_next_kernel_start();
  if (K::TAIL == CLUSTER || K::BY_CLUSTER)
    cluster_sync();
  else
    sync_cta();
  mark(SET_UP, cta_leader());
  if (group == K::WARPGROUPS) {
    if constexpr (K::WARPGROUPS == 2) registers_dec<LOADER_REGISTERS>();
    const int role = warp & 3;
    if (role == 0) {
      if constexpr (!K::OWN_ROWS) {
        await_kernel_before();
        if constexpr (K::BEFORE) await_operand<K>(team, me, smem);
        mark(ROWS_THERE, K::BEFORE && lane_in_warp() == 0);
        if (lane_in_warp() == 0) load_left<K>(p, me, smem);
      }
    } else if (role == 1) {
      if (lane_in_warp() == 0) load_weights<K>(p, me, smem);
    } else if (role == 2) {
      if constexpr (!K::ALONE) hand_over<K>(team, me, smem);
    } else if constexpr (K::TAIL == REDUCE_ADD) {
      clear_result<K>(p, team, me, smem);
    }
    if (K::TAIL == CLUSTER) {
      sync_warp();
      cluster_sync();
    }
    if constexpr (K::BY_CLUSTER) sync_warp();
  } else {
    if constexpr (K::WARPGROUPS == 2) registers_inc<CONSUMER_REGISTERS>();
    consume<K>(p, team, me, smem, group);
    mark(ENDED, cta_leader());
    mark(END_NS, cta_leader());
  }
  if constexpr (K::BY_CLUSTER) cluster_meet();  // what this CTA sent was read from it, and nothing comes to it any more
}

}  // namespace ts
