// Ragged pipelines: for each node what its edges' values sum to. A node is a team of lanes, which share its features out and
// go along its edges, some of them on their way at once. Nodes of more than LONG edges are whole CTAs', so that one busy node
// (a pole of a globe, a row of a table of three) does not keep everybody waiting: `busy` lists them. Programs of one pass
// split such a node by pieces of its edges, whose partial sums the CTA that comes last adds up, always in the same order.
//
// Compiled behind Shape, Params and what is generated of the pipeline (segments.cu.j2).
#pragma once
#include "lanes.cuh"
#include "math.cuh"

#ifdef TS_HOST
#define TS_COLD inline
#else
#define TS_COLD __device__ __noinline__
#endif

namespace ts {

constexpr int BOUNDS = -1;  // what a record says where bounds go down, or beyond the edges

struct Sum {
  static TS_DEV float of(float a, float b) { return a + b; }
};
struct Larger {
  static TS_DEV float of(float a, float b) { return max_nan(a, b); }
};
struct Smaller {
  static TS_DEV float of(float a, float b) { return min_nan(a, b); }
};
struct Times {
  static TS_DEV float of(float a, float b) { return a * b; }
};

template <class T>
TS_DEV float rounded_to(float x) {
  if constexpr (T::BYTES == 2)
    return T::low(T::pack(x, 0.0f));
  else
    return x;
}

// A thread's part of a node: `lane` of those that share the features, and which of the edges side by side.
template <class S>
struct TeamOf {
  static constexpr int TEAM = S::LANES * S::AT_ONCE;
  int lane, edge;
  TS_DEV TeamOf() : lane(lanes::lane() % S::LANES), edge(lanes::lane() % TEAM / S::LANES) {}
  TS_DEV int slot(int r) const { return lane + r * S::LANES; }
  TS_DEV int run(int r) const { return S::RUNS == 1 ? 0 : slot(r) / S::PER_RUN; }
  TS_DEV int inner(int r) const { return (S::RUNS == 1 ? slot(r) : slot(r) % S::PER_RUN) * S::VECTOR; }
  TS_DEV bool there(int r) const {
    constexpr bool whole = S::LANES * S::VECTORS == S::PER_RUN * S::RUNS && S::PER_RUN * S::VECTOR == S::RUN;
    return whole || (run(r) < S::RUNS && inner(r) < S::RUN);
  }
};

// Of WIDTH neighbouring lanes of a team of TEAM.
template <class Combine, int WIDTH, int TEAM>
TS_DEV float over_lanes(float x) {
#pragma unroll
  for (int far = 1; far < WIDTH; far *= 2) x = Combine::of(x, lanes::across_team<TEAM>(x, far));
  return x;
}

// ---- rows: words of up to 16 bytes at once, two elements of 16 bits a word or one
template <int AT_ONCE, int BYTES>
TS_DEV void fetch(u32* words, const char* from, bool there) {
  constexpr int EACH = AT_ONCE < 4 ? 1 : AT_ONCE / 4;
#pragma unroll
  for (int k = 0; k < BYTES / AT_ONCE; ++k) {
    if (there) {
      lanes::load_words<AT_ONCE>(from + k * AT_ONCE, words + k * EACH);
    } else {
#pragma unroll
      for (int w = 0; w < EACH; ++w) words[k * EACH + w] = 0;
    }
  }
}
template <int AT_ONCE, int BYTES>
TS_DEV void put(char* to, const u32* words) {
  constexpr int EACH = AT_ONCE < 4 ? 1 : AT_ONCE / 4;
#pragma unroll
  for (int k = 0; k < BYTES / AT_ONCE; ++k) lanes::store_words<AT_ONCE>(to + k * AT_ONCE, words + k * EACH);
}
// PER elements a word.
template <class T, int COUNT, int PER>
TS_DEV void unpack(float (&x)[COUNT], const u32* words) {
#pragma unroll
  for (int k = 0; k < COUNT; ++k) {
    const u32 word = words[k / PER];
    if constexpr (T::BYTES == 4)
      x[k] = float_of(word);
    else
      x[k] = k % PER ? T::high(word) : T::low(word);
  }
}
template <class T, int COUNT, int PER>
TS_DEV void pack_words(u32* words, const float* x) {
#pragma unroll
  for (int k = 0; k < COUNT; k += PER) {
    if constexpr (T::BYTES == 4)
      words[k] = bits_of(x[k]);
    else
      words[k / PER] = T::pack(x[k], PER == 2 ? x[k + 1] : 0.0f);
  }
}

template <class T>
TS_DEV void put_one(char* to, float x) {
  u32 word;
  pack_words<T, 1, 1>(&word, &x);
  lanes::store_words<T::BYTES>(to, &word);
}
TS_DEV long long least(long long a, long long b) { return a < b ? a : b; }

// ---- a softmax whose maximum runs: exp(x - most), where nothing is left of what lies infinitely far below
TS_DEV float share(float x, float most) { return x == most ? 1.0f : exp_(x - most); }
// Score `j` of each of the first `count` edges becomes its weight; what is left of those before.
template <int MOST, class Scores>
TS_DEV float weights(Scores (&w)[MOST], int j, int count, float& most, float& sum) {
  const float before = most;
#pragma unroll
  for (int k = 0; k < MOST; ++k)
    if (k < count) most = w[k].v[j] > most ? w[k].v[j] : most;
  const float keep = share(before, most);
  sum *= keep;
#pragma unroll
  for (int k = 0; k < MOST; ++k)
    if (k < count) sum += w[k].v[j] = share(w[k].v[j], most);
  return keep;
}
TS_DEV void shares(float& most, float other, float& own, float& others) {
  const float all = other > most ? other : most;
  own = share(most, all), others = share(other, all);
  most = all;
}
// NaN where the maximum is infinite, as exp(x - max x) is.
TS_DEV float weighed(float most, float sum, float value) { return quotient(value, sum) + (most - most); }

// The row that an index names; the largest number stands for all that are larger.
template <bool WIDE>
TS_DEV u32 row_of(const void* index, int at) {
  const u64 row = (u64)lanes::load_index(index, at, WIDE);
  return !WIDE || row < ~0u ? (u32)row : ~0u;
}
// What names the row of an edge that does not exist: the kernel ends.
template <class Pass, class Params>
TS_COLD void give_up_at(const Params& p, int at, int to, int step) {
  for (; at < to; at += step)
    Pass::indices(p, [&](int index, bool wide, long long rows) {
      const long long row = lanes::load_index(p.tensors[index], at, wide);
      if ((u64)row >= (u64)rows) lanes::give_up(p.record, index, at, rows, row);
    });
}

// ---- edges: all rows of a batch are asked for before any is used. Those that are not there are zeros, which nothing reads:
// what is left open the compiler keeps from the batch before, in local memory.
template <class Pass, bool WHOLE, class Params, class Team, class Fixed, class Node>
TS_DEV void batch(const Params& p, const Team& t, const Fixed& f, const Node& n, typename Pass::Sums& s, int at, int to, int step) {
  typename Pass::Row row[Pass::IN_FLIGHT];
  bool exist = true;
#pragma unroll
  for (int k = 0; k < Pass::IN_FLIGHT; ++k) {
    if constexpr (!WHOLE) row[k] = {};
    if (WHOLE || k * step < to - at) Pass::find(p, at + k * step, row[k]);
  }
#pragma unroll
  for (int k = 0; k < Pass::IN_FLIGHT; ++k) exist = exist & Pass::exist(p, row[k]);
  if (!exist) give_up_at<Pass>(p, at, to, step);
#pragma unroll
  for (int k = 0; k < Pass::IN_FLIGHT; ++k)
    if (WHOLE || k * step < to - at) Pass::load(p, t, at + k * step, row[k]);
  typename Pass::Scores w[Pass::IN_FLIGHT];
  if constexpr (Pass::Scores::COUNT > 0) {
#pragma unroll
    for (int k = 0; k < Pass::IN_FLIGHT; ++k)
      if (WHOLE || k * step < to - at) Pass::score(p, t, f, n, row[k], w[k]);
    Pass::weigh(w, WHOLE ? Pass::IN_FLIGHT : (to - at - 1) / step + 1, s);
  }
#pragma unroll
  for (int k = 0; k < Pass::IN_FLIGHT; ++k)
    if (WHOLE || k * step < to - at) Pass::step(p, t, f, n, row[k], w[k], at + k * step, s);
}
template <class Pass, class Params, class Team, class Fixed, class Node>
TS_DEV void over_edges(const Params& p, const Team& t, const Fixed& f, const Node& n, typename Pass::Sums& s, int from, int to, int step) {
  int at = from;
#pragma unroll 1
  for (; (Pass::IN_FLIGHT - 1) * step < to - at; at += Pass::IN_FLIGHT * step) batch<Pass, true>(p, t, f, n, s, at, to, step);
  if (Pass::IN_FLIGHT > 1 && at < to) batch<Pass, false>(p, t, f, n, s, at, to, step);
}

// The sums of teams that are neighbours in a warp, FIRST lanes apart and more, in all of them.
template <class Sums, int FIRST, int LAST, class Across>
TS_DEV void merge_lanes(Sums& s, const Across& across) {
#pragma unroll
  for (int far = FIRST; far < LAST; far *= 2) {
    Sums other;
#pragma unroll
    for (int k = 0; k < Sums::COUNT; ++k) other.v[k] = across(s.v[k], far);
    s.add(other);
  }
}

// Who goes along the edges of a node, and what becomes of its sums: one team,
template <class P>
struct Alone {
  int from, to;
  TS_DEV bool writes(const typename P::Team& t) const { return t.edge == 0; }
  template <class Pass, class Params, class Fixed, class Node>
  TS_DEV bool sum(const Params& p, const typename P::Team& t, const Fixed& f, const Node& n, typename Pass::Sums& s) const {
    constexpr int LANES = P::Shape::LANES, TEAM = P::Team::TEAM;
    over_edges<Pass>(p, t, f, n, s, from + t.edge, to, P::Shape::AT_ONCE);
    merge_lanes<typename Pass::Sums, LANES, TEAM>(s, [](float v, int far) { return lanes::across_team<TEAM>(v, far); });
    return true;
  }
};
// or a CTA, whose teams take edges in turn and add up what they have, in a warp by halves and over the warps in order. Of
// several CTAs, each with a piece of the edges, the one that comes last adds up what all have: `sum` is false in the others.
// Between two passes they would wait for each other: the next one is another launch's, which finds the sums in memory.
template <class P>
struct Together {
  int from, to;  // edges of the node
  int first, last;  // of them, those of this CTA
  int slot, piece, pieces;  // of the workspace, that of the node's first piece; which this is; how many
  u32 shared;
  static constexpr int LANES = P::Shape::LANES, GROUPS = P::THREADS / LANES, WARPS = P::THREADS / 32;
  TS_DEV bool writes(const typename P::Team&) const { return lanes::thread() < LANES; }
  template <class Pass, class Params, class Fixed, class Node>
  TS_DEV bool sum(const Params& p, const typename P::Team& t, const Fixed& f, const Node& n, typename Pass::Sums& s) const {
    using Sums = typename Pass::Sums;
    float* const whole = p.merged + ((u64)slot * P::PASSES + Pass::NUMBER) * (P::MOST_SUMS * LANES) + t.lane;
    if (pieces > 1 && Pass::NUMBER < p.phase) {
      for (int k = 0; k < Sums::COUNT; ++k) s.v[k] = lanes::load_shared(whole + k * LANES);
      return true;
    }
    over_edges<Pass>(p, t, f, n, s, first + lanes::thread() / LANES, last, GROUPS);
    if constexpr (Pass::SUMS > 0) merge(s);
    if (pieces == 1) return true;
    if (!share(p, t, s)) return false;
    if (Pass::NUMBER + 1 == P::PASSES) return true;
    if (lanes::thread() < LANES)
      for (int k = 0; k < Sums::COUNT; ++k) lanes::store_shared(whole + k * LANES, s.v[k]);
    return false;
  }
  template <class Sums>
  TS_DEV void merge(Sums& s) const {
    merge_lanes<Sums, LANES, 32>(s, [](float v, int far) { return lanes::across(v, far); });
    const u32 lane = (u32)lanes::lane() % LANES;
    if (lanes::lane() < LANES)
      for (int k = 0; k < Sums::COUNT; ++k) lanes::put32(shared + 4 * ((u32)(lanes::warp() * Sums::COUNT + k) * LANES + lane), bits_of(s.v[k]));
    lanes::all_together();
    s.clear();
#pragma unroll 1
    for (int w = 0; w < WARPS; ++w) {
      Sums other;
      for (int k = 0; k < Sums::COUNT; ++k) other.v[k] = float_of(lanes::get32(shared + 4 * ((u32)(w * Sums::COUNT + k) * LANES + lane)));
      s.add(other);
    }
    lanes::all_together();
  }
  template <class Params, class Sums>
  TS_DEV bool share(const Params& p, const typename P::Team& t, Sums& s) const {
    float* const partials = p.partials + (u64)slot * (Sums::COUNT * LANES);
    if (lanes::thread() < LANES)
      for (int k = 0; k < Sums::COUNT; ++k) lanes::store_shared(partials + (piece * Sums::COUNT + k) * LANES + lanes::thread(), s.v[k]);
    lanes::all_together();
    if (lanes::thread() == 0) {
      const u32 before = count_up(p.arrived + slot);
      if (before + 1 == (u32)pieces) p.arrived[slot] = 0;
      lanes::put32(shared, before + 1 == (u32)pieces);
    }
    lanes::all_together();
    const bool is_last = lanes::get32(shared) != 0;
    lanes::all_together();
    if (!is_last) return false;
    s.clear();
#pragma unroll 1
    for (int k = lanes::thread() / LANES; k < pieces; k += GROUPS) {
      Sums other;
      for (int c = 0; c < Sums::COUNT; ++c) other.v[c] = lanes::load_shared(partials + (k * Sums::COUNT + c) * LANES + t.lane);
      s.add(other);
    }
    if constexpr (Sums::SUMS > 0) merge(s);
    return true;
  }
};

template <class Params>
TS_DEV void bounds_of(const Params& p, int node, int& from, int& to) {
  from = (int)lanes::load_index(p.starts, node, 0), to = (int)lanes::load_index(p.starts, node + 1, 0);
  if (from < 0 || to < from || to > p.edges) lanes::give_up(p.record, BOUNDS, node, from, to);
}

// An item of `busy`: a node, or one of several pieces of its edges. Partial sums of a node that begins at edge `from` lie from
// slot 2 from / each on: nodes of more than `each` edges that follow each other have 2 slots and more for every `each` edges.
template <class P>
TS_DEV void busy_node(const typename P::Params& p, const typename P::Team& t, const typename P::Fixed& f, u32 shared, int item) {
  const int node = p.busy[1 + 2 * item], which = p.busy[2 + 2 * item], piece = which >> 16, listed = which & 0xffff;
  int from, to;
  bounds_of(p, node, from, to);
  const int most = (p.edges - 1) / (P::SLOTS / 2) + 1, each = most > P::PIECE_EDGES ? most : P::PIECE_EDGES;
  const int wanted = (to - from - 1) / each + 1, pieces = wanted < listed ? wanted : listed;
  if (piece >= pieces || (p.phase > 0 && pieces == 1)) return;
  const int part = (to - from - 1) / pieces + 1, first = from + piece * part, slot = (int)(2ll * from / each);
  P::node(p, t, f, node, Together<P>{from, to, first, to - first < part ? to : first + part, slot, piece, pieces, shared});
}

template <class P>
TS_DEV void segments(const typename P::Params& p, u32 shared) {
  let_next_kernel_start();
  await_kernel_before();
  const typename P::Team t;
  typename P::Fixed f;
  P::fixed(p, t, f);
  if (p.busy != nullptr) {
    const int items = p.busy[0];
#pragma unroll 1
    for (int item = lanes::block(); item < items; item += lanes::blocks()) busy_node<P>(p, t, f, shared, item);
  }
  constexpr int TEAMS = P::THREADS / P::Team::TEAM;
#pragma unroll 1
  for (int node = lanes::block() * TEAMS + lanes::thread() / P::Team::TEAM; node < p.nodes; node += lanes::blocks() * TEAMS) {
    int from, to;
    bounds_of(p, node, from, to);
    if (p.busy != nullptr && to - from > P::LONG) continue;
    P::node(p, t, f, node, Alone<P>{from, to});
  }
}

}  // namespace ts
