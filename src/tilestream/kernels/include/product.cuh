// What both schedulers of products have: a page's product, the loop over pages, and what goes beside the sums.
#pragma once
#include "collectives.cuh"
#include "row.cuh"

namespace ts {

template <class T, int BLOCKS, bool BY_COLUMNS>
struct Product : Mma<T, BLOCKS, 0> {};
template <class T, int BLOCKS>
struct Product<T, BLOCKS, true> : MmaMixed<T, BLOCKS> {};

// COLUMNS of a page of both operands, from descriptors' addresses of this warpgroup's rows and of the weight: panels of 64
// columns, of ROWS rows and `pitch` apart. With BLOCKED left operands are blocks of 8 columns without a swizzle. With FIRST
// the sums begin here. A weight that lies BY_COLUMNS comes in panels of 64 columns, of a row for each of the page's depth, and
// `pitch` apart.
template <class T, int COLUMNS, int ROWS, bool BLOCKED, bool FIRST, bool BY_COLUMNS, int BLOCKS>
TS_DEV void multiply(Fragment<BLOCKS>& acc, u32 left, u32 weight, u32 pitch) {
#pragma unroll
  for (int k = 0; k < COLUMNS / 16; ++k) {
    const u64 a = BLOCKED ? mma_desc_blocks_over_16(left + k * 2 * ROWS, ROWS) : mma_desc_over_16(left + (k >> 2) * (ROWS * 8) + (k & 3) * 2);
    const u64 b = BY_COLUMNS ? mma_desc_columns_over_16(weight + k * 128, pitch) : mma_desc_over_16(weight + (k >> 2) * pitch + (k & 3) * 2);
    using M = Product<T, BLOCKS, BY_COLUMNS>;
    if constexpr (FIRST) {
      if (k == 0) {
        M::start(acc, a, b);
        continue;
      }
    }
    M::shared(acc, a, b);
  }
}

// Pages `from` to `count` of a sum. While one is multiplied the one before is, too; then that is given back.
template <class P, class M>
TS_DEV void sum_pages(P& pages, int from, int count, const M& multiply) {
#pragma unroll 1
  for (int i = from; i < count; ++i) {
    pages.wait_full();
    multiply(i);
    mma_commit();
    if (i > 0) {
      mma_wait<1>();
      pages.release();
    }
    pages.advance();
  }
}

// Two neighbouring elements of a row or a vector, as they lie in memory: of columns c and the next, `last` at most.
template <class V>
struct Pair {
  template <bool ALIGNED>
  static TS_DEV void load(const void* from, int c, u32* w, int last = 0x7fffffff) {
    const int next = c < last ? c + 1 : last;
    if constexpr (V::BYTES == 4) {
      w[0] = load_global((const u32*)from + c);
      w[1] = load_global((const u32*)from + next);
    } else if constexpr (ALIGNED) {
      w[0] = load_global((const u32*)from + (c >> 1));
    } else {
      w[0] = load_global((const u16*)from + c) | (u32)load_global((const u16*)from + next) << 16;
    }
  }
  static TS_DEV void values(const u32* w, float& a, float& b) {
    if constexpr (V::BYTES == 4) {
      a = float_of(w[0]);
      b = float_of(w[1]);
    } else {
      a = V::low(w[0]);
      b = V::high(w[0]);
    }
  }
};

}  // namespace ts
