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
// node of the same row of the next tile, which is read a tile ahead. In shared memory 16 bytes a row, the first three.
using Runs = Registers<int, 4>;

// A row of 64 columns in shared memory, padded so that four rows of a warp's pairs meet all banks once.
constexpr u32 SUM_ROW = 288;

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
    if (t < 64) {
#pragma unroll
      for (int k = 0; k < 3; ++k) sts32(to + 16 * t + 4 * (u32)k, (u32)TS_REG(runs, k));
    }
  }
}
// Where lane t's pair of block 0 lies, of its first row.
TS_DEV u32 sum_addr(u32 values, u32 t, int i, int j) { return values + (u32)row_of(t, j) * SUM_ROW + 32 * (u32)i + 8 * (t & 3); }

// Where `carry` has what a tile leaves of a node that begins in it, or before it. The first tile has none of the latter, so
// all have room in as many rows of FEATURES / 32 numbers as there are edges.
template <int FEATURES>
TS_DEV u64 carried(int tile, bool before) {
  return (u64)(2 * tile - (before ? 1 : 0)) * FEATURES;
}

// Columns from `column` on, which lie at `values` as rows of fp32.
template <class How, class V, int FEATURES>
TS_DEV void sum_to_nodes(u32 values, u32 runs, void* out, float* carry, int tile, int column) {
  TS_LANES {
    const u32 t = TS_LANE, lane = t & 31;
    const int col = column + 2 * (int)lane, first = (int)(t >> 5) * 16;
    int row = first;
    u32 run[4];  // node, begin, end
    lds_words(runs + 16 * (u32)row, run);
    if (first > 0 && (int)run[1] < first) row = (int)run[2];  // another warp has its first row here
    while (row < first + 16) {
      lds_words(runs + 16 * (u32)row, run);
      const int node = (int)run[0], begin = (int)run[1], past = (int)run[2], end = past < ROWS ? past : ROWS;
      if (node < 0) break;
      float a = How::nothing(), b = How::nothing();
      u32 at = values + (u32)row * SUM_ROW + 8 * lane;
#pragma unroll 8
      for (int k = row; k < end; ++k, at += SUM_ROW) {
        float x, y;
        lds64(at, x, y);
        a = How::of(a, x);
        b = How::of(b, y);
      }
      row = end;
      if (begin >= 0 && past <= ROWS) {
        const u64 to = (u64)(u32)node * FEATURES + (u32)col;
        if (FEATURES % 2 == 0) {
          if (col < FEATURES) Io<V>::global2(out, to, a, b);
        } else {
          if (col < FEATURES) Io<V>::global1(out, to, a);
          if (col + 1 < FEATURES) Io<V>::global1(out, to + 1, b);
        }
      } else {
        const u64 to = carried<FEATURES>(tile, begin < 0) + (u32)col;
        if (col < FEATURES) store_global(carry + to, a);
        if (col + 1 < FEATURES) store_global(carry + to + 1, b);
      }
    }
  }
}

// ---- further launches: nodes whose rows cross tiles, and 0 at those that have no rows. A node of more than HUB tiles is
// summed by aligned stretches of so many first, each by a warp, which leaves the sum where its first tile's was; so a launch
// behind that adds the stretches up. On the host a warpgroup is one thread.
constexpr int HUB = 32;
#ifdef TS_HOST
constexpr int JOINING = 4;
TS_DEV bool joins(int warp) { return warp >= 8; }
#else
constexpr int JOINING = 12;
TS_DEV bool joins(int) { return true; }
#endif

// The tiles of a node's rows.
struct Span {
  int first, last;
  TS_DEV Span(int begin, int end) : first(begin / ROWS), last((end - 1) / ROWS) {}
  TS_DEV bool crosses() const { return first != last; }
  TS_DEV bool hub() const { return last - first > HUB; }
  template <int FEATURES>
  TS_DEV u64 at(int tile) const {
    return carried<FEATURES>(tile, tile != first);
  }
};
// What `count` tiles left, every `step`-th from `tile` on; eight on their way at once.
template <class How, int FEATURES>
TS_DEV float over_tiles(float x, const float* carry, int tile, int count, int step) {
  const float* from = carry + carried<FEATURES>(tile, true);
  const u64 apart = (u64)(2 * step) * FEATURES;
  for (; count >= 8; count -= 8) {
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k, from += apart) v[k] = *from;
#pragma unroll
    for (int k = 0; k < 8; ++k) x = How::of(x, v[k]);
  }
  for (; count > 0; --count, from += apart) x = How::of(x, *from);
  return x;
}
// The tiles of a node from `from` to `to` of which it has some, into the place of the first of them.
template <class How, int FEATURES>
TS_DEV void join_stretch(float* carry, Span span, int from, int to) {
  from = from < span.first ? span.first : from;
  to = to > span.last ? span.last : to;
  for (int col = (int)lane_in_warp(); col < FEATURES; col += WARP) {
    float* const at = carry + span.at<FEATURES>(from) + col;
    *at = over_tiles<How, FEATURES>(*at, carry + col, from + 1, to - from, 1);
  }
}
template <class How, class V, int FEATURES>
TS_DEV void join_nodes(void* out, float* carry, const int* receivers, const int* starts, int nodes, int rows, int phase) {
  const int warp = warp_index();
  if (!joins(warp)) return;
  const int lane = (int)lane_in_warp(), own = cta_index() * JOINING + warp % JOINING, warps = cta_count() * JOINING;
#pragma unroll 1
  for (int base = own * WARP; base < nodes; base += warps * WARP) {
    const int node = base + lane < nodes ? base + lane : nodes - 1;
    const int from = load_global(starts + node), to = load_global(starts + node + 1);
#pragma unroll 1
    for (int k = 0; k < WARP && base + k < nodes; ++k) {
      const int begin = warp_value(from, k), end = warp_value(to, k);
      const Span span(begin, end);
      if (begin < end ? !span.crosses() || span.hub() != (phase == 2) : phase == 2) continue;
      for (int col = lane; col < FEATURES; col += WARP) {
        float x = 0.0f;
        if (begin < end) {
          const int next = phase == 2 ? (span.first / HUB + 1) * HUB : span.first + 1, step = phase == 2 ? HUB : 1;
          x = over_tiles<How, FEATURES>(carry[span.at<FEATURES>(span.first) + col], carry + col, next, (span.last - next) / step + 1, step);
        }
        Io<V>::global1(out, (u64)(u32)(base + k) * FEATURES + col, x);
      }
    }
  }
  if (phase == 2) return;
  const int tiles = (rows + ROWS - 1) / ROWS;
#pragma unroll 1
  for (int from = own * HUB; from < tiles; from += warps * HUB) {
    const int to = from + HUB < tiles ? from + HUB - 1 : tiles - 1, end = (to + 1) * ROWS < rows ? (to + 1) * ROWS : rows;
    const int here = load_global(receivers + from * ROWS), there = load_global(receivers + end - 1);
    const Span one(load_global(starts + here), load_global(starts + here + 1));
    if (one.hub()) join_stretch<How, FEATURES>(carry, one, from, to);
    const Span other(load_global(starts + there), load_global(starts + there + 1));
    if (there != here && other.hub()) join_stretch<How, FEATURES>(carry, other, from, to);
  }
}

}  // namespace ts
