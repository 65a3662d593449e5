// One exchange of collectives.cuh by itself, again and again: what benchmarks/run/collectives.py times. CTAs are in groups of
// PEERS, in those kinds that go over a cluster a cluster each. A consumer warpgroup, and four warps as a shared tile has them.
//
// E has: KIND; PEERS; BLOCKS of 8 columns x 64 rows of fp32 that each CTA has, of sums; PART bytes that each CTA has, of
// gathers; where in shared memory the ROOM is (two of ROOM_BYTES where they take turns), the STAGE of an own part, the BARS.
#pragma once
#include "collectives.cuh"

namespace ts {

enum Exchange : int { BARRIER, GATHER_DSM, RING_DSM, GATHER_L2, SCATTER_DSM, SCATTER_L2, ALL_ADD, ALL_MUL, ADD_MEMORY };

template <class E>
constexpr bool IS_GATHER = E::KIND == GATHER_DSM || E::KIND == RING_DSM || E::KIND == GATHER_L2;
template <class E>
constexpr bool OVER_CLUSTER = E::KIND != GATHER_L2 && E::KIND != SCATTER_L2 && E::KIND != ADD_MEMORY;

// Part q is 128-byte rows; through the L2 bulk copies swizzle them.
template <class E>
TS_DEV u32 word_at(u32 room, u32 at) {
  return room + (E::KIND == GATHER_L2 ? at ^ ((at >> 3) & 0x70) : at);
}

template <class E>
TS_DEV void gather(const Params& p, const Team& team, u32 smem, int role) {
  const int me = team.cta % E::PEERS, first = team.cta - me;
  const u32 room = smem + E::ROOM, bars = smem + E::BARS, done = bars + 8 * E::PEERS, loaded = done + 8;
  const u32* part = p.parts + (u64)team.cta * (E::PART / 4);
  const u64 epoch = E::KIND == GATHER_L2 && role == 2 ? team.next_epoch(MIDDLE) : 0;
#pragma unroll 1
  for (int n = 0; n < p.times; ++n) {
    const u32 parity = (u32)n & 1;
    u32* between = (u32*)p.between + ((u64)parity * team.ctas + team.cta) * (E::PART / 4);
    if (role < 0) {
      TS_LANES {
#pragma unroll 1
        for (u32 k = TS_LANE; k < E::PART / 16; k += 128) {
          const u32 own = (OVER_CLUSTER<E> ? room + me * E::PART : smem + E::STAGE) + 16 * k;
          u32 words[4];
          if (n == 0) {
            load_shared_words(part + 4 * k, words);
            for (int e = 0; e < 4; ++e) sts32(own + 4 * e, words[e]);
          }
          if (OVER_CLUSTER<E>) continue;
          lds_words(own, words);
          store_shared_words(between + 4 * k, words);
        }
      }
      if (OVER_CLUSTER<E>) fence_async_shared();
      group_arrive(OVER_CLUSTER<E> ? bars + 8 * me : done);
    } else if (role == 2) {
      if constexpr (E::KIND == GATHER_L2) {
        bar_wait(done, parity);
        if (lane_in_warp() == 0) team.announce(MIDDLE, epoch + n);
        await_peers(team, MIDDLE, epoch + n, first, 1, E::PEERS);
        fence_async_global();
        sync_warp();
        if (lane_in_warp() == 0) {
          bar_expect(loaded, E::PEERS * E::PART);
#pragma unroll 1
          for (int q = 0; q < E::PEERS; ++q)
            tma_load(room + q * E::PART, &p.map, 0, ((int)parity * team.ctas + first + q) * (int)(E::PART / 128), loaded, EVICT_NORMAL);
        }
        bar_wait(loaded, parity);
      } else {
        if constexpr (E::KIND == GATHER_DSM) {
          send_part<E::PEERS, E::PART>(room, bars, me, parity);
        } else {
          if (lane_in_warp() == 0) shift_parts<E::PEERS, E::PART>(room, bars, me, parity);
          sync_warp();
        }
        await_parts<E::PEERS>(team, bars, first, parity);
        if (lane_in_warp() == 0) expect_parts<E::PEERS, E::PART>(bars, me);
      }
      sync_warp();
    }
    if (OVER_CLUSTER<E>)
      cluster_sync();  // all have all parts: the next ones may come
    else
      sync_cta();
  }
  if (role < 0) {
    TS_LANES {
#pragma unroll 1
      for (u32 k = TS_LANE; k < E::PEERS * E::PART / 4; k += 128)
        store_global((u32*)p.out + (u64)team.cta * (E::PEERS * E::PART / 4) + k, lds32(word_at<E>(room, 4 * k)));
    }
  }
}

template <class E>
TS_DEV void combine(const Params& p, const Team& team, u32 smem) {
  constexpr int BLOCKS = E::BLOCKS, PEERS = E::PEERS;
  const int me = team.cta % PEERS, first = team.cta - me;
  const u32 t = lane_in_group(), cleared = smem + E::BARS;
  const float* tile = p.tiles + (u64)team.cta * (BLOCKS * 512);
  float* out = (float*)p.out + (u64)team.cta * (BLOCKS * 512);
  const u64 epoch = team.next_epoch(PARTIAL);
  Fragment<BLOCKS> acc;
  TS_EACH(t, 128) {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      float v[4];
      load_shared_floats(tile + (i * 128 + t) * 4, v);
#pragma unroll
      for (int e = 0; e < 4; ++e) TS_REG(acc, 4 * i + e) = v[e];
    }
  }
  const auto ahead = [](u32, int) { return 0; };
  const auto finish = [&](u32 lane, int i, const float(&v)[4], int) { store_shared_floats(out + (i * 128 + lane) * 4, v[0], v[1], v[2], v[3]); };
#pragma unroll 1
  for (int n = 0; n < p.times; ++n) {
    const u32 turn = (u32)n & 1;  // rooms take turns: one is written while slower CTAs read the other
    if constexpr (E::KIND == SCATTER_DSM) {
      reduce_scatter_dsm<BLOCKS, PEERS, 128>(acc, smem + E::ROOM + turn * E::ROOM_BYTES, me, t, ahead, finish);
    } else if constexpr (E::KIND == SCATTER_L2) {
      float* between = (float*)p.between + ((u64)turn * team.ctas + first) * (BLOCKS * 512);
      reduce_scatter_l2<BLOCKS, PEERS, 128>(acc, between, me, t, team, epoch + n, first, 1, ahead, finish);
    } else if constexpr (E::KIND == ADD_MEMORY) {
      reduce_add<bf16, BLOCKS, E::WIDTH, 64>(acc, &p.map, 0, team.cta / PEERS * 64, smem + E::ROOM, cleared, 0, t);
      named_sync(GROUP_BARRIER, 128);  // what was staged is read
    } else if constexpr (E::KIND == BARRIER) {
      cluster_sync();
    } else {
      all_exchange_dsm<BLOCKS, PEERS, 128>(acc, smem + E::ROOM + turn * E::ROOM_BYTES, me, t,
                                           [](float a, float b) { return E::KIND == ALL_ADD ? a + b : a * b; });
    }
  }
  if (E::KIND == ALL_ADD || E::KIND == ALL_MUL) {
    TS_EACH(t, 128) {
#pragma unroll
      for (int i = 0; i < BLOCKS; ++i)
        store_shared_floats(out + (i * 128 + t) * 4, TS_REG(acc, 4 * i), TS_REG(acc, 4 * i + 1), TS_REG(acc, 4 * i + 2), TS_REG(acc, 4 * i + 3));
    }
  }
}

template <class E>
TS_DEV void run_exchange(const Params& p, u32 smem) {
  const Team team = {p.flags, p.dump, p.limit_ns, cta_index(), cta_count()};
  const int warp = warp_index(), role = warp < 4 ? -1 : warp - 4;
  if (cta_leader()) {
    const u32 bars = smem + E::BARS;
    if constexpr (IS_GATHER<E>) {
      init_parts<E::PEERS>(bars, team.cta % E::PEERS, 4);
      bar_init(bars + 8 * E::PEERS, 4);
      bar_init(bars + 8 * E::PEERS + 8, 1);
      if constexpr (OVER_CLUSTER<E>) expect_parts<E::PEERS, E::PART>(bars, team.cta % E::PEERS);
    } else {
      bar_init(bars, 1);
    }
    bar_init_done();
  }
  if (OVER_CLUSTER<E>)
    cluster_sync();
  else
    sync_cta();
  if (E::KIND == ADD_MEMORY && cta_leader()) bar_arrive(smem + E::BARS);  // what is added to was zero before the launch
  if constexpr (IS_GATHER<E>) {
    gather<E>(p, team, smem, role);
  } else if (role < 0) {
    combine<E>(p, team, smem);
  } else if (OVER_CLUSTER<E>) {
    for (int n = 0; n < p.times; ++n) cluster_sync();
  }
}

}  // namespace ts
