// Who a CTA of a shared tile is, and where what it has of the results goes. K and Params as in shared_tile.cuh.
#pragma once
#include "product.cuh"

namespace ts {

enum Tail : int { NO_TAIL, PARTIALS, REDUCE_ADD, CLUSTER };

// Where K::HELD, all of the group's middle is in each of its CTAs, at K::GATHER. Columns of 8 lie behind each other, of each
// all rows, 16 bytes a row: so a CTA's part is one piece of memory, of any multiple of 8 columns, and products read it as
// blocks of 8 rows without a swizzle. Either each CTA makes all of it (K::OWN_MIDDLE), and nothing is handed over, or the CTAs
// of a group are a cluster and gather it through their shared memory (K::BY_CLUSTER).
template <class K>
constexpr u32 PART_BYTES = K::ROWS * K::MIDDLE * 2;
// The group's columns up to whole stages of the second product; beyond the last are zeros.
template <class K>
constexpr int GATHERED = (K::GROUP_COLUMNS + K::DEPTH - 1) / K::DEPTH * K::DEPTH;

// With K::HALVES both warpgroups have all 64 rows of a tile, each half of the columns; else each has 64 rows. Of the columns
// of a CTA: those of a warpgroup, and where they and its rows begin.
template <class K>
constexpr int share(int columns) { return K::HALVES ? columns / 2 : columns; }
template <class K>
TS_DEV int first_column(int g, int columns) { return K::HALVES ? g * (columns / 2) : 0; }
template <class K>
TS_DEV int first_row(int g) { return K::HALVES ? 0 : 64 * g; }

struct Position {
  int row_tile, group, column, cta;
  int rows;   // of this tile, that exist
  int steps;  // stages of the group's part of the middle
};

template <class K>
TS_DEV int cta_of(int row_tile, int group, int column) {
  return K::TAIL == CLUSTER ? (row_tile * K::COLUMNS + column) * K::GROUPS + group : (row_tile * K::GROUPS + group) * K::COLUMNS + column;
}

template <class K>
TS_DEV Position position(int cta, int rows) {
  const int minor = K::TAIL == CLUSTER ? K::GROUPS : K::COLUMNS, major = K::TAIL == CLUSTER ? K::COLUMNS : K::GROUPS;
  const int a = cta % minor, b = cta / minor % major, r = cta / (K::COLUMNS * K::GROUPS);
  const int group = K::TAIL == CLUSTER ? a : b;
  int left = K::HID - group * K::GROUP_COLUMNS;
  left = left > K::GROUP_COLUMNS ? K::GROUP_COLUMNS : left < 0 ? 0 : left;
  const int below = rows - r * K::ROWS;  // a warp has 16 rows, also of a tile of 8: those of the next are not its own
  return {r, group, K::TAIL == CLUSTER ? b : a, cta, below < K::ROWS ? below : K::ROWS, (left + K::DEPTH - 1) / K::DEPTH};
}

// Which part of the group's middle the CTA makes.
template <class K>
TS_DEV int middle_part(const Position& me) { return K::OWN_MIDDLE ? 0 : me.column; }

// Where a column of a CTA belongs: in which result, and which of its columns it is.
struct Place {
  void* data;
  long long stride;
  int column, columns;
};

// Of local column c of the CTAs of `member`.
template <class K, class P>
TS_DEV Place place(const P& p, int member, int c) {
  int f = 0;
#pragma unroll
  for (; f < K::LASTS - 1; ++f)
    if (c < K::start(f + 1)) break;
  return {p.results[f], p.result_strides[f], member * K::width(f) + c - K::start(f), K::columns_of(f)};
}

// Elements of tensors with rows, residuals, that go with two columns of two rows of the result.
template <class K>
struct Beside {
  u32 words[2][K::BESIDE_WORDS + 1];
};

template <class K, class P>
TS_DEV Beside<K> load_beside(const P& p, const Position& me, int g, u32 t, int i) {
  Beside<K> made;
  if constexpr (K::LOADS == 0) return made;
  const Place at = place<K>(p, me.column, first_column<K>(g, K::OUT_COLUMNS) + col_of(t, i));
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int row = first_row<K>(g) + row_of(t, j);
    if (row < me.rows && at.column < at.columns) K::beside_words(p, me.row_tile * K::ROWS + row, at.column, made.words[j]);
  }
  return made;
}

// Columns `local` and the next of a row of the result, from their sums: of product n those at 4 n.
template <class K>
TS_DEV void finish_pair(u32 smem, int local, const float* sums, const u32* words, float (&made)[2]) {
  float y[2][K::PRODUCTS];
#pragma unroll
  for (int n = 0; n < K::PRODUCTS; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) y[e][n] = sums[4 * n + e];
  float r[2][K::LOADS + 1];
  K::beside_values(words, r);
  K::after(smem + K::VECTORS, local, y, r, made);
}

// Two columns of two rows of the result, as Fragment has them of each product.
template <class K, class P>
TS_DEV void store_block(const P& p, const Position& me, u32 smem, int g, u32 t, int i, const float* v, const Beside<K>& beside) {
  using O = typename K::Result;
  const int local = first_column<K>(g, K::OUT_COLUMNS) + col_of(t, i);
  const Place to = place<K>(p, me.column, local);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int row = first_row<K>(g) + row_of(t, j), at = me.row_tile * K::ROWS + row;
    if (row >= me.rows || to.column >= to.columns) continue;
    float made[2];
    finish_pair<K>(smem, local, v + 2 * j, beside.words[j], made);
    if (K::EVEN) {
      Io<O>::global2(to.data, (u64)at * to.stride + to.column, made[0], made[1]);
    } else {
      Io<O>::global1(to.data, (u64)at * to.stride + to.column, made[0]);
      if (to.column + 1 < to.columns) Io<O>::global1(to.data, (u64)at * to.stride + to.column + 1, made[1]);
    }
  }
}

// A result that nobody adds to, and of which a CTA has some columns, goes through shared memory, where the rings were, so
// that lanes store 16 bytes of a row side by side: of a fragment they have 4, and 128 x 128 such stores take 3.2 us.
constexpr int STAGED_COLUMNS = 24;  // of three results, 8 of each, it takes longer
template <class K>
constexpr int narrowest_result() {
  int least = K::width(0);
  for (int f = 1; f < K::LASTS; ++f) least = K::width(f) < least ? K::width(f) : least;
  return share<K>(least);
}
template <class K>
constexpr int STAGED_WIDTH = share<K>(K::OUT_COLUMNS) / K::PRODUCTS;
template <class K>
constexpr int STAGED_PITCH = STAGED_WIDTH<K> * K::Result::BYTES + 16;  // rows start on other banks
template <class K>
constexpr bool stages_result() {
  constexpr u32 WARPS = (K::LIVE_THREADS + 31) / 32, ROOM = K::HELD ? K::LEFT_STAGES * K::DEPTH * K::ROWS * 2 : K::SCATTER;
  return K::TAIL == NO_TAIL && narrowest_result<K>() >= STAGED_COLUMNS && WARPS * 16 * STAGED_PITCH<K> <= ROOM;
}
template <class K>
TS_DEV u32 staged_row(u32 smem, int g, int row) { return smem + K::LEFT + (64 * g + row) * STAGED_PITCH<K>; }

template <class K>
TS_DEV void stage_block(u32 smem, int g, u32 t, int i, const float* v, const Beside<K>& beside) {
  const int column = col_of(t, i), local = first_column<K>(g, K::OUT_COLUMNS) + column;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float made[2];
    finish_pair<K>(smem, local, v + 2 * j, beside.words[j], made);
    Io<typename K::Result>::store(staged_row<K>(smem, g, row_of(t, j)) + column * K::Result::BYTES, made[0], made[1]);
  }
}

// A warp's 16 rows; all of its lanes have staged theirs.
template <class K, class P>
TS_DEV void store_staged(const P& p, const Position& me, u32 smem, int g, u32 t) {
  using O = typename K::Result;
  constexpr int PIECE = 16 / O::BYTES, PIECES = STAGED_WIDTH<K> / PIECE;
  const int warp = (int)(t >> 5);
#pragma unroll 4
  for (int q = (int)(t & 31); q < 16 * PIECES; q += 32) {
    const int staged = warp * 16 + q / PIECES, column = q % PIECES * PIECE, row = first_row<K>(g) + staged;
    const Place to = place<K>(p, me.column, first_column<K>(g, K::OUT_COLUMNS) + column);
    if (row >= me.rows || to.column >= to.columns) continue;
    char* const at = (char*)to.data + ((u64)(me.row_tile * K::ROWS + row) * to.stride + to.column) * O::BYTES;
    u32 words[4];
    lds_words(staged_row<K>(smem, g, staged) + column * O::BYTES, words);
    if (to.column + PIECE <= to.columns && ((u64)at & 15) == 0) {
      store_global_words(at, words);
    } else {
#pragma unroll
      for (int e = 0; e < PIECE; ++e)
        if (to.column + e < to.columns) {
          if constexpr (O::BYTES == 2)
            store_global((u16*)at + e, (u16)(words[e / 2] >> 16 * (e & 1)));
          else
            store_global((u32*)at + e, words[e]);
        }
    }
  }
}

// All of a CTA's result that nobody adds to.
template <class K, class P, int BLOCKS>
TS_DEV void store_result(const P& p, const Fragment<BLOCKS>& acc, const Position& me, u32 smem, int g, u32 t) {
  TS_EACH(t, K::LIVE_THREADS) {
    // Of wide parts what goes beside them is asked for before any is waited for: a turn to memory each would be long.
    constexpr int OWN = BLOCKS / K::PRODUCTS, BATCH = K::LOADS > 0 && OWN >= 8 ? 8 : 1;
#pragma unroll
    for (int first = 0; first < OWN; first += BATCH) {
      Beside<K> beside[BATCH];
#pragma unroll
      for (int b = 0; b < BATCH; ++b)
        if (first + b < OWN) beside[b] = load_beside<K>(p, me, g, t, first + b);
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        const int i = first + b;
        if (i >= OWN) continue;
        float v[4 * K::PRODUCTS];
#pragma unroll
        for (int n = 0; n < 4 * K::PRODUCTS; ++n) v[n] = TS_REG(acc, 4 * (i + n / 4 * OWN) + n % 4);
        if constexpr (stages_result<K>())
          stage_block<K>(smem, g, t, i, v, beside[b]);
        else
          store_block<K>(p, me, smem, g, t, i, v, beside[b]);
      }
    }
  }
  if constexpr (stages_result<K>()) {
    sync_warp();
    TS_EACH(t, K::LIVE_THREADS) store_staged<K>(p, me, smem, g, t);
  }
}

}  // namespace ts
