// The warps around the consumers: one loads weights, one per warpgroup loads inputs, one publishes.
// Each walks a constant table that the emitter wrote; a stage S gives the tables and the layout.
#pragma once
#include "odd_rows.cuh"
#include "stamps.cuh"

namespace ts {

struct PageOp {  // one page of weights
  int map, x, y, bytes, ring;
  // Rows that each CTA of a pair loads, or 0: all. Where pages are of several boxes: how many of `bytes` more come into the
  // same page, each a chunk's columns further on.
  int half;
};
// How odd rows become a chunk: they are the operands' type, that rounded from fp32 to tf32, or another that they keep.
enum Form : int { OPERAND, ROUNDED, AS_BF16, AS_F16, AS_F32 };
struct LoadOp {      // one chunk of an input or of a queue's tile
  int map;           // tensor map, or -1: by ordinary loads
  int col;           // first column
  int queue;         // queue index or -1
  int tensor;        // for ordinary loads: index of pointer and stride, row width,
  int features;
  int cols, padded;  // columns that are valid, and up to where zeros follow
  int again;         // uses of the same tile still to come
  int form;
};
// Output pixels that rows are, and the pictures that taps of them read.
struct Window {
  int height, width, stride_y, stride_x, in_height, in_width, pixel_bytes;
  int lowest_y, lowest_x;  // of all taps, where output pixel (0, 0) reads
};
struct StoreOp {  // one chunk of an output or of a queue's tile
  int map, x, queue, first, last;
};
struct Worker {  // which replica of which stage this CTA is, and where the stage's tables start
  int replica, replicas, stage;
  int step;  // tiles that the widest step of the launch takes: every stage rounds up to it
  int page_ops, load_ops, store_ops, pointers, credits;
};
struct Credit {  // a queue this stage takes from, and which of its consumers the stage is
  int queue, consumer;
};
struct QueueInfo {
  int lines;      // index of its first flag line: `depth` full flags, then `depth` free flags a consumer
  int depth;
  int consumers;
};

constexpr u32 INDEX_OUTSIDE = 2;  // in a record, of no wait: an index names no row of its table

constexpr int LINE = 16;  // u64 words between flags: one 128-byte line each

struct Dump {  // in host memory; read after a trap
  u32 claimed, stage, sm, queue, tile, waits_for_free;
  u64 expected, found;
  u64 flags[1];
};

struct Sync {  // what hand-over through global memory needs
  u64* flags;
  Dump* dump;
  u64 limit_ns;
  u64 epoch;  // launches of this workspace before this one, in the high half
  int stage, lines;
  Stamps stamps;
};

TS_DEV u64 ticket(const Sync& s, int tile) { return s.epoch | (u64)(u32)(tile + 1); }

TS_DEV void expire(const Sync& s, int queue, int tile, int waits_for_free, u64 expected, u64 found) {
  if (claim(&s.dump->claimed)) {
    s.dump->stage = s.stage;
    s.dump->sm = sm_id();
    s.dump->queue = queue;
    s.dump->tile = tile;
    s.dump->waits_for_free = waits_for_free;
    s.dump->expected = expected;
    s.dump->found = found;
#pragma unroll 1
    for (int k = 0; k < s.lines; ++k) s.dump->flags[k] = flag_acquire(s.flags + k * LINE);
    fence_system();
    trap();
  }
  hold_back();
}

TS_DEV void flag_wait(const Sync& s, int line, u64 expected, int queue, int tile, int waits_for_free) {
  u64 found = flag_acquire(s.flags + line * LINE);
  if (found >= expected) return;
  u64 start = now_ns();
  const u32 since = s.stamps.now();
#pragma unroll 1
  for (;;) {
    // The timer is slow to read, and apart, or it is read at every look.
#pragma unroll 1
    for (u32 spin = 0; spin < 256; ++spin) {
      found = flag_acquire(s.flags + line * LINE);
      if (found >= expected) {
        s.stamps.waited(waits_for_free ? QUEUE_FULL : QUEUE_EMPTY, since, queue);
        return;
      }
    }
    if (now_ns() - start > s.limit_ns) expire(s, queue, tile, waits_for_free, expected, found);
  }
}

// Consumer side: tile `tile` of queue q is in its slot, and with the fence visible to bulk copies.
TS_DEV void queue_see_full(const Sync& s, const QueueInfo& info, int q, int tile) {
  flag_wait(s, info.lines + tile % info.depth, ticket(s, tile), q, tile, 0);
}
TS_DEV void queue_wait_full(const Sync& s, const QueueInfo& info, int q, int tile) {
  queue_see_full(s, info, q, tile);
  fence_async_global();
}
// Producer side: every consumer has read what the slot held.
TS_DEV void queue_wait_free(const Sync& s, const QueueInfo& info, int q, int tile) {
  if (tile < info.depth) return;
  for (int c = 0; c < info.consumers; ++c)
    flag_wait(s, info.lines + (1 + c) * info.depth + tile % info.depth, ticket(s, tile - info.depth), q, tile, 1);
}
TS_DEV void queue_publish(const Sync& s, const QueueInfo& info, int tile) {
  fence_async_global();
  flag_release(s.flags + (info.lines + tile % info.depth) * LINE, ticket(s, tile));
}
// The bulk loads have completed (an mbarrier said so): a relaxed store cannot overtake that wait.
TS_DEV void queue_free(const Sync& s, const QueueInfo& info, int consumer, int tile) {
  flag_relaxed(s.flags + (info.lines + (1 + consumer) * info.depth + tile % info.depth) * LINE, ticket(s, tile));
}

// ---- barriers
template <class S>
TS_DEV void init_barriers(u32 smem) {
  constexpr u32 GROUP = 4, BOTH = 8;  // arrivals: one a warp
  for (int i = 0; i < S::PAGES * S::PAGE_RINGS; ++i) {
    bar_init(smem + S::PAGE_BARS + i * 16, 1);
    bar_init(smem + S::PAGE_BARS + i * 16 + 8, (S::TILES == 2 ? BOTH : GROUP) * S::PAIR_COUNT);
  }
  for (int i = 0; i < S::IN_SLOTS * S::TILES; ++i) {
    bar_init(smem + S::IN_BARS + i * 16, 1);
    bar_init(smem + S::IN_BARS + i * 16 + 8, S::TILES == 2 ? GROUP : BOTH);
  }
  for (int i = 0; i < S::OUT_SLOTS * 2; ++i) {
    bar_init(smem + S::OUT_BARS + i * 16, GROUP);
    bar_init(smem + S::OUT_BARS + i * 16 + 8, 1);
  }
}

// ---- weights
// Whether pages of a kind of stage are of several boxes; kernels specialise it where they are.
template <class S>
constexpr bool BOXED = false;

template <class S, class P, class R>
TS_DEV void load_page(const P& p, const PageOp& op, R& ring) {
  if (!S::RESIDENT) ring.wait_empty();
  bar_expect(ring.full(), (u32)(BOXED<S> ? op.bytes * (1 + op.half) : op.bytes));
  if (S::PAIR_COUNT == 2 && op.half > 0) {
    // Each CTA of the pair loads one half of the rows into both.
    const int row = (int)cluster_rank() * op.half;
    tma_multicast(ring.addr() + (u32)row * 128, &p.maps[op.map], op.x, op.y + row, ring.full(), 3, EVICT_LAST);
  } else if (!BOXED<S>) {
    tma_load(ring.addr(), &p.maps[op.map], op.x, op.y, ring.full(), EVICT_LAST);
  } else {
#pragma unroll 1
    for (int k = 0; k <= op.half; ++k)
      tma_load(ring.addr() + (u32)(k * op.bytes), &p.maps[op.map], op.x + k * (128 / S::T::BYTES), op.y, ring.full(), EVICT_LAST);
  }
  ring.advance();
}
template <class S, class P>
TS_DEV void load_weights(const P& p, const Sync& sync, u32 smem, const Worker& w, int index) {
  if (lane_in_warp() != 0) return;
  using Pages = Ring<S::PAGES, S::PAGE_BYTES>;
  Timed<Pages> ring(Pages(smem + S::PAGE_BARS + index * S::PAGES * 16, smem + S::PAGE_DATA + index * S::PAGES * S::PAGE_BYTES),
                    sync.stamps, WEIGHTS_AHEAD);
  for (Units<S::TILES> u(p.rows, w); u.more(); u.next()) {
    sync.stamps.mark(LOAD_WEIGHTS, u.tile(0));
#pragma unroll 1
    for (int k = 0; k < S::PAGE_OPS; ++k) {
      PageOp op = p.page_op(w.page_ops + k);
      if (S::PAGE_RINGS == 1 || op.ring == index) load_page<S>(p, op, ring);
    }
    sync.stamps.mark(IDLE, u.tile(0));
    if (S::RESIDENT) return;
  }
}

// ---- inputs
// Whether a kind of stage has odd rows that are not of the operands' type; kernels specialise it where it has.
template <class S>
constexpr bool MIXED = false;

template <class T, class P>
TS_DEV void load_odd_chunk(u32 dst, const P& p, const LoadOp& op, int tile) {
  load_odd_rows<T>(dst, p.pointers[op.tensor], op.features, (int)p.strides[op.tensor], tile * ROWS, p.rows, op.col, op.cols,
                   op.padded, op.form == ROUNDED);
}

}  // namespace ts
#include "gather.cuh"
#include "taps.cuh"
namespace ts {

// Whether a kind of stage is one of several, and all that it loads comes by bulk copies; kernels specialise it where it is.
template <class S>
constexpr bool QUEUED = false;

// One chunk that comes by a bulk copy, and its queue; y is the first row of what it is copied from.
struct Coming {
  LoadOp op;
  QueueInfo info;

  template <class P>
  TS_DEV Coming(const P& p, int k) : op(p.load_op(k)), info{0, 1, 0} {
    if (op.queue >= 0) info = p.queue(op.queue);
  }
  TS_DEV void see(const Sync& sync, int tile) const {
    if (op.queue >= 0) queue_see_full(sync, info, op.queue, tile);
  }
  TS_DEV int y(int tile) const { return (op.queue >= 0 ? tile % info.depth : tile) * ROWS; }
};

// Loads of a stage behind queues. Each lane has a chunk of its own, of which it works out once a tile what is to be known:
// one lane alone takes 500 cycles a chunk, nearly all of it the latency of one instruction after another (eight chunks: 2.4
// us on an H200). The lanes ask for a flag each, and meet before the fence.
template <class S, class P, class R>
TS_DEV void load_queued(const P& p, const Sync& sync, const Worker& w, int g, R& ring) {
  constexpr bool EACH = S::LOAD_OPS <= WARP;  // on the host one lane has them all
  const int lane = (int)lane_in_warp(), last = S::LOAD_OPS - 1;
  const Coming own(p, w.load_ops + (lane < last ? lane : last));
  for (Units<S::TILES> u(p.rows, w); u.more(); u.next()) {
    const int tile = u.tile(g);
    sync.stamps.mark(LOAD_ROWS, tile);
    if (EACH) {
      own.see(sync, tile);
    } else {
#pragma unroll 1
      for (int k = lane; k < S::LOAD_OPS; k += WARP) Coming(p, w.load_ops + k).see(sync, tile);
    }
    const int row = own.y(tile);
    sync_warp();  // what one lane has seen, another may now copy
    fence_async_global();
#pragma unroll 1
    for (int k = 0; k < S::LOAD_OPS; ++k) {
      if (lane == k % WARP) {
        const Coming now = EACH ? own : Coming(p, w.load_ops + k);
        const LoadOp& op = now.op;
        const int y = EACH ? row : now.y(tile);
        ring.wait_empty();
        bar_expect(ring.full(), CHUNK_BYTES);
        tma_load(ring.addr(), &p.maps[op.map], op.col, y, ring.full(), op.queue >= 0 ? EVICT_LAST : op.again ? EVICT_NORMAL : EVICT_FIRST);
      }
      sync_warp();
      ring.advance();
    }
    sync.stamps.mark(IDLE, tile);
  }
}

template <class S, class P>
TS_DEV void load_inputs(const P& p, const Sync& sync, u32 smem, const Worker& w, int g) {
  using T = typename S::T;
  using Chunks = Ring<S::IN_SLOTS, CHUNK_BYTES>;
  Timed<Chunks> ring(Chunks(smem + S::IN_BARS + g * S::IN_SLOTS * 16, smem + S::IN_DATA + g * S::IN_SLOTS * CHUNK_BYTES),
                     sync.stamps, ROWS_AHEAD);
  if constexpr (QUEUED<S>) return load_queued<S>(p, sync, w, g, ring);
  Names names;
  Pixels<S> pixels;
  int coming = 0;
  for (Units<S::TILES> u(p.rows, w); u.more(); u.next()) {
    int tile = u.tile(g);
    sync.stamps.mark(LOAD_ROWS, tile);
    int asked = -1;
#pragma unroll 1
    for (int k = 0; k < S::LOAD_OPS; ++k) {
      LoadOp op = p.load_op(w.load_ops + k);
      if constexpr (OWN_ROWS<S>) {
        if (op.map == OWN) {
          for (int row = (int)lane_in_warp(); row < ROWS; row += WARP) read_name(p, sync, op, tile * ROWS + row);
          continue;
        }
      }
      if (GATHERS<S> && op.map == GATHERED) {
        const bool follows = k + 1 < S::LOAD_OPS && copied_by_lanes<S>(p.load_op(w.load_ops + k + 1).map);
        load_gathered<S>(p, sync, op, tile, follows, names, coming, ring);
        continue;
      }
      if constexpr ((TAPS<S> & BY_LANES) != 0) {
        if (op.map == TAPPED) {
          const bool follows = k + 1 < S::LOAD_OPS && copied_by_lanes<S>(p.load_op(w.load_ops + k + 1).map);
          load_tapped<S>(p, op, tile, follows, pixels, coming, ring);
          continue;
        }
      }
      if constexpr ((TAPS<S> & IN_BULK) != 0) {
        if (op.map == TAPPED_IN_BULK) {
          load_tapped_in_bulk(p, op, tile, ring);
          continue;
        }
      }
      if (op.map >= 0) {
        if (lane_in_warp() == 0) {
          int y = tile * ROWS;
          if (op.queue >= 0) {
            QueueInfo info = p.queue(op.queue);
            if (op.queue != asked) queue_wait_full(sync, info, op.queue, tile);
            asked = op.queue;  // a tile that was there stays until its last use
            y = (tile % info.depth) * ROWS;
          }
          ring.wait_empty();
          bar_expect(ring.full(), CHUNK_BYTES);
          tma_load(ring.addr(), &p.maps[op.map], op.col, y, ring.full(), op.queue >= 0 ? EVICT_LAST : op.again ? EVICT_NORMAL : EVICT_FIRST);
        }
      } else {
        ring.wait_empty();
        if (!MIXED<S> || op.form <= ROUNDED)
          load_odd_chunk<T>(ring.addr(), p, op, tile);
        else if (op.form == AS_BF16)
          load_odd_chunk<bf16>(ring.addr(), p, op, tile);
        else if (op.form == AS_F16)
          load_odd_chunk<f16>(ring.addr(), p, op, tile);
        else
          load_odd_chunk<f32>(ring.addr(), p, op, tile);
        fence_async_shared();
        sync_warp();
        if (lane_in_warp() == 0) bar_arrive(ring.full());
      }
      // A lane that ran ahead would wait for a parity that the slot had a whole turn ago, and not wait at all.
      sync_warp();
      ring.advance();
    }
    sync.stamps.mark(IDLE, tile);
  }
}

// ---- outputs
// The copies of one group of chunks of warpgroup g. A staging slot is given back one copy later, when
// the one before has been read: `unread` is the empty barrier of the copy still being read.
template <class S, class P, class R>
TS_DEV void publish_group(const P& p, const Sync& sync, R& ring, u32& unread, int tile, int begin, int end) {
  sync.stamps.mark(STORE_TILE, tile);
#pragma unroll 1
  for (int e = begin; e < end; ++e) {
    StoreOp op = p.store_op(e);
    int y = tile * ROWS;
    QueueInfo info = {0, 1, 0};
    if (op.queue >= 0) {
      info = p.queue(op.queue);
      if (op.first) queue_wait_free(sync, info, op.queue, tile);
      y = (tile % info.depth) * ROWS;
    }
    ring.wait_full();
    tma_store(&p.maps[op.map], op.x, y, ring.addr(), op.queue >= 0 ? EVICT_LAST : EVICT_FIRST);
    store_commit();
    if (unread != 0) {
      store_wait_read<1>();
      bar_arrive(unread);
    }
    unread = ring.empty();
    ring.advance();
    if (op.queue >= 0 && op.last) {
      store_wait<0>();
      bar_arrive(unread);
      unread = 0;
      queue_publish(sync, info, tile);
    }
  }
  sync.stamps.mark(IDLE, tile);
}
// Serves warpgroup 0, 1 or both; chunks go in the order of the program.
template <class S, bool ZERO, bool ONE, class P>
TS_DEV void publish(const P& p, const Sync& sync, u32 smem, const Worker& w) {
  if (lane_in_warp() != 0) return;
  using Chunks = Ring<S::OUT_SLOTS, CHUNK_BYTES>;
  Timed<Chunks> zero(Chunks(smem + S::OUT_BARS, smem + S::OUT_DATA), sync.stamps, NOTHING_STAGED);
  Timed<Chunks> one(Chunks(smem + S::OUT_BARS + S::OUT_SLOTS * 16, smem + S::OUT_DATA + S::OUT_SLOTS * CHUNK_BYTES), sync.stamps,
                    NOTHING_STAGED);
  u32 unread = 0;
  for (Units<S::TILES> u(p.rows, w); u.more(); u.next()) {
#pragma unroll 1
    for (int k = 0; k < S::STORE_GROUPS; ++k) {
      int at = w.store_ops + 3 * k;
      if (ZERO) publish_group<S>(p, sync, zero, unread, u.tile(0), p.store_bound(at), p.store_bound(at + 1));
      if (ONE) publish_group<S>(p, sync, one, unread, u.tile(1), p.store_bound(at + 1), p.store_bound(at + 2));
    }
    if (S::OUT_IN_PLACE && unread != 0) {  // the consumers wait for every slot before they reuse the memory
      store_wait_read<0>();
      bar_arrive(unread);
      unread = 0;
    }
  }
  store_wait<0>();
}

// The four warps of the loader group: weights, inputs, the second ring of either, outputs. Each ring has a warp of its
// own: a shallow one that had to wait for the other's consumer would run dry. With resident weights the first warp is
// soon free to publish.
template <class S, class P>
TS_DEV void loader_warp(const P& p, const Sync& sync, u32 smem, const Worker& w, int warp) {
  if (warp == 0) {
    if (S::PAGES > 0) load_weights<S>(p, sync, smem, w, 0);
    await_kernel_before();
    if (S::OUT_SLOTS > 0 && S::TWO_PUBLISHERS) publish<S, false, true>(p, sync, smem, w);
  } else if (warp == 3) {
    if (S::OUT_SLOTS > 0) publish<S, true, !S::TWO_PUBLISHERS>(p, sync, smem, w);
  } else if (warp == 1 || S::TILES == 2) {
    if (S::IN_SLOTS > 0 || OWN_ROWS<S>) load_inputs<S>(p, sync, smem, w, warp - 1);
  } else if (S::PAGES > 0 && S::PAGE_RINGS == 2) {
    load_weights<S>(p, sync, smem, w, 1);
  }
}

}  // namespace ts
