// The weights of a decode step, and its keys and values, on their way through a ring.
#pragma once
#include "step_tiles.cuh"

// A place in the ring, and how often it was gone round.
struct Turn {
  u32 slot = 0, parity = 0;
  TS_DEV void next() {
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  }
};

// The warp that asks for weights, in the order in which the others will want them.
struct Loader : Tiles {
  const StepParams& p;
  const u32 base;
  const int lane;
  Turn turn;
  TS_DEV Loader(const StepParams& p, u32 base) : p(p), base(base), lane(lanes::lane()) {}
  // Rows of a tile, of which `there` exist, from a segment on.
  template <int STAGE>
  TS_DEV void ask(const char* of, int row, int there, int segment) {
    const u32 to = base + turn.slot * SLOT, full = base + FULL + turn.slot * 8;
    lanes::await(base + FREE + turn.slot * 8, turn.parity ^ 1);  // at first they all are
    const int start = segment * wide(STAGE), left = columns(STAGE) - start, count = left < wide(STAGE) ? left : wide(STAGE);
    if constexpr (is_turned(STAGE)) {
      const char* const from = of + ((long long)start * rows(STAGE) + row) * 2;
#pragma unroll 4
      for (int k = lane; k < count; k += LANES)
        lanes::copy128(to + k * 16, from + (long long)k * rows(STAGE) * 2, 16);
      lanes::copies_arrive(full);
    } else if (lane < TILE && lane < there) {
      lanes::ask(to + lane * pitch(STAGE), of + ((long long)(row + lane) * columns(STAGE) + start) * 2, count * 2, full);
    } else {
      lanes::arrive(full);
    }
    turn.next();
  }
  template <int STAGE>
  TS_DEV void ask_all(int layer) {
    const StepLayer& l = p.layers[layer];
    if constexpr (STAGE == PROJECT || STAGE == GATE)
      for (int c = lane * 64; c < WIDTH; c += LANES * 64) {  // norms: in the L2 when they are wanted
        lanes::prefetch((STAGE == GATE ? l.middle_norm : l.norm) + c * 2);
        if (LAYER_NORMS) lanes::prefetch((STAGE == GATE ? l.middle_norm_bias : l.norm_bias) + c * 2);
      }
    for (int first = first_tile(STAGE); first < tiles(STAGE); first += round(STAGE))
      for (int segment = 0; segment < segments(STAGE); ++segment)
        for (int n = 0, tile = first; n < at_once(STAGE) && tile < tiles(STAGE); ++n, tile += apart(STAGE)) ask_tile<STAGE>(l, tile, segment);
  }
  template <int STAGE>
  TS_DEV void ask_tile(const StepLayer& l, int tile, int segment) {
    int row = tile * TILE;
    const char* of = STAGE == OUTPUT ? l.output : STAGE == GATE ? l.gate : STAGE == DOWN ? l.down : p.head;
    if constexpr (STAGE == PROJECT) of = of_three(tile, l.query, l.key, l.value, row);
    const int there = STAGE == HEAD ? VOCABULARY - row : TILE;
    ask<STAGE>(of, row, there, segment);
    if constexpr (halves(STAGE) > 1) ask<STAGE>(l.up, row, there, segment);
  }
  // Keys and values of the shares that this CTA attends to, but for the token's own row, which comes with this step.
  TS_DEV void ask_cached(int layer) {
    if (member >= items) return;
    const StepLayer& l = p.layers[layer];
    const long long position = (long long)lanes::peek((const u64*)l.length);
    for (int item = member; item < items; item += members) {
      const Share s = share_of(base, item);
      for (int first = s.start; first < s.end; first += OF_SLOT) {
        const int last = first + OF_SLOT < s.end ? first + OF_SLOT : s.end;
        const u32 to = base + turn.slot * SLOT, full = base + FULL + turn.slot * 8;
        lanes::await(base + FREE + turn.slot * 8, turn.parity ^ 1);
        // Lanes 0 and 1: keys in front of the token's and behind it; 2 and 3: values.
        const bool behind = lane & 1, is_value = lane & 2;
        const long long cut = position + behind < first ? first : position + behind < last ? position + behind : last;
        const long long from = behind ? cut : first, until = behind ? last : cut;
        if (lane < 4 && from < until) {
          const u32 row = (u32)(from - first) + (is_value ? OF_SLOT : 0);
          lanes::ask(to + row * (FEATURES * 2), (is_value ? l.values : l.keys) + (s.row + from) * (FEATURES * 2), (u32)(until - from) * (FEATURES * 2), full);
        } else {
          lanes::arrive(full);
        }
        turn.next();
      }
    }
  }
  TS_DEV void run() {
#pragma unroll 1
    for (int layer = 0; layer < LAYERS; ++layer) {
      ask_all<PROJECT>(layer);
      if (PARALLEL) ask_all<GATE>(layer);
      if (layer == 0) lanes::await(base + LIMITS_THERE, 0);
      ask_cached(layer);
      ask_all<OUTPUT>(layer);
      if (!PARALLEL) ask_all<GATE>(layer);
      ask_all<DOWN>(layer);
    }
    ask_all<HEAD>(0);
    if (TURNED) lanes::copies_here();
  }
};
