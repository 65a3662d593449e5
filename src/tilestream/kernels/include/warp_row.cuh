// A row of a matrix, taken by one warp that has few registers: it stays as it was loaded, eight columns a lane and piece,
// and what is computed from it is computed again wherever it is wanted.
#pragma once
#include "tile.cuh"

namespace ts {

template <class T, int COLUMNS>
struct WarpRow {
  static constexpr int PIECES = (COLUMNS + 255) / 256, WORDS = 2 * T::BYTES;  // of a piece, a lane
  Registers<u32, PIECES * WORDS> held;
  static TS_DEV int column(int c, u32 t) { return (c * 32 + (int)t) * 8; }
  TS_DEV void load(const void* from, u32 t) {
#pragma unroll
    for (int c = 0; c < PIECES; ++c) {
      const char* const start = (const char*)from + T::BYTES * column(c, t);
      if (column(c, t) >= COLUMNS) continue;
      if (((u64)start & 15) == 0) {
#pragma unroll
        for (int k = 0; k < WORDS; k += 4) {
          u32 four[4];
          load_shared_words(start + 4 * k, four);
#pragma unroll
          for (int i = 0; i < 4; ++i) held.v[c * WORDS + k + i] = four[i];
        }
      } else {
#pragma unroll
        for (int k = 0; k < WORDS; ++k) {
          if constexpr (T::BYTES == 2)
            held.v[c * WORDS + k] = T::pack(Io<T>::param(start, 2 * k), Io<T>::param(start, 2 * k + 1));
          else
            held.v[c * WORDS + k] = bits_of(Io<T>::param(start, k));
        }
      }
    }
  }
  // As if it were loaded anew: else the compiler keeps what was computed from it.
  TS_DEV void again() { pin(held); }
  TS_DEV float at(int c, int e) const {
    if constexpr (T::BYTES == 2)
      return e & 1 ? T::high(held.v[c * WORDS + (e >> 1)]) : T::low(held.v[c * WORDS + (e >> 1)]);
    else
      return float_of(held.v[c * WORDS + e]);
  }
};

// A row on its way from DRAM to the L2, where its load will find it.
template <int BYTES>
TS_DEV void prefetch_row(const void* from, u32 t) {
  for (int at = (int)t * 128; at < BYTES; at += 32 * 128) prefetch_l2((const char*)from + at);
}

// What all lanes have, always combined in the same order.
TS_DEV float warp_sum(float s) {
#pragma unroll
  for (int far = 16; far > 0; far >>= 1) s += lane_across(s, far);
  return s;
}
TS_DEV float warp_max(float s) {
#pragma unroll
  for (int far = 16; far > 0; far >>= 1) s = max_nan(s, lane_across(s, far));
  return s;
}
template <class T, class F>
TS_DEV void store_eight(void* to, int column, F value) {
  u32 words[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) words[k] = T::pack(value(2 * k), value(2 * k + 1));
  store_shared_words((u16*)to + column, words);
}

}  // namespace ts
