// Products of a shared tile's stages, and the vectors that its epilogues read. K as in shared_tile.cuh.
#pragma once
#include "row.cuh"

namespace ts {

// COLUMNS of a stage of both rings: `offset`s are of this warpgroup's rows and of the weight, `pitch`es from panel to panel.
template <class K, int COLUMNS, int BLOCKS>
TS_DEV void multiply(Fragment<BLOCKS>& acc, u32 left, u32 weight, u32 pitch) {
#pragma unroll
  for (int k = 0; k < COLUMNS / 16; ++k)
    Mma<typename K::T, BLOCKS, 0>::shared(acc, mma_desc_over_16(left + (k >> 2) * (K::ROWS * 8) + (k & 3) * 2),
                                          mma_desc_over_16(weight + (k >> 2) * pitch + (k & 3) * 2));
}

// The same of the gathered middle, `left` where a stage begins.
template <class K, int BLOCKS>
TS_DEV void multiply_gathered(Fragment<BLOCKS>& acc, u32 left, u32 weight, u32 pitch) {
#pragma unroll
  for (int k = 0; k < K::DEPTH / 16; ++k)
    Mma<typename K::T, BLOCKS, 0>::shared(acc, mma_desc_blocks_over_16(left + k * 2 * K::ROWS, K::ROWS),
                                          mma_desc_over_16(weight + (k >> 2) * pitch + (k & 3) * 2));
}

// COUNT elements of a vector of SIZE to shared memory, as fp32, by THREADS threads; zeros beyond its end.
template <class V, int COUNT, int SIZE, int THREADS>
TS_DEV void copy_vector(const void* from, u32 to, int first, int offset, int t) {
#pragma unroll 1
  for (int k = t; k < COUNT; k += THREADS) stsf(to + 4 * k, first + k < SIZE ? Io<V>::param(from, offset + first + k) : 0.0f);
}

}  // namespace ts
