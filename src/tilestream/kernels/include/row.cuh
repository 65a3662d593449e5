// A row of a matrix, taken by all threads of the consumer warpgroups together: sums over its columns go through shared
// memory, everything else stays in registers. What stands in front of a shared tile is written in these.
#pragma once
#include "tile.cuh"

namespace ts {

// Thread t of THREADS has of piece c the eight columns from 8 (c THREADS + t) on. Beyond the last column are zeros.
template <int COLUMNS, int THREADS>
struct Row {
  static constexpr int PIECES = (COLUMNS + 8 * THREADS - 1) / (8 * THREADS), COUNT = 8 * PIECES;
  static constexpr int WARPS = THREADS / 32;
  static TS_DEV int column(int c, u32 t) { return (c * THREADS + (int)t) * 8; }

  // COLUMNS elements, as fp32. 16-bit elements that start on 16 bytes come eight at a time.
  template <class T>
  static TS_DEV void load(float (&v)[COUNT], const void* from, u32 t) {
#pragma unroll
    for (int c = 0; c < PIECES; ++c) {
      const int first = column(c, t);
#pragma unroll
      for (int e = 0; e < 8; ++e) v[8 * c + e] = 0.0f;
      if (first >= COLUMNS) continue;
      if constexpr (T::BYTES == 2) {
        if (((u64)from & 15) == 0) {
          u32 words[4];
          load_shared_words((const u16*)from + first, words);
#pragma unroll
          for (int e = 0; e < 8; ++e) v[8 * c + e] = e & 1 ? T::high(words[e >> 1]) : T::low(words[e >> 1]);
          continue;
        }
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) v[8 * c + e] = Io<T>::param(from, first + e);
    }
  }

  template <class T>
  static TS_DEV void store(const float (&v)[COUNT], void* to, u32 t) {
#pragma unroll
    for (int c = 0; c < PIECES; ++c) {
      u32 words[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) words[e] = T::pack(v[8 * c + 2 * e], v[8 * c + 2 * e + 1]);
      if (column(c, t) < COLUMNS) store_shared_words((u16*)to + column(c, t), words);
    }
  }

  // Into stages of a ring of left operands, as bulk copies would leave them: STAGE columns each, in panels of 64, of each
  // ROWS rows of 128 bytes, swizzled. `wanted` columns from `first` on; zeros beyond the last.
  template <class T, int STAGE, int ROWS>
  static TS_DEV void store_panels(const float (&v)[COUNT], u32 ring, int row, int first, int wanted, u32 t) {
#pragma unroll
    for (int c = 0; c < PIECES; ++c) {
      const int at = column(c, t) - first;
      if (at < 0 || at >= wanted) continue;
      const u32 panel = ring + at / STAGE * (STAGE * ROWS * 2) + at % STAGE / 64 * (ROWS * 128);
      const u32 to = panel + row * 128 + ((at % 64 / 8 ^ (row & 7)) << 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) sts32(to + 4 * e, column(c, t) < COLUMNS ? T::pack(v[8 * c + 2 * e], v[8 * c + 2 * e + 1]) : 0);
    }
  }

  // Over all columns, always in the same order. `scratch`: 4 WARPS bytes, another place than the reduction before used:
  // then one barrier each is enough.
  static TS_DEV float sum(const float (&v)[COUNT], u32 scratch, u32 t) {
    float s = 0.0f;
#pragma unroll
    for (int c = 0; c < PIECES; ++c)
#pragma unroll
      for (int e = 0; e < 8; ++e) s += column(c, t) < COLUMNS ? v[8 * c + e] : 0.0f;
#pragma unroll
    for (int far = 16; far > 0; far >>= 1) s += lane_across(s, far);
    if constexpr (WARPS == 1) return s;
    if ((t & 31) == 0) stsf(scratch + (t >> 5) * 4, s);
    named_sync(BOTH_GROUPS, THREADS);
    s = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) s += ldsf(scratch + w * 4);
    return s;
  }
  static TS_DEV float max(const float (&v)[COUNT], u32 scratch, u32 t) {
    float s = -__int_as_float(0x7f800000);
#pragma unroll
    for (int c = 0; c < PIECES; ++c)
#pragma unroll
      for (int e = 0; e < 8; ++e) s = column(c, t) < COLUMNS ? max_nan(s, v[8 * c + e]) : s;
#pragma unroll
    for (int far = 16; far > 0; far >>= 1) s = max_nan(s, lane_across(s, far));
    if constexpr (WARPS == 1) return s;
    if ((t & 31) == 0) stsf(scratch + (t >> 5) * 4, s);
    named_sync(BOTH_GROUPS, THREADS);
    s = ldsf(scratch);
#pragma unroll
    for (int w = 1; w < WARPS; ++w) s = max_nan(s, ldsf(scratch + w * 4));
    return s;
  }
};

}  // namespace ts
