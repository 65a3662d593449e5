// Float32 weights as the bf16 parts that products by parts read (ir/float32.py): a warp a row, a lane a column.
//
// Compiled for WEIGHTS, COPIES, PART_ORDER and LARGEST, behind PartsWeight and PartsParams (weight_parts.py).
#pragma once
#include "lanes.cuh"

using namespace ts;

constexpr int WARPS = 8, LANES = 32;

// The bits of x as bf16; what is left of x.
TS_DEV u32 taken(float& x, bool last) {
  const float held = last ? x : min_nan(max_nan(x, -LARGEST), LARGEST);
  const u32 bits = bf16::pack(held, 0.0f);
  x -= bf16::low(bits);
  return bits;
}

TS_LANES_KERNEL(32 * WARPS, 6) tilestream_weight_parts(const TS_PARAM PartsParams p) {
  constexpr int order[COPIES] = PART_ORDER;
  int row = lanes::block() * WARPS + lanes::warp(), m = 0;
  for (; m < WEIGHTS && row >= p.weights[m].rows; ++m) row -= p.weights[m].rows;
  if (m == WEIGHTS) return;
  const PartsWeight& mine = p.weights[m];
  u16* const to = (u16*)mine.to + (long long)row * COPIES * mine.columns;
  for (int c = lanes::lane(); c < mine.columns; c += LANES) {
    float x = load_global(mine.from + row * mine.row_stride + c * mine.column_stride);
    u32 parts[3];
#pragma unroll
    for (int k = 0; k < 3; ++k) parts[k] = taken(x, k == 2);
#pragma unroll
    for (int k = 0; k < COPIES; ++k) lanes::store_words<2>(to + k * mine.columns + c, parts + order[k]);
  }
}
