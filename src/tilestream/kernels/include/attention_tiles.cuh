// What kernels of attention by warpgroups share: a tile of 64 queries against keys in shared memory, its weights times values,
// and its results. FEATURES is a head's, DTYPE its type.
#pragma once

namespace ts {

constexpr int FEATURE_BLOCKS = FEATURES / 8, CHUNKS = (FEATURES + 63) / 64;
using Results = Fragment<FEATURE_BLOCKS>;

TS_DEV float nothing() { return float_of(0xff800000u); }  // the score of a pair that is not kept: minus infinity

// Scores of 64 queries and 8 BLOCKS keys; both in chunks of 64 features.
template <int BLOCKS>
TS_DEV void score(Fragment<BLOCKS>& s, u32 query, u32 keys) {
  const u64 of_queries = mma_desc(query), of_keys = mma_desc(keys);
  clear(s);
  mma_fence();
#pragma unroll
  for (int k = 0; k < FEATURES / 16; ++k) {
    const u64 step = (k / 4) * (CHUNK_BYTES / 16) + 2 * (k % 4);
    Mma<DTYPE, BLOCKS, 0>::shared(s, of_queries + step, of_keys + step);
  }
  mma_commit();
}
// As the A operand of the next product; blocks of a last half step are zeros.
template <int BLOCKS, int WHOLE>
TS_DEV void pack_weights(Packed<WHOLE>& packed, const Fragment<BLOCKS>& s) {
  TS_LANES {
#pragma unroll
    for (int k = 0; k < 2 * BLOCKS; ++k) TS_REG(packed, k) = DTYPE::pack(TS_REG(s, 2 * k), TS_REG(s, 2 * k + 1));
  }
  zero_blocks<BLOCKS, WHOLE>(packed);
}
// Values lie [keys, features], in chunks of 64 features.
template <int BLOCKS>
TS_DEV void add_values(Results& out, const Packed<BLOCKS>& weights, u32 values) {
  const u64 of_values = mma_desc_columns(values, CHUNK_BYTES);
  mma_fence();
#pragma unroll
  for (int k = 0; k < BLOCKS / 2; ++k) MmaRows<DTYPE, FEATURE_BLOCKS>::registers(out, weights, 4 * k, of_values + 128 * k);
  mma_commit();
}
// Divided by the sums, to the queries' place, for bulk copies by the group's leader. A row of which no pair is kept is zero, or
// no number where that is not `safe`.
TS_DEV void put_results(u32 mine, int g, RowVector& sum, Results& out, bool safe = true) {
  row_sum(sum);
  TS_LANES {
    const u32 t = TS_LANE;
    float over[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) over[j] = safe && TS_REG(sum, j) == 0.0f ? 0.0f : 1.0f / TS_REG(sum, j);
#pragma unroll
    for (int i = 0; i < FEATURE_BLOCKS; i += 2) {
      u32 v[2][2];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int first = 4 * (i + k / 2) + 2 * (k % 2);
        v[k / 2][k % 2] = DTYPE::pack(TS_REG(out, first) * over[k % 2], TS_REG(out, first + 1) * over[k % 2]);
      }
      sts_blocks(mine + i / 8 * CHUNK_BYTES, t, i % 8, v);
    }
  }
  fence_async_shared();
  named_sync(GROUP_BARRIER + g, 128);
}

}  // namespace ts
