// Rows of messages summed by the node that each goes to, always in the same order.
//
// The edges come sorted by node, so a node's are neighbours: SUM_THREADS / lanes nodes a CTA, `lanes` threads each, 16
// bytes of a row a thread, fp32 sums, rounded once. A node of more than LONG edges is summed by whole CTAs, so that one
// busy node (a pole of a globe, a row of a table of three) does not keep everybody waiting: by several of them,
// a piece of its columns each, which nobody has to join. These nodes are listed once, when edges are sorted (sorted_keys.cuh).
//
// Compiled behind SumParams (segments.py).
#pragma once
#include "lanes.cuh"

constexpr int SUM_THREADS = 512, LONG = 64, IN_FLIGHT = 8, MOST_EACH = 8;

template <class T>
struct Piece {  // 16 bytes of a row, in fp32
  static constexpr int COUNT = 16 / T::BYTES;
  float v[COUNT];
  TS_DEV void clear() {
    for (int k = 0; k < COUNT; ++k) v[k] = 0.0f;
  }
  TS_DEV void add(const uint4& q) {
    const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (T::BYTES == 2) {
        v[2 * k] += T::low(words[k]);
        v[2 * k + 1] += T::high(words[k]);
      } else {
        v[k] += ts::float_of(words[k]);
      }
    }
  }
  TS_DEV void add(const Piece& other) {
    for (int k = 0; k < COUNT; ++k) v[k] += other.v[k];
  }
  TS_DEV uint4 rounded() const {
    u32 words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (T::BYTES == 2)
        words[k] = T::pack(v[2 * k], v[2 * k + 1]);
      else
        words[k] = ts::bits_of(v[k]);
    }
    return {words[0], words[1], words[2], words[3]};
  }
};

// Edges `from`, `from + step`, ... of the sorted list, to `to`.
template <class T>
TS_DEV void sum_edges(Piece<T>& sum, const SumParams& p, int lane, int from, int to, int step) {
  for (int at = from; at < to; at += IN_FLIGHT * step) {
    u32 row[IN_FLIGHT];
    uint4 q[IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) row[k] = at + k * step < to ? (u32)p.order[at + k * step] : 0;
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) {
      q[k] = {0, 0, 0, 0};
      if (at + k * step < to) q[k] = p.rows[(u64)row[k] * p.lanes + lane];
    }
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) sum.add(q[k]);
  }
}

TS_DEV uint4 base_of(const SumParams& p, long long at) {
  if (p.base == nullptr) return {0, 0, 0, 0};
  return p.base[at];
}

// A piece of the columns of a busy node: `groups` of threads take edges in turn, and add up what they have by halves.
template <class T>
TS_DEV void sum_busy(Piece<T>* partial, const SumParams& p, int node, int piece, int pieces) {
  const int first = p.lanes * piece / pieces, width = p.lanes * (piece + 1) / pieces - first;
  if (width == 0) return;  // the same for the whole CTA
  const int groups = SUM_THREADS / width, group = (int)threadIdx.x / width, lane = first + (int)threadIdx.x % width;
  Piece<T> sum;
  sum.clear();
  if (group < groups) sum_edges(sum, p, lane, p.starts[node] + group, p.starts[node + 1], groups);
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int left = groups, half; left > 1; left = half) {
    half = (left + 1) / 2;
    if (group < left - half) {
      sum.add(partial[threadIdx.x + half * width]);
      partial[threadIdx.x] = sum;
    }
    __syncthreads();
  }
  if (group == 0) {
    const long long at = (long long)node * p.lanes + lane;
    sum.add(base_of(p, at));
    p.out[at] = sum.rounded();
  }
}

template <class T>
TS_DEV void sum_segments(const SumParams& p) {
  __shared__ Piece<T> partial[SUM_THREADS];
  __shared__ int starts[SUM_THREADS * MOST_EACH + 1];
  const int groups = SUM_THREADS / p.lanes, group = (int)threadIdx.x / p.lanes, lane = (int)threadIdx.x % p.lanes;
  const int first = (int)blockIdx.x * groups * p.each, left = p.nodes - first, items = p.busy[0];
  const int count = left < groups * p.each ? left : groups * p.each;
  for (int k = (int)threadIdx.x; k <= count; k += SUM_THREADS) starts[k] = p.starts[first + k];
  for (int item = (int)blockIdx.x; item < items; item += (int)gridDim.x) {
    const int which = p.busy[2 + 2 * item];
    sum_busy(partial, p, p.busy[1 + 2 * item], which >> 16, which & 0xffff);
  }
  __syncthreads();
  if (group >= groups) return;
  for (int k = group; k < count; k += groups) {
    const int from = starts[k], to = starts[k + 1];
    if (to - from > LONG) continue;
    const long long at = (long long)(first + k) * p.lanes + lane;
    const uint4 base = base_of(p, at);
    Piece<T> sum;
    sum.clear();
    sum_edges(sum, p, lane, from, to, 1);
    sum.add(base);
    p.out[at] = sum.rounded();
  }
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS, 2) tilestream_sum(const __grid_constant__ SumParams p) {
  sum_segments<ts::SUM_DTYPE>(p);
}
