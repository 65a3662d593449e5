// Which tiles of a feed-forward block, or of one layer, a cluster makes, and when: an order that all CTAs know.
#pragma once
#include "ptx.cuh"

namespace ts {

constexpr int PAIR = 2;  // CTAs of a cluster

// The order of the units, a tile of either product for each CTA of a cluster: `head` of the first product; then, again and
// again, `seconds` of the second and `firsts` more of the first. So many of the first are ahead that nobody waits.
struct Walk {
  int all_firsts, all_seconds;  // units there are
  int head, firsts, seconds;
  int slots;  // tiles of 128 rows in the ring of the hidden layer, and of the operand
  int early;  // tiles whose operand is made by the warps that multiply, before they do
};
struct Unit {
  bool second;
  int rows, column;  // tile of rows, of this CTA; block of columns
  int last, block;   // which result that is of, and its place among that one's blocks
};

// The units of one cluster in that order. Of either product it has every `clusters`-th; the second's are dealt on from
// where the first's ended: who has one more of those is the last to get one of these.
template <class K>
struct Deal {
  const Walk& w;
  int clusters, rank, first, second;
  TS_DEV Deal(const Walk& w, int cluster, int clusters, int rank)
      : w(w), clusters(clusters), rank(rank), first(cluster),
        second((cluster + clusters - w.all_firsts % clusters) % clusters) {}
  TS_DEV bool more() const { return first < w.all_firsts || second < w.all_seconds; }
  // Units of the first product in front of the next one of the second; those that it is made from end a `head` before.
  TS_DEV int in_front() const { return w.head + second / w.seconds * w.firsts; }
  TS_DEV bool at_second() const { return second < w.all_seconds && (first >= w.all_firsts || first >= in_front()); }
  TS_DEV Unit take() {
    const bool is_second = at_second();
    const int index = is_second ? second : first, blocks = is_second ? K::OUT_BLOCKS : K::HID_BLOCKS;
    (is_second ? second : first) += clusters;
    const int column = index % blocks;
    int last = 0, begin = 0;
    for (; is_second && last < K::LASTS - 1 && column >= K::end_of(last); ++last) begin = K::end_of(last);
    return {is_second, index / blocks * PAIR + rank, column, last, column - begin};
  }
};

}  // namespace ts
