// What stands in front of a product, a norm: rows of a matrix, made from rows of tensors. Rows stay as they were loaded;
// what is computed from them is a function of a row, a piece and an element, and goes where the products read it.
#pragma once
#include "tile.cuh"

namespace ts {

// Thread t of THREADS has of piece c the eight columns from 8 (c THREADS + t) on; COLUMNS is a multiple of eight. N rows
// are made side by side, so that their loads and sums are on their way together; the tensor's last stands for those behind.
template <int COLUMNS, int THREADS>
struct Row {
  static constexpr int PIECES = (COLUMNS + 8 * THREADS - 1) / (8 * THREADS), WARPS = (THREADS + 31) / 32;
  static TS_DEV int column(int c, u32 t) { return (c * THREADS + (int)t) * 8; }

  template <class T, int N = 1>
  struct Held {
    static constexpr int WORDS = 2 * T::BYTES;  // of a piece
    u32 v[N * PIECES * WORDS];
    // Rows `stride` bytes apart, of which `exist` do, the first always.
    TS_DEV void load(const char* first, long long stride, int exist, u32 t) {
#pragma unroll
      for (int r = 0; r < N; ++r) {
        const int from = r > 0 && r >= exist ? exist - 1 : r;
        load_row(first + from * stride, v + r * PIECES * WORDS, t);
      }
    }
    TS_DEV float at(int r, int c, int e) const {
      const u32* const words = v + (r * PIECES + c) * WORDS;
      if constexpr (T::BYTES == 2)
        return e & 1 ? T::high(words[e / 2]) : T::low(words[e / 2]);
      else
        return float_of(words[e]);
    }
    // As if they were loaded anew, where registers are few: else the compiler keeps what was computed from them.
    TS_DEV void again() { pin(v); }

   private:
    static TS_DEV void load_row(const char* from, u32* row, u32 t) {
#pragma unroll
      for (int c = 0; c < PIECES; ++c) {
        const char* const start = from + T::BYTES * column(c, t);
        u32* const words = row + c * WORDS;
        if (column(c, t) >= COLUMNS) continue;
        if (((u64)from & 15) == 0) {
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
  };

  // A value of each row, computed once.
  template <int N>
  struct Each {
    float v[N];
    TS_DEV float operator[](int r) const { return v[r]; }
  };
  template <int N, class V>
  static TS_DEV Each<N> each(const V& value) {
    Each<N> made;
#pragma unroll
    for (int r = 0; r < N; ++r) made.v[r] = value(r);
    return made;
  }

  // Over all columns of value(r, c, e), always in the same order. `scratch`: 4 WARPS bytes, another place than the reduction
  // before used: then one barrier each is enough.
  template <int N, class V, class O>
  static TS_DEV Each<N> reduce(float start, const V& value, const O& combine, u32 scratch, u32 t) {
    static_assert(N == 1 || WARPS == 1, "several rows are a warp's");
    Each<N> s = each<N>([&](int) { return start; });
#pragma unroll
    for (int c = 0; c < PIECES; ++c)
      if (column(c, t) < COLUMNS)
#pragma unroll
        for (int e = 0; e < 8; ++e) s = each<N>([&](int r) { return combine(s[r], value(r, c, e)); });
#pragma unroll
    for (int far = WARP / 2; far > 0; far >>= 1) {
      const Each<N> other = each<N>([&](int r) { return lane_across(s[r], far); });
      s = each<N>([&](int r) { return combine(s[r], other[r]); });
    }
    if constexpr (WARPS == 1) return s;
    if ((t & 31) == 0) stsf(scratch + (t >> 5) * 4, s[0]);
    named_sync(BOTH_GROUPS, THREADS);
    s.v[0] = ldsf(scratch);
#pragma unroll
    for (int w = 1; w < WARPS; ++w) s.v[0] = combine(s[0], ldsf(scratch + w * 4));
    return s;
  }
  template <int N, class V>
  static TS_DEV Each<N> sum(const V& value, u32 scratch, u32 t) {
    return reduce<N>(0.0f, value, [](float a, float b) { return a + b; }, scratch, t);
  }
  template <int N, class V>
  static TS_DEV Each<N> max(const V& value, u32 scratch, u32 t) {
    return reduce<N>(-__int_as_float(0x7f800000), value, [](float a, float b) { return max_nan(a, b); }, scratch, t);
  }

  // Rows that exist, rounded to T, eight columns at a time; `to` knows what becomes of zeros beyond the last.
  template <class T, int N, class V, class P>
  static TS_DEV void store(const V& value, const P& to, int exist, u32 t) {
#pragma unroll
    for (int r = 0; r < N; ++r) {
      if (r > 0 && r >= exist) continue;
#pragma unroll
      for (int c = 0; c < PIECES; ++c) {
        u32 words[4] = {0, 0, 0, 0};
        const bool exists = column(c, t) < COLUMNS;
        if (exists)
#pragma unroll
          for (int k = 0; k < 4; ++k) words[k] = T::pack(value(r, c, 2 * k), value(r, c, 2 * k + 1));
        to.put(r, column(c, t), exists, words);
      }
    }
  }
};

// To memory, rows of `columns` one behind the other, from where CTAs load them.
struct RowsInMemory {
  u16* first;
  int columns;
  TS_DEV void put(int r, int column, bool exists, const u32 (&words)[4]) const {
    if (exists) store_shared_words(first + r * columns + column, words);
  }
};
// Into stages of a ring of left operands, as bulk copies would leave them: STAGE columns each, in panels of 64, of each ROWS
// rows of 128 bytes, swizzled. `wanted` columns from `first` on.
template <int STAGE, int ROWS>
struct RowsInPanels {
  u32 ring;
  int row, first, wanted;
  TS_DEV void put(int r, int column, bool, const u32 (&words)[4]) const {
    const int at = column - first, to = row + r;
    if (at < 0 || at >= wanted) return;
    const u32 panel = ring + at / STAGE * (STAGE * ROWS * 2) + at % STAGE / 64 * (ROWS * 128);
    sts_words(panel + to * 128 + ((at % 64 / 8 ^ (to & 7)) << 4), words);
  }
};

// A row on its way from DRAM to the L2, by a warp, where its load will find it.
template <int BYTES>
TS_DEV void prefetch_row(const void* from, u32 t) {
  for (int at = (int)t * 128; at < BYTES; at += 32 * 128) prefetch_l2((const char*)from + at);
}

}  // namespace ts
