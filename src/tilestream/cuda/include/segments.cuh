// Rows of messages summed by the node that each goes to, always in the same order.
//
// The edges come sorted by node, so a node's are neighbours: SUM_THREADS / lanes nodes a CTA, `lanes` threads each, 16
// bytes of a row a thread, fp32 sums, rounded once. A node of more than LONG edges is summed by the whole CTA, so that one
// busy node (a pole of a globe) does not keep everybody waiting.
#pragma once
#include "lanes.cuh"

constexpr int SUM_THREADS = 512, LONG = 64, IN_FLIGHT = 4;

struct KeyParams {
  const void* index;
  int* keys;
  long long nodes;
  int edges, wide;  // int64, not int32
  u64* record;  // of lanes::give_up
};
struct StartParams {
  const int* keys;  // ascending
  int* starts;      // of each node's edges, and the end
  int edges, nodes;
};
struct SumParams {
  const uint4* base;  // added to, or null
  const uint4* rows;
  const long long* order;
  const int* starts;
  uint4* out;
  int nodes, lanes;
};

// Nodes as they are sorted. Below zero an index counts from the end; one that is no node ends the kernel, as in torch,
// and is named in the record.
extern "C" __global__ void __launch_bounds__(256) tilestream_keys(const __grid_constant__ KeyParams p) {
  const int at = (int)(blockIdx.x * 256 + threadIdx.x);
  if (at >= p.edges) return;
  const long long found = p.wide ? ((const long long*)p.index)[at] : ((const int*)p.index)[at];
  const long long node = found < 0 ? found + p.nodes : found;
  if (node < 0 || node >= p.nodes) lanes::give_up(p.record, 0, at, p.nodes, found);
  p.keys[at] = (int)node;
}

extern "C" __global__ void __launch_bounds__(256) tilestream_starts(const __grid_constant__ StartParams p) {
  const int at = (int)(blockIdx.x * 256 + threadIdx.x);
  if (at > p.edges) return;
  const int before = at == 0 ? -1 : p.keys[at - 1], here = at == p.edges ? p.nodes : p.keys[at];
  for (int node = before + 1; node <= here; ++node) p.starts[node] = at;
}

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
  int at = from;
  for (; at + (IN_FLIGHT - 1) * step < to; at += IN_FLIGHT * step) {
    uint4 q[IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) q[k] = p.rows[p.order[at + k * step] * p.lanes + lane];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) sum.add(q[k]);
  }
  for (; at < to; at += step) sum.add(p.rows[p.order[at] * p.lanes + lane]);
}

template <class T>
TS_DEV void finish(Piece<T>& sum, const SumParams& p, int node, int lane) {
  const long long at = (long long)node * p.lanes + lane;
  if (p.base != nullptr) sum.add(p.base[at]);
  p.out[at] = sum.rounded();
}

template <class T>
TS_DEV void sum_segments(const SumParams& p) {
  __shared__ Piece<T> partial[SUM_THREADS];
  const int groups = SUM_THREADS / p.lanes, group = (int)threadIdx.x / p.lanes, lane = (int)threadIdx.x % p.lanes;
  const int node0 = (int)blockIdx.x * groups, node = node0 + group;
  Piece<T> sum;
  if (group < groups && node < p.nodes) {
    const int from = p.starts[node], to = p.starts[node + 1];
    if (to - from <= LONG) {
      sum.clear();
      sum_edges(sum, p, lane, from, to, 1);
      finish(sum, p, node, lane);
    }
  }
  for (int other = node0; other < node0 + groups && other < p.nodes; ++other) {
    const int from = p.starts[other], to = p.starts[other + 1];
    if (to - from <= LONG) continue;  // the same for the whole CTA
    sum.clear();
    if (group < groups) sum_edges(sum, p, lane, from + group, to, groups);
    partial[threadIdx.x] = sum;
    __syncthreads();
    if (group == 0) {
      for (int k = 1; k < groups; ++k)
        for (int c = 0; c < Piece<T>::COUNT; ++c) sum.v[c] += partial[k * p.lanes + lane].v[c];
      finish(sum, p, other, lane);
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS) tilestream_sum(const __grid_constant__ SumParams p) {
  sum_segments<ts::SUM_DTYPE>(p);
}
