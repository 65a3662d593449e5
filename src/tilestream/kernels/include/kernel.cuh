// The kernel around the roles: which worker a CTA is, its barriers, and who does what.
#pragma once

namespace ts {

template <bool RESIDENT, int SLOTS, int BYTES, bool PAIR>
struct PageRing {
  using type = Ring<SLOTS, BYTES, PAIR>;
};
template <int SLOTS, int BYTES, bool PAIR>
struct PageRing<true, SLOTS, BYTES, PAIR> {
  using type = Resident<SLOTS, BYTES>;
};
template <class S>
using PagesOf = typename PageRing<S::RESIDENT, S::PAGES, S::PAGE_BYTES, S::PAIR_COUNT == 2>::type;

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
