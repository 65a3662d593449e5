// The kernel around the roles: which worker a CTA is, its barriers, and who does what.
#pragma once

namespace ts {

// The two warpgroups take turns on the tensor cores: one multiplies while the other runs its epilogue.
template <bool ON>
struct Turns {
  int g;
  TS_DEV explicit Turns(int g) : g(g) {
    if (ON && g == 1) named_arrive(TURN, 256);
  }
  TS_DEV void wait() {
    if (ON) named_sync(TURN + g, 256);
  }
  TS_DEV void pass() {
    if (ON) named_arrive(TURN + (g ^ 1), 256);
  }
  // The second group's last pass has no taker; take it, so that the barrier is left clean.
  TS_DEV void finish() {
    if (ON && g == 0) named_sync(TURN, 256);
  }
};

template <bool RESIDENT, int SLOTS, int BYTES>
struct PageRing {
  using type = Ring<SLOTS, BYTES>;
};
template <int SLOTS, int BYTES>
struct PageRing<true, SLOTS, BYTES> {
  using type = Resident<SLOTS, BYTES>;
};
template <class S>
using PagesOf = typename PageRing<S::RESIDENT, S::PAGES, S::PAGE_BYTES>::type;

// Which ring warpgroup g takes from: Shard(0) shares the weights, Shard(1) the inputs.
template <class S>
TS_DEV int input_ring(int g) {
  return S::TILES == 2 ? g : 0;
}
template <class S>
TS_DEV int page_ring(int g) {
  return S::PAGE_RINGS == 2 ? g : 0;
}

template <class P>
TS_DEV void give_credit(const P& p, const Sync& sync, int k, int tile) {
  Credit c = p.credit(k);
  queue_free(sync, p.queue(c.queue), c.consumer, tile);
}

}  // namespace ts
