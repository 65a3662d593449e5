// Rows in the order of the nodes that they go to, summed to these where they are made. A warpgroup puts 64 columns of its
// tile in shared memory, in fp32, and each warp sums those nodes up whose first row here is one of its 16. What lies in one
// tile whole is a result. Of a node that crosses tiles each tile leaves what it has in `carry`, and a second launch, which
// begins when all are there, adds these up in the order of the tiles: the same bits in every run.
#pragma once

namespace ts {

struct Added {
  static TS_DEV float nothing() { return 0.0f; }
  static TS_DEV float of(float a, float b) { return a + b; }
};
struct Largest {
  static TS_DEV float nothing() { return float_of(0xff800000u); }
  static TS_DEV float of(float a, float b) { return max_nan(a, b); }
};
struct Smallest {
  static TS_DEV float nothing() { return float_of(0x7f800000u); }
  static TS_DEV float of(float a, float b) { return min_nan(a, b); }
};

// Of row t % 64 of a tile: its node, or -1; where that node's rows begin and end, counted from the tile's first row; and the
// node of the same row of the next tile, which is read a tile ahead.
using Runs = Registers<int, 4>;
constexpr u32 WORDS = 4 * ROWS;  // in shared memory the first three, one behind the other

template <class P>
TS_DEV void find_next_runs(Runs& runs, const P& p, const void* receivers, int tile) {
  TS_LANES {
    const int row = tile * ROWS + (int)(TS_LANE & 63);
    TS_REG(runs, 3) = row < p.rows ? load_global((const int*)receivers + row) : -1;
  }
}
TS_DEV void find_runs(Runs& runs, const void* starts, int tile) {
  TS_LANES {
    const u32 t = TS_LANE;
    (void)t;
    const int node = TS_REG(runs, 3);
    TS_REG(runs, 0) = node;
    TS_REG(runs, 1) = node < 0 ? 0 : load_global((const int*)starts + node) - tile * ROWS;
    TS_REG(runs, 2) = node < 0 ? ROWS : load_global((const int*)starts + node + 1) - tile * ROWS;
  }
}
TS_DEV void put_runs(const Runs& runs, u32 to) {
  TS_LANES {
    const u32 t = TS_LANE;
#pragma unroll
    for (int k = 0; k < 3; ++k)
      if (t < 64) sts32(to + (u32)k * WORDS + 4 * t, (u32)TS_REG(runs, k));
  }
}

// Where `carry` has what a tile leaves of a node that begins in it, or before it. The first tile has none of the latter, so
// all have room in as many rows of FEATURES / 32 numbers as there are edges.
template <int FEATURES>
TS_DEV u64 carried(int tile, bool before) {
  return (u64)(2 * tile - (before ? 1 : 0)) * FEATURES;
}

// Columns from `column` on, which lie at `values` as a tile of fp32.
template <class How, class V, int FEATURES>
TS_DEV void sum_to_nodes(u32 values, u32 runs, void* out, float* carry, int tile, int column) {
  TS_LANES {
    const u32 t = TS_LANE, lane = t & 31;
    const int col = column + 2 * (int)lane, first = (int)(t >> 5) * 16;
    const auto word = [&](int k, int row) { return (int)lds32(runs + (u32)k * WORDS + 4 * (u32)row); };
    int row = first;
    if (first > 0 && word(0, first) >= 0 && word(0, first) == word(0, first - 1)) row = word(2, first);
    while (row < first + 16 && word(0, row) >= 0) {
      const int node = word(0, row), begin = word(1, row), past = word(2, row), end = past < ROWS ? past : ROWS;
      float a = How::nothing(), b = How::nothing();
#pragma unroll 4
      for (int k = row; k < end; ++k) {
        const u32 unit = 2 * ((lane >> 2) & 3) + ((lane >> 1) & 1);
        const u32 at = values + (lane >> 4) * CHUNK_BYTES + (u32)k * 128 + ((unit ^ ((u32)k & 7)) << 4) + (lane & 1) * 8;
        float x, y;
        Io<f32>::load(at, x, y);
        a = How::of(a, x);
        b = How::of(b, y);
      }
      row = end;
      if (begin >= 0 && past <= ROWS) {
        const u64 to = (u64)node * FEATURES + col;
        if (FEATURES % 2 == 0) {
          if (col < FEATURES) Io<V>::global2(out, to, a, b);
        } else {
          if (col < FEATURES) Io<V>::global1(out, to, a);
          if (col + 1 < FEATURES) Io<V>::global1(out, to + 1, b);
        }
      } else {
        const u64 to = carried<FEATURES>(tile, begin < 0) + col;
        if (col < FEATURES) store_global(carry + to, a);
        if (col + 1 < FEATURES) store_global(carry + to + 1, b);
      }
    }
  }
}

// The second launch: nodes that cross tiles, and 0 at those that have no rows. On the host a warpgroup is one thread.
#ifdef TS_HOST
constexpr int JOINING = 4;
TS_DEV bool joins(int warp) { return warp >= 8; }
#else
constexpr int JOINING = 12;
TS_DEV bool joins(int) { return true; }
#endif

template <class How, class V, int FEATURES>
TS_DEV void join_nodes(void* out, const float* carry, const int* starts, int nodes) {
  const int warp = warp_index();
  if (!joins(warp)) return;
  const int lane = (int)lane_in_warp(), own = cta_index() * JOINING + warp % JOINING, step = cta_count() * JOINING * WARP;
#pragma unroll 1
  for (int base = own * WARP; base < nodes; base += step) {
    const int node = base + lane < nodes ? base + lane : nodes - 1;
    const int from = load_global(starts + node), to = load_global(starts + node + 1);
#pragma unroll 1
    for (int k = 0; k < WARP && base + k < nodes; ++k) {
      const int begin = warp_value(from, k), end = warp_value(to, k), first = begin / ROWS, last = (end - 1) / ROWS;
      if (begin < end && first == last) continue;
      for (int col = lane; col < FEATURES; col += WARP) {
        float x = 0.0f;
        if (begin < end) x = load_global(carry + carried<FEATURES>(first, false) + col);
#pragma unroll 8
        for (int tile = first + 1; tile <= last; ++tile) x = How::of(x, load_global(carry + carried<FEATURES>(tile, true) + col));
        Io<V>::global1(out, (u64)(base + k) * FEATURES + col, x);
      }
    }
  }
}

}  // namespace ts
