// Edges sorted by node: a stable radix sort of (node, edge) by as many bits as nodes have, and where each node's edges
// start. The same input gives the same order.
//
// tilestream_count    reads the index, checks it, counts the digits of all passes, and sees whether the nodes ascend.
// tilestream_scatter  one pass: a tile of edges is ranked by a digit in shared memory, learns from the tiles in front how
//                     many of their edges have each digit (a look back over what they have posted, without a launch in
//                     between: Merrill and Garland 2016; Adinets and Merrill 2022), and goes where it belongs.
// tilestream_starts   where each node's edges start, and which nodes have many.
// tilestream_few      all of it for one tile of edges.
// tilestream_picked   what else edges have an index of, in sorted order: src[order].
//
// Nodes that ascend already are not sorted: the passes return at once, and the last one writes 0, 1, 2, ...
//
// Compiled for THREADS a CTA behind KeyParams (sorted_keys.py).
#pragma once
#include "lanes.cuh"

constexpr int WARP = 32, WARPS = THREADS / WARP, DIGITS = 1024, OWN = DIGITS / THREADS;
constexpr int EACH = 16, TILE = EACH * THREADS;     // edges of a thread, and of a CTA
constexpr int IN_FLIGHT = 16, COUNTED = 8, READ = 4;  // words and edges that a thread asks for at once
constexpr int LONG = 64, PIECE_EDGES = 256, MOST_PIECES = 1024;
constexpr int LONG_GAP = 32;  // nodes without edges behind each other: a warp writes more than so many together

constexpr long long DROPPED = -(1LL << 31);
constexpr u32 NOBODY = ~0u;                                              // the key of no edge: behind all others
constexpr u32 OF_TILE = 1u << 30, OF_ALL = 1u << 31, COUNT = (1u << 30) - 1;  // posted: of this tile, or of those in front too

// Words of `head`, zero when `count` begins.
constexpr int DESCENDS = 0, TOTALS = 8;

// Shared memory: counters of 16 bits a warp and digit, later the tile's edges; by digit, where it goes; by warp, sums.
static_assert(8 * EACH * WARP >= 2 * DIGITS);
struct Room {
  u32 pairs, first, offset, sums;
  TS_DEV explicit Room(u32 base)
      : pairs(base), first(base + 8 * TILE), offset(first + 4 * DIGITS), sums(offset + 4 * DIGITS) {}
  TS_DEV u32 counter(int warp, int digits, u32 digit) const { return pairs + 2 * ((u32)(warp * digits) + digit); }
  TS_DEV u32 edge(int place) const { return pairs + 8 * (u32)place; }
  TS_DEV u32 node(int place) const { return edge(place) + 4; }
};

// Whether an index says that its edge is of no node: behind those of all nodes, and in no list.
TS_DEV bool dropped(const KeyParams& p, long long index) { return p.drops && index == DROPPED; }

// The row that an index names; below zero: none.
TS_DEV long long row_of(const KeyParams& p, long long index) {
  if (index >= 0) return index;
  return dropped(p, index) ? p.nodes : p.wraps ? index + p.nodes : index;
}

// Of an index that was found right.
TS_DEV u32 node_at(const KeyParams& p, int at) { return (u32)row_of(p, lanes::load_index(p.index, at, p.wide)); }

// Nodes of COUNT_EACH edges from `first` on; NOBODY behind the last edge. An index that is no node ends the kernel, as in
// torch, and is named in the record.
template <int COUNT_EACH>
TS_DEV void load_checked(u32 (&node)[COUNT_EACH], const KeyParams& p, int first, int step) {
  int bad = -1;
#pragma unroll
  for (int k = 0; k < COUNT_EACH; ++k) {
    const int at = first + k * step;
    node[k] = NOBODY;
    if (at >= p.edges) continue;
    const long long index = lanes::load_index(p.index, at, p.wide), to = row_of(p, index);
    if (to < 0 || (to >= p.nodes && !dropped(p, index))) bad = at;
    node[k] = (u32)to;
  }
  if (bad >= 0) lanes::give_up(p.record, 0, bad, p.nodes, lanes::load_index(p.index, bad, p.wide));
}

TS_LANES_KERNEL(THREADS, 2) tilestream_count(const TS_PARAM KeyParams p) {
  TS_LANES_SHARED(base);
  const int thread = lanes::thread(), step = lanes::blocks() * THREADS, own = lanes::block() * THREADS + thread;
  const int digits = 1 << p.bits, words = digits * p.passes;
  const u32 descends = base + 4 * (u32)words;
  bool down = false;
  u32 node[COUNTED], before[COUNTED];
  const auto load = [&](int first) {
    load_checked(node, p, first, step);
#pragma unroll
    for (int k = 0; k < COUNTED; ++k) {
      const int at = first + k * step;
      before[k] = at < p.edges && at > 0 ? node_at(p, at - 1) : 0;
    }
  };
  load(own);  // on its way meanwhile
  for (int w = thread; w <= words; w += THREADS) lanes::put32(base + 4 * (u32)w, 0);
  for (u32 at = (u32)own; at < (u32)p.tiles * (u32)words; at += (u32)step) p.posted[at] = 0;
  if (own == 0) p.busy[0] = 0;
  lanes::all_together();
  for (int first = own; first < p.edges;) {
#pragma unroll
    for (int k = 0; k < COUNTED; ++k) {
      if (node[k] == NOBODY) continue;
      down |= node[k] < before[k];
      for (int pass = 0; pass < p.passes; ++pass)
        lanes::add32(base + 4 * (u32)(pass * digits + (int)(node[k] >> pass * p.bits & (u32)(digits - 1))), 1);
    }
    first += COUNTED * step;
    if (first < p.edges) load(first);
  }
  if (down) lanes::add32(descends, 1);
  lanes::all_together();
  for (int w = thread; w < words; w += THREADS)
    if (const u32 found = lanes::get32(base + 4 * (u32)w)) lanes::add_global(p.head + TOTALS + w, found);
  if (thread == 0 && lanes::get32(descends)) lanes::post(p.head + DESCENDS, 1);
}

// In which place of its warp each edge is among those with its digit; what the warp has of each digit is left in the room.
TS_DEV void rank(u32 (&place)[EACH], const u32 (&node)[EACH], const Room& room, int shift, int bits) {
  const int digits = 1 << bits, lane = lanes::lane(), warp = lanes::warp();
  for (int two = lane; two < digits / 2; two += WARP) lanes::put32(room.counter(warp, digits, 2 * (u32)two), 0);
  lanes::together();
  lanes::alike(place, node, shift, bits);
#pragma unroll
  for (int k = 0; k < EACH; ++k) {
    const u32 counter = room.counter(warp, digits, node[k] >> shift & (u32)(digits - 1)), before = lanes::get16(counter);
    const u32 same = place[k], in_front = lanes::ones(same & ((1u << lane) - 1));
    place[k] = before + in_front;
    lanes::together();
    if (in_front == 0) lanes::put16(counter, before + lanes::ones(same));
    lanes::together();
  }
}

// What the tile has of a digit, where the warps in front of each have their number.
TS_DEV u32 total_of(const Room& room, int digits, u32 digit) {
  u32 own[WARPS], total = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) own[warp] = lanes::get16(room.counter(warp, digits, digit));
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    lanes::put16(room.counter(warp, digits, digit), total);
    total += own[warp];
  }
  return total;
}

// The sum of what threads in front of this one have.
TS_DEV u64 in_front(const Room& room, u64 own) {
  const int lane = lanes::lane();
  u64 sum = own;
#pragma unroll
  for (int far = 1; far < WARP; far *= 2) {
    const u64 other = lanes::of_lane(sum, (lane - far) & (WARP - 1));
    if (lane >= far) sum += other;
  }
  const u32 mine = room.sums + 8 * (u32)lanes::warp();
  if (lane == WARP - 1) lanes::put32(mine, (u32)sum), lanes::put32(mine + 4, (u32)(sum >> 32));
  lanes::all_together();
  u64 of_warps[WARPS];
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    const u32 at = room.sums + 8 * (u32)warp;
    of_warps[warp] = (u64)lanes::get32(at + 4) << 32 | lanes::get32(at);
  }
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sum += warp < lanes::warp() ? of_warps[warp] : 0;
  return sum - own;
}

// Edges go to their places in the tile, which all have ranked.
TS_DEV void exchange(u32 (&place)[EACH], const u32 (&node)[EACH], const u32 (&edge)[EACH], const Room& room, int shift,
                     int digits) {
#pragma unroll
  for (int k = 0; k < EACH; ++k) {
    const u32 digit = node[k] >> shift & (u32)(digits - 1);
    place[k] += lanes::get16(room.counter(lanes::warp(), digits, digit)) + lanes::get32(room.first + 4 * digit);
  }
  lanes::all_together();
#pragma unroll
  for (int k = 0; k < EACH; ++k)
    lanes::put32(room.edge((int)place[k]), edge[k]), lanes::put32(room.node((int)place[k]), node[k]);
  lanes::all_together();
}

// How many edges of the tiles in front have a digit. `posted` is its word of the first tile.
TS_DEV u32 look_back(const u32* posted, int tile, int digits) {
  u32 found = 0;
  for (int at = tile - 1; at >= 0;) {
    u32 words[IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) words[k] = at >= k ? lanes::peek(posted + (u64)(at - k) * (u64)digits) : OF_ALL;
    bool there = true;
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) {
      there = there && words[k] != 0;  // from the first that is not there on, ask again
      if (there) found += words[k] & COUNT, --at;
      if (there && (words[k] & OF_ALL) != 0) return found;
    }
  }
  return found;
}

// CTAs begin in the order of their numbers, as all that look back take it (CUB's scan does): who waits, waits for those that
// run.
TS_LANES_KERNEL(THREADS, 1) tilestream_scatter(const TS_PARAM KeyParams p) {
  TS_LANES_SHARED(base);
  const Room room(base);
  const int thread = lanes::thread(), digits = 1 << p.bits, shift = p.pass * p.bits;
  const int tile = lanes::block(), first = tile * TILE;
  const bool last = p.pass == p.passes - 1;
  u32 node[EACH], edge[EACH], place[EACH];
#pragma unroll
  for (int k = 0; k < EACH; ++k) {
    const int at = first + (lanes::warp() * EACH + k) * WARP + lanes::lane();
    node[k] = NOBODY, edge[k] = (u32)at;
    if (at < p.edges && p.pass == 0) node[k] = node_at(p, at);
    if (at < p.edges && p.pass > 0) {
      const u64 both = p.from[at];
      node[k] = (u32)(both >> 32), edge[k] = (u32)both;
    }
  }
  const int own = digits < THREADS ? 1 : digits / THREADS;
  u64 sum = 0, of_all[OWN];
#pragma unroll
  for (int k = 0; k < OWN; ++k)
    of_all[k] = k < own && thread * own + k < digits ? (u64)p.head[TOTALS + p.pass * digits + thread * own + k] << 32 : 0;
  if (lanes::peek(p.head + DESCENDS) == 0) {
    for (int at = lanes::block() * THREADS + thread; last && at < p.edges; at += lanes::blocks() * THREADS) p.order[at] = at;
    return;
  }
  rank(place, node, room, shift, p.bits);
  lanes::all_together();

  u32* const posted = p.posted + (u64)p.pass * (u64)p.tiles * (u64)digits;
  u32 total[OWN];
#pragma unroll
  for (int k = 0; k < OWN; ++k) {
    const int digit = thread * own + k;
    if (k >= own || digit >= digits) continue;
    total[k] = total_of(room, digits, (u32)digit);
    lanes::post(posted + (u64)tile * (u64)digits + digit, total[k] | (tile == 0 ? OF_ALL : OF_TILE));
    sum += of_all[k] | total[k];
  }
  sum = in_front(room, sum);
#pragma unroll
  for (int k = 0; k < OWN; ++k) {
    const int digit = thread * own + k;
    if (k >= own || digit >= digits) continue;
    const u32 before = look_back(posted + digit, tile, digits), here = (u32)sum;
    if (tile > 0) lanes::post(posted + (u64)tile * (u64)digits + digit, (before + total[k]) | OF_ALL);
    lanes::put32(room.first + 4 * (u32)digit, here);
    lanes::put32(room.offset + 4 * (u32)digit, (u32)(sum >> 32) + before - here);
    sum += of_all[k] | total[k];
  }
  lanes::all_together();
  exchange(place, node, edge, room, shift, digits);
#pragma unroll
  for (int k = 0; k < EACH; ++k) {
    const int at = k * THREADS + thread;
    if (at >= p.edges - first) continue;
    const u32 of = lanes::get32(room.node(at)), which = lanes::get32(room.edge(at));
    const u32 to = lanes::get32(room.offset + 4 * (of >> shift & (u32)(digits - 1))) + (u32)at;
    if (last)
      p.keys[to] = (int)of, p.order[to] = (int)which;
    else
      p.to[to] = (u64)of << 32 | which;
  }
}

// Nodes of edges in sorted order: in memory, or in the room of the only tile.
struct InMemory {
  const KeyParams& p;
  bool as_given;
  TS_DEV int operator()(int at) const { return as_given ? (int)node_at(p, at) : p.keys[at]; }
};
struct InRoom {
  const Room& room;
  TS_DEV int operator()(int at) const { return (int)lanes::get32(room.node(at)); }
};

// The first edge of `node` or of one behind it.
template <class Nodes>
TS_DEV int first_of(const Nodes& nodes, int edges, long long node) {
  int low = 0, high = edges;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (nodes(middle) < node)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Where the edges of `node` end, of which `low` is one: the lanes of a warp look at 32 places at once.
template <class Nodes>
TS_DEV int end_of(const Nodes& nodes, int edges, int node, int low) {
  int high = edges;  // not one any more
  while (high - low > 1) {
    const int step = (high - low - 1) / (WARP + 1) + 1, at = low + (lanes::lane() + 1) * step;
    const int ones = (int)lanes::ones(lanes::vote(at < high && nodes(at) == node));
    const int behind = low + (ones + 1) * step;
    low += ones * step;
    high = behind < high ? behind : high;
  }
  return high;
}

// Nodes from `from` to `to` start at `at`; all lanes of a warp come here, those without nodes with to < from.
TS_DEV void fill(int* starts, int from, int to, int at) {
  const bool lengthy = to - from >= LONG_GAP;
  for (int k = 0; !lengthy && k <= to - from; ++k) starts[from + k] = at;
  for (u32 left = lanes::vote(lengthy); left != 0; left &= left - 1) {
    const int lane = (int)lanes::ones((left & (~left + 1)) - 1);
    const u64 ends = lanes::of_lane((u64)(u32)from << 32 | (u32)to, lane);
    const int value = (int)lanes::of_lane((u64)(u32)at, lane);
    for (long long node = (long long)(ends >> 32) + lanes::lane(); node <= (long long)(u32)ends; node += WARP) starts[node] = value;
  }
}

// `busy`: how many pieces, then of each its node, its number and how many the node has. Any order: each is summed alike.
// All lanes of a warp come here, those of nodes of few edges with `many` false; `at` is the first edge of `node`.
template <class Nodes>
TS_DEV void list(const KeyParams& p, const Nodes& nodes, bool many, int node, int at) {
  for (u32 left = lanes::vote(many); left != 0; left &= left - 1) {
    const int lane = (int)lanes::ones((left & (~left + 1)) - 1);
    const u64 both = lanes::of_lane((u64)(u32)node << 32 | (u32)at, lane);
    const int busy = (int)(both >> 32), first = (int)(u32)both;
    const int wanted = (end_of(nodes, p.edges, busy, first + LONG) - first + PIECE_EDGES - 1) / PIECE_EDGES;
    const int pieces = wanted < MOST_PIECES ? wanted : MOST_PIECES;
    for (int piece = lanes::lane(); piece < pieces; piece += WARP) {
      int* item = p.busy + 1 + 2 * ts::count_up((u32*)p.busy);
      item[0] = busy, item[1] = piece << 16 | pieces;
    }
  }
}

// What edges in sorted order, from `first` on, say of their nodes and of those in front of them: where they start, and
// whether they have many edges.
template <class Nodes>
TS_DEV void begin_nodes(const KeyParams& p, const Nodes& nodes, long long first) {
  int before[READ], here[READ], far[READ];
#pragma unroll
  for (int k = 0; k < READ; ++k) {
    const long long at = first + k * THREADS;
    before[k] = at > 0 && at <= p.edges ? nodes((int)at - 1) : -1;
    here[k] = at < p.edges ? nodes((int)at) : at == p.edges ? (int)p.nodes : -1;
    far[k] = at + LONG < p.edges ? nodes((int)at + LONG) : -1;
  }
#pragma unroll
  for (int k = 0; k < READ; ++k) {
    const int at = (int)(first + k * THREADS);
    if (!p.by_node) fill(p.starts, before[k] + 1, here[k], at);
    list(p, nodes, here[k] >= 0 && here[k] < p.nodes && before[k] != here[k] && far[k] == here[k], here[k], at);
  }
}

TS_LANES_KERNEL(THREADS, 2) tilestream_starts(const TS_PARAM KeyParams p) {
  const InMemory nodes{p, p.head != nullptr && lanes::peek(p.head + DESCENDS) == 0};
  const long long first = (long long)lanes::block() * READ * THREADS + lanes::thread();
  if (lanes::block() * READ <= p.edges / THREADS) begin_nodes(p, nodes, first);
  for (int k = 0; p.by_node && k < READ; ++k)
    if (first + k * THREADS <= p.nodes) p.starts[first + k * THREADS] = first_of(nodes, p.edges, first + k * THREADS);
}

// Another index of the edges, checked, in the order of the sorted ones.
TS_LANES_KERNEL(THREADS, 2) tilestream_picked(const TS_PARAM KeyParams p) {
  const long long first = (long long)lanes::block() * READ * THREADS + lanes::thread();
  int from[READ];
#pragma unroll
  for (int k = 0; k < READ; ++k) from[k] = first + k * THREADS < p.edges ? p.order[first + k * THREADS] : 0;
  if (first >= p.edges) return;
  long long found[READ];
#pragma unroll
  for (int k = 0; k < READ; ++k) found[k] = lanes::load_index(p.index, from[k], p.wide);
#pragma unroll
  for (int k = 0; k < READ; ++k) {
    if (first + k * THREADS >= p.edges) break;
    const long long row = row_of(p, found[k]);
    if (row < 0 || row >= p.nodes) lanes::give_up(p.record, 0, from[k], p.nodes, found[k]);
    p.keys[first + k * THREADS] = (int)row;
  }
}

TS_LANES_KERNEL(THREADS, 1) tilestream_few(const TS_PARAM KeyParams p) {
  TS_LANES_SHARED(base);
  const Room room(base);
  const int thread = lanes::thread(), digits = 1 << p.bits, own = digits < THREADS ? 1 : digits / THREADS;
  u32 node[EACH], edge[EACH], place[EACH];
  const int first = lanes::warp() * EACH * WARP + lanes::lane();
  load_checked(node, p, first, WARP);
#pragma unroll
  for (int k = 0; k < EACH; ++k) edge[k] = (u32)(first + k * WARP);
  if (thread == 0) p.busy[0] = 0;
  for (int pass = 0; pass < p.passes; ++pass) {
    rank(place, node, room, pass * p.bits, p.bits);
    lanes::all_together();
    u32 total[OWN];
    u64 sum = 0;
#pragma unroll
    for (int k = 0; k < OWN; ++k)
      if (k < own && thread * own + k < digits) sum += total[k] = total_of(room, digits, (u32)(thread * own + k));
    sum = in_front(room, sum);
#pragma unroll
    for (int k = 0; k < OWN; ++k)
      if (k < own && thread * own + k < digits) {
        lanes::put32(room.first + 4 * (u32)(thread * own + k), (u32)sum);
        sum += total[k];
      }
    lanes::all_together();
    exchange(place, node, edge, room, pass * p.bits, digits);
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      node[k] = lanes::get32(room.node(first + k * WARP));
      edge[k] = lanes::get32(room.edge(first + k * WARP));
    }
    if (pass < p.passes - 1) lanes::all_together();
  }
#pragma unroll
  for (int k = 0; k < EACH; ++k)
    if (first + k * WARP < p.edges) p.order[first + k * WARP] = (int)edge[k];
  const InRoom nodes{room};
  for (int at = 0; at <= p.edges; at += READ * THREADS) begin_nodes(p, nodes, at + thread);
}
