// What stands in front of a product, a norm: rows of a matrix, made from rows of tensors. A row stays as it was loaded; what
// is computed from it is a function of a piece and an element, and goes where the products read it.
#pragma once
#include "tile.cuh"

namespace ts {

// Thread t of THREADS has of piece c the eight columns from 8 (c THREADS + t) on; COLUMNS is a multiple of eight.
template <int COLUMNS, int THREADS>
struct Row {
  static constexpr int PIECES = (COLUMNS + 8 * THREADS - 1) / (8 * THREADS), WARPS = THREADS / 32;
  static TS_DEV int column(int c, u32 t) { return (c * THREADS + (int)t) * 8; }

  template <class T>
  struct Held : Registers<u32, PIECES * 2 * T::BYTES> {
    static constexpr int WORDS = 2 * T::BYTES;  // of a piece
    TS_DEV void load(const void* from, u32 t) {
#pragma unroll
      for (int c = 0; c < PIECES; ++c) {
        const char* const start = (const char*)from + T::BYTES * column(c, t);
        u32* const words = this->v + c * WORDS;
        if (column(c, t) >= COLUMNS) continue;
        if (((u64)start & 15) == 0) {
#pragma unroll
          for (int k = 0; k < WORDS; k += 4) load_shared_words(start + 4 * k, *(u32(*)[4])(words + k));
        } else {
#pragma unroll
          for (int k = 0; k < WORDS; ++k) {
            if constexpr (T::BYTES == 2)
              words[k] = T::pack(Io<T>::param(start, 2 * k), Io<T>::param(start, 2 * k + 1));
            else
              words[k] = bits_of(Io<T>::param(start, k));
          }
        }
      }
    }
    TS_DEV float at(int c, int e) const {
      if constexpr (T::BYTES == 2)
        return e & 1 ? T::high(this->v[c * WORDS + e / 2]) : T::low(this->v[c * WORDS + e / 2]);
      else
        return float_of(this->v[c * WORDS + e]);
    }
    // As if it were loaded anew, where registers are few: else the compiler keeps what was computed from it.
    TS_DEV void again() { pin(*this); }
  };

  // Over all columns of value(c, e), always in the same order. `scratch`: 4 WARPS bytes, another place than the reduction
  // before used: then one barrier each is enough.
  template <class V, class O>
  static TS_DEV float reduce(float s, const V& value, const O& combine, u32 scratch, u32 t) {
#pragma unroll
    for (int c = 0; c < PIECES; ++c)
      if (column(c, t) < COLUMNS)
#pragma unroll
        for (int e = 0; e < 8; ++e) s = combine(s, value(c, e));
#pragma unroll
    for (int far = 16; far > 0; far >>= 1) s = combine(s, lane_across(s, far));
    if constexpr (WARPS == 1) return s;
    if ((t & 31) == 0) stsf(scratch + (t >> 5) * 4, s);
    named_sync(BOTH_GROUPS, THREADS);
    s = ldsf(scratch);
#pragma unroll
    for (int w = 1; w < WARPS; ++w) s = combine(s, ldsf(scratch + w * 4));
    return s;
  }
  template <class V>
  static TS_DEV float sum(const V& value, u32 scratch, u32 t) {
    return reduce(0.0f, value, [](float a, float b) { return a + b; }, scratch, t);
  }
  template <class V>
  static TS_DEV float max(const V& value, u32 scratch, u32 t) {
    return reduce(-__int_as_float(0x7f800000), value, [](float a, float b) { return max_nan(a, b); }, scratch, t);
  }

  // Rounded to T, eight columns at a time; `to` knows what becomes of zeros beyond the last.
  template <class T, class V, class P>
  static TS_DEV void store(const V& value, const P& to, u32 t) {
#pragma unroll
    for (int c = 0; c < PIECES; ++c) {
      u32 words[4] = {0, 0, 0, 0};
      const bool exists = column(c, t) < COLUMNS;
      if (exists)
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = T::pack(value(c, 2 * k), value(c, 2 * k + 1));
      to.put(column(c, t), exists, words);
    }
  }
};

// To memory, from where CTAs load it.
struct RowInMemory {
  u16* row;
  TS_DEV void put(int column, bool exists, const u32 (&words)[4]) const {
    if (exists) store_shared_words(row + column, words);
  }
};
// Into stages of a ring of left operands, as bulk copies would leave them: STAGE columns each, in panels of 64, of each ROWS
// rows of 128 bytes, swizzled. `wanted` columns from `first` on.
template <int STAGE, int ROWS>
struct RowInPanels {
  u32 ring;
  int row, first, wanted;
  TS_DEV void put(int column, bool, const u32 (&words)[4]) const {
    const int at = column - first;
    if (at < 0 || at >= wanted) return;
    const u32 panel = ring + at / STAGE * (STAGE * ROWS * 2) + at % STAGE / 64 * (ROWS * 128);
    sts_words(panel + row * 128 + ((at % 64 / 8 ^ (row & 7)) << 4), words);
  }
};

// A row on its way from DRAM to the L2, by a warp, where its load will find it.
template <int BYTES>
TS_DEV void prefetch_row(const void* from, u32 t) {
  for (int at = (int)t * 128; at < BYTES; at += 32 * 128) prefetch_l2((const char*)from + at);
}

}  // namespace ts
