// What CTAs exchange that share one tile: gathers by flags through the L2, sums through the L2, memory or a cluster.
// Each collective takes what its workers are (how many, which one) and nothing of the kernel around it.
#pragma once
#include "tile.cuh"

namespace ts {

// Between launches all flags of a workspace are equal, as each launch raises each flag by one: nothing is reset, so a
// captured launch can be replayed. One line of 128 bytes a CTA and phase.
enum Phase : int { CLEARED, MIDDLE, PARTIAL, OPERAND, PHASES };
constexpr int FLAG_LINE = 16;  // u64 words

struct ExchangeDump {  // in host memory; read after a trap
  u32 claimed, phase, cta, peer, sm, pad;
  u64 expected, found;
};

struct Team {  // the CTAs of a launch
  u64* flags;
  ExchangeDump* dump;
  u64 limit_ns;
  int cta, ctas;
  TS_DEV u64* flag(Phase phase, int of) const { return flags + (u64)(phase * ctas + of) * FLAG_LINE; }
  TS_DEV u64 next_epoch(Phase phase) const { return flag_acquire(flag(phase, cta)) + 1; }
  // All that this thread has seen, other threads' stores before a barrier included, is visible to who sees the flag.
  TS_DEV void announce(Phase phase, u64 epoch) const { flag_release(flag(phase, cta), epoch); }
};

TS_DEV void expire(const Team& team, Phase phase, int peer, u64 expected, u64 found) {
  if (claim(&team.dump->claimed)) {
    team.dump->phase = phase;
    team.dump->cta = team.cta;
    team.dump->peer = peer;
    team.dump->sm = sm_id();
    team.dump->expected = expected;
    team.dump->found = found;
    fence_system();
    trap();
  }
  hold_back();
}

// A lane waits until FLAGS flags, flag(k) for its own k and every WARP-th after it, say `wanted`; who(k) raises them. Several
// are read side by side, without an order, and a fence behind them makes up for it: an acquire each would be a turn to the L2
// each.
template <int FLAGS, class F, class W>
TS_DEV void await_some(const Team& team, Phase phase, u64 wanted, const F& flag, const W& who, int k, int count, u64 start) {
#pragma unroll 1
  for (u32 spin = 1;; ++spin) {
    u64 found = wanted;
    int late = k;
#pragma unroll
    for (int q = 0; q < FLAGS; ++q) {
      if (k + q * WARP >= count) continue;
      const u64 each = FLAGS == 1 ? flag_acquire(flag(k)) : flag_peek(flag(k + q * WARP));
      if (each < found) {
        found = each;
        late = k + q * WARP;
      }
    }
    if (found >= wanted) break;
    if ((spin & 255) == 0 && now_ns() - start > team.limit_ns) expire(team, phase, who(late), wanted, found);
  }
  if (FLAGS > 1) fence_gpu();
}
// A warp waits until `count` of them do, SEVERAL at a time a lane where there are more than lanes.
template <int SEVERAL, class F, class W>
TS_DEV void await_all(const Team& team, Phase phase, u64 wanted, int count, const F& flag, const W& who) {
  const u64 start = now_ns();
  const int lane = (int)lane_in_warp();
  if (SEVERAL > 1 && count <= WARP) {
    await_some<1>(team, phase, wanted, flag, who, lane, count, start);
  } else {
#pragma unroll 1
    for (int k = lane; k < count; k += SEVERAL * WARP) await_some<SEVERAL>(team, phase, wanted, flag, who, k, count, start);
  }
  sync_warp();
}
// For peers first, first + stride, ..., that have announced this epoch.
TS_DEV void await_peers(const Team& team, Phase phase, u64 epoch, int first, int stride, int count) {
  const auto who = [&](int k) { return first + k * stride; };
  await_all<4>(team, phase, epoch, count, [&](int k) { return team.flag(phase, who(k)); }, who);
}

// ---- parts that each of PEERS CTAs of a cluster makes and all want, through their shared memory. In everybody's `room` part q,
// of PART bytes, is what CTA q made; mbarrier q of `bars`, 8 bytes apart, completes a phase when it is there.

// By one thread, in front of the cluster's barrier: part `me` will be announced by `warps` of this CTA, the others will come.
template <int PEERS>
TS_DEV void init_parts(u32 bars, int me, u32 warps) {
  for (int q = 0; q < PEERS; ++q) bar_init(bars + 8 * q, q == me ? warps : 1);
}
template <int PEERS, u32 PART>
TS_DEV void expect_parts(u32 bars, int me) {
  for (int q = 0; q < PEERS; ++q)
    if (q != me) bar_expect(bars + 8 * q, PART);
}

// A warp sends this CTA's part, once that is there, to all others: the next one first, so that not all send to one at once.
template <int PEERS, u32 PART>
TS_DEV void send_part(u32 room, u32 bars, int me, u32 parity) {
  const u32 part = room + me * PART, bar = bars + 8 * me;
  bar_wait(bar, parity);
#pragma unroll 1
  for (int far = 1 + (int)lane_in_warp(); far < PEERS; far += WARP) {
    const u32 peer = (u32)(me + far) % PEERS;
    copy_to_peer(at_peer(part, peer), part, PART, at_peer(bar, peer));
  }
  sync_warp();
}

// A ring: one thread sends each part, as it comes, on to the next CTA, until all have gone round.
template <int PEERS, u32 PART>
TS_DEV void shift_parts(u32 room, u32 bars, int me, u32 parity) {
  const u32 next = (u32)(me + 1) % PEERS;
#pragma unroll 1
  for (int step = 0; step < PEERS - 1; ++step) {
    const u32 q = (u32)(me + PEERS - step) % PEERS, part = room + q * PART, bar = bars + 8 * q;
    bar_wait(bar, parity);
    copy_to_peer(at_peer(part, next), part, PART, at_peer(bar, next));
  }
}

// A warp waits for all parts, a lane a part, and can say whose is late: part q is that of CTA first + q.
template <int PEERS>
TS_DEV void await_parts(const Team& team, u32 bars, int first, u32 parity) {
  const u64 start = now_ns();
#pragma unroll 1
  for (int q = (int)lane_in_warp(); q < PEERS; q += WARP)
#pragma unroll 1
    for (u32 spin = 1; !bar_try(bars + 8 * q, parity); ++spin)
      if ((spin & 15) == 0 && now_ns() - start > team.limit_ns) expire(team, MIDDLE, first + q, 1, 0);
  sync_warp();
}

// ---- sums of a tile of which each of PEERS CTAs has a partial result, a warpgroup 64 rows. THREADS threads take part, thread
// t of warpgroup g holds of block i of 8 columns what Fragment says. CTA `me` finishes blocks me, me + PEERS, ...:
// finish(t, i, float[4], ahead(t, i)) of each, where ahead(t, i) is loaded before the others are waited for, if there are few
// blocks. Always added in the same order, so the same input gives the same bits.
template <int BLOCKS, int PEERS>
constexpr int OWN_BLOCKS = (BLOCKS + PEERS - 1) / PEERS;
template <int OWN>
constexpr bool LOADED_AHEAD = OWN <= 4;

// Whether there is an own block b. All know of those that everybody has.
template <int BLOCKS, int PEERS>
TS_DEV bool has_block(int me, int b) { return (b + 1) * PEERS <= BLOCKS || b * PEERS + me < BLOCKS; }
// Own blocks whose parts are asked for before any is waited for: a turn to the L2 each would be long. A thread has 4
// registers of each part, and so many blocks that they are 96 at most.
template <int BLOCKS, int PEERS>
constexpr int AT_ONCE = PEERS > 24 ? 1 : 24 / PEERS < OWN_BLOCKS<BLOCKS, PEERS> ? 24 / PEERS : OWN_BLOCKS<BLOCKS, PEERS>;

// wait(), then of each own block finish(lane, i, sum, ahead(lane, i)); add(t, b, sums) has the sums of BATCH own blocks from b on.
template <int BLOCKS, int PEERS, int THREADS, int BATCH, class A, class W, class S, class F>
TS_DEV void own_blocks(int me, u32 t, const A& ahead, const W& wait, const S& add, const F& finish) {
  constexpr int OWN = OWN_BLOCKS<BLOCKS, PEERS>;
  if constexpr (LOADED_AHEAD<OWN>) {
    Registers<decltype(ahead(0u, 0)), OWN> kept;
    TS_EACH(t, THREADS) {
#pragma unroll
      for (int b = 0; b < OWN; ++b)
        if (has_block<BLOCKS, PEERS>(me, b)) TS_REG(kept, b) = ahead(TS_LANE, b * PEERS + me);
    }
    wait();
    TS_EACH(t, THREADS) {
#pragma unroll
      for (int first = 0; first < OWN; first += BATCH) {
        float sums[BATCH][4];
        add(t, first, sums);
#pragma unroll
        for (int b = first; b < first + BATCH && b < OWN; ++b)
          if (has_block<BLOCKS, PEERS>(me, b)) finish(TS_LANE, b * PEERS + me, sums[b - first], TS_REG(kept, b));
      }
    }
  } else {
    wait();
    TS_EACH(t, THREADS) {
#pragma unroll 1
      for (int first = 0; first < OWN; first += BATCH) {
        float sums[BATCH][4];
        decltype(ahead(0u, 0)) loaded[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
          if (has_block<BLOCKS, PEERS>(me, first + b)) loaded[b] = ahead(TS_LANE, (first + b) * PEERS + me);
        add(t, first, sums);
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
          if (has_block<BLOCKS, PEERS>(me, first + b)) finish(TS_LANE, (first + b) * PEERS + me, sums[b], loaded[b]);
      }
    }
  }
}

// Four sums over what all peers have, in their order: part(q, e).
template <int PEERS, class P>
TS_DEV void add_parts(float (&sum)[4], const P& part) {
#pragma unroll
  for (int e = 0; e < 4; ++e) sum[e] = 0.0f;
#pragma unroll
  for (int q = 0; q < PEERS; ++q)
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] += part(q, e);
}

// Through the L2. `tile` is where the partial results of all peers lie, one behind another.
template <int BLOCKS, int PEERS, int THREADS, class A, class F>
TS_DEV void reduce_scatter_l2(const Fragment<BLOCKS>& acc, float* tile, int me, u32 t, const Team& team, u64 epoch, int first, int stride,
                              const A& ahead, const F& finish) {
  constexpr u64 PART = (u64)BLOCKS * THREADS * 4;
  TS_EACH(t, THREADS) {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
      store_shared_floats(tile + me * PART + (u64)(i * THREADS + t) * 4, TS_REG(acc, 4 * i), TS_REG(acc, 4 * i + 1), TS_REG(acc, 4 * i + 2),
                          TS_REG(acc, 4 * i + 3));
  }
  named_sync(BOTH_GROUPS, THREADS);
  if (t == 0) team.announce(PARTIAL, epoch);
  const auto wait = [&] {
    if (t < WARP) await_peers(team, PARTIAL, epoch, first, stride, PEERS);
    named_sync(BOTH_GROUPS, THREADS);
  };
  constexpr int BATCH = AT_ONCE<BLOCKS, PEERS>;
  const auto add = [&](u32 t, int first, float (&sums)[BATCH][4]) {
    float part[BATCH][PEERS][4];
#pragma unroll
    for (int b = 0; b < BATCH; ++b)
      if (has_block<BLOCKS, PEERS>(me, first + b))
#pragma unroll
        for (int q = 0; q < PEERS; ++q) load_shared_floats(tile + q * PART + (u64)(((first + b) * PEERS + me) * THREADS + t) * 4, part[b][q]);
#pragma unroll
    for (int b = 0; b < BATCH; ++b)
      if (has_block<BLOCKS, PEERS>(me, first + b)) add_parts<PEERS>(sums[b], [&](int q, int e) { return part[b][q][e]; });
  };
  own_blocks<BLOCKS, PEERS, THREADS, BATCH>(me, t, ahead, wait, add, finish);
}

// The same without a flag and without a fence: the lowest bit of each word says whether it is of an odd launch or of an even
// one, and who reads asks again until all say what this launch is. Every launch that the tile takes part in writes every
// word, so what lies there is of this one or of the one before; at first it is zeros. fp32 has a bit less.
template <int BLOCKS, int PEERS, int THREADS, class A, class F>
TS_DEV void reduce_scatter_tagged(const Fragment<BLOCKS>& acc, float* tile, int me, u32 t, const Team& team, u64 epoch, int first, int stride,
                                  const A& ahead, const F& finish) {
  constexpr u64 PART = (u64)BLOCKS * THREADS * 4;
  const u32 tag = (u32)epoch & 1;
  TS_EACH(t, THREADS) {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      u32 words[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) words[e] = (bits_of(TS_REG(acc, 4 * i + e)) & ~1u) | tag;
      store_relaxed_words(tile + me * PART + (u64)(i * THREADS + t) * 4, words);
    }
  }
  if (t == 0) flag_relaxed(team.flag(PARTIAL, team.cta), epoch);  // for the next launch of this CTA alone
  const u64 start = now_ns();
  constexpr int BATCH = AT_ONCE<BLOCKS, PEERS>;
  const auto add = [&](u32 t, int from, float (&sums)[BATCH][4]) {
    u32 part[BATCH][PEERS][4];
#pragma unroll 1
    for (u32 spin = 1;; ++spin) {
      u32 others = 0;
      int late = 0;
#pragma unroll
      for (int b = 0; b < BATCH; ++b)
        if (has_block<BLOCKS, PEERS>(me, from + b))
#pragma unroll
          for (int q = 0; q < PEERS; ++q) load_relaxed_words(tile + q * PART + (u64)(((from + b) * PEERS + me) * THREADS + t) * 4, part[b][q]);
#pragma unroll
      for (int b = 0; b < BATCH; ++b)
        if (has_block<BLOCKS, PEERS>(me, from + b))
#pragma unroll
          for (int q = 0; q < PEERS; ++q) {
            const u32(&of)[4] = part[b][q];
            const u32 other = ((of[0] ^ tag) | (of[1] ^ tag) | (of[2] ^ tag) | (of[3] ^ tag)) & 1;
            others |= other;
            if (other) late = q;
          }
      if (!others) break;
      if ((spin & 255) == 0 && now_ns() - start > team.limit_ns) expire(team, PARTIAL, first + late * stride, epoch, epoch - 1);
    }
#pragma unroll
    for (int b = 0; b < BATCH; ++b)
      if (has_block<BLOCKS, PEERS>(me, from + b)) add_parts<PEERS>(sums[b], [&](int q, int e) { return float_of(part[b][q][e] & ~1u); });
  };
  own_blocks<BLOCKS, PEERS, THREADS, BATCH>(me, t, ahead, [] {}, add, finish);
}

// Through the shared memory of a cluster, of which all threads take part in the barrier behind the stores. `room` holds
// PEERS x ceil(BLOCKS / PEERS) x THREADS x 16 bytes that nothing else uses.
template <int BLOCKS, int PEERS, int THREADS, class A, class F>
TS_DEV void reduce_scatter_dsm(const Fragment<BLOCKS>& acc, u32 room, int me, u32 t, const A& ahead, const F& finish) {
  constexpr int OWN = OWN_BLOCKS<BLOCKS, PEERS>;
  TS_EACH(t, THREADS) {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
      store_at_peer(at_peer(room + (u32)((me * OWN + i / PEERS) * THREADS + (int)t) * 16, i % PEERS), TS_REG(acc, 4 * i), TS_REG(acc, 4 * i + 1),
                    TS_REG(acc, 4 * i + 2), TS_REG(acc, 4 * i + 3));
  }
  const auto add = [&](u32 t, int b, float (&sums)[1][4]) {
    if (!has_block<BLOCKS, PEERS>(me, b)) return;
    u32 part[PEERS][4];
#pragma unroll
    for (int q = 0; q < PEERS; ++q) lds_words(room + (u32)((q * OWN + b) * THREADS + (int)t) * 16, part[q]);
    add_parts<PEERS>(sums[0], [&](int q, int e) { return float_of(part[q][e]); });
  };
  own_blocks<BLOCKS, PEERS, THREADS, 1>(me, t, ahead, cluster_sync, add, finish);
}

// What all PEERS of a cluster have of a tile, combined, in everybody's registers; always in the same order. `room` holds
// PEERS x BLOCKS x THREADS x 16 bytes that nothing else uses.
template <int BLOCKS, int PEERS, int THREADS, class O>
TS_DEV void all_exchange_dsm(Fragment<BLOCKS>& acc, u32 room, int me, u32 t, const O& combine) {
  TS_EACH(t, THREADS) {
#pragma unroll
    for (int far = 0; far < PEERS; ++far)  // the next one first, so that not all send to one at once
#pragma unroll
      for (int i = 0; i < BLOCKS; ++i)
        store_at_peer(at_peer(room + (u32)((me * BLOCKS + i) * THREADS + (int)t) * 16, (u32)(me + far) % PEERS), TS_REG(acc, 4 * i),
                      TS_REG(acc, 4 * i + 1), TS_REG(acc, 4 * i + 2), TS_REG(acc, 4 * i + 3));
  }
  cluster_sync();
  TS_EACH(t, THREADS) {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
      for (int q = 0; q < PEERS; ++q) {
        u32 part[4];
        lds_words(room + (u32)((q * BLOCKS + i) * THREADS + (int)t) * 16, part);
#pragma unroll
        for (int e = 0; e < 4; ++e) TS_REG(acc, 4 * i + e) = q == 0 ? float_of(part[e]) : combine(TS_REG(acc, 4 * i + e), float_of(part[e]));
      }
  }
}

// Into memory, in any order: a warpgroup stages its ROWS rows, rounded to T, and adds them in boxes of ROWS x WIDTH. Boxes
// of 128 bytes have the 128-byte swizzle. `stage` holds ROWS x 8 BLOCKS elements that nothing else uses; `cleared`
// completes when what is added to is zero. Warps without rows do not come here.
template <class T, int BLOCKS, int WIDTH, int ROWS>
TS_DEV void reduce_add(const Fragment<BLOCKS>& acc, const TensorMap* map, int x, int y, u32 stage, u32 cleared, int g, u32 t) {
  constexpr u32 BOX = ROWS * WIDTH * 2;
  TS_EACH(t, (ROWS + 15) / 16 * 32) {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const u32 row = (u32)row_of(t, j), box = i * 8 / WIDTH, block = i % (WIDTH / 8);
        if (ROWS < 16 && row >= ROWS) continue;
        const u32 at = WIDTH == 64 ? block ^ (row & 7) : block;
        sts32(stage + box * BOX + row * (WIDTH * 2) + (at << 4) + (t & 3) * 4, T::pack(TS_REG(acc, 4 * i + 2 * j), TS_REG(acc, 4 * i + 2 * j + 1)));
      }
  }
  fence_async_shared();
  named_sync(GROUP_BARRIER + g, (ROWS + 15) / 16 * 32);
  if (t == 0) {
    bar_wait(cleared, 0);
    fence_async_global();
#pragma unroll 1
    for (int b = 0; b < BLOCKS * 8 / WIDTH; ++b) tma_reduce_add(map, x + b * WIDTH, y, stage + b * BOX);
    store_commit();
    store_wait_read<0>();
  }
}

}  // namespace ts
