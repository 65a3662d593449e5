// Who did what when. A kernel that is emitted with TS_STAMPS writes it down; in any other nothing of this is left.
//
// A CTA has six roles: two consumer warpgroups, then the loader group's four warps. Each has a header and a bounded
// number of stamps in device memory, which one of its threads writes. Where the next one goes is kept in shared memory,
// not in registers: consumers have none to spare.
#pragma once

namespace ts {

// cuda/stamps.py has the same names in the same order.
enum Event : u32 {
  // A role begins something for a tile; it ends where the role's next begins.
  PRODUCT,
  EPILOGUE,
  LOAD_WEIGHTS,
  LOAD_ROWS,
  STORE_TILE,
  IDLE,
  // A role has waited: a consumer for what the loaders bring and take, a loader for room ahead of the consumers or for
  // something to store, and either end of a queue for the other.
  NO_WEIGHTS,
  NO_ROWS,
  NO_STAGING,
  WEIGHTS_AHEAD,
  ROWS_AHEAD,
  NOTHING_STAGED,
  QUEUE_EMPTY,
  QUEUE_FULL,
};

#ifdef TS_STAMPS

constexpr int STAMP_ROLES = 6;
constexpr u32 STAMP_SLOT = 16;  // bytes of shared memory a role: address of the next stamp, room left

struct Stamp {
  u64 clock;   // of the SM: when the event began, or the wait ended
  u32 value;   // the tile, or the wait's cycles
  u32 event;   // and from bit 8 on the queue
};
// The SM's clock and the GPU's common time, at the start and at the end: one maps to the other between them.
struct StampHeader {
  u64 start_ns, start_clock, end_ns, end_clock;
  u32 stamps, sm;  // stamps: those dropped for want of room included
  u32 unused[6];
};

struct Stamps {
  u32 slot;
  int role;

  TS_DEV bool writes() const { return role < 2 ? group_leader() : lane_in_warp() == 0; }

  template <class P>
  TS_DEV u64 header(const P& p) const {
    const u64 bytes = sizeof(StampHeader) + (u64)(u32)p.stamp_capacity * sizeof(Stamp);
    return (u64)p.stamps + (u64)(cta_index() * STAMP_ROLES + role) * bytes;
  }
  // The common time ticks every so many clocks: its next tick, and the clock then.
  static TS_DEV void both(u64& ns, u64& clock) {
    const u64 before = now_ns();
    for (int k = 0; k < 4096; ++k) {
      ns = now_ns();
      clock = sm_clock();
      if (ns != before) return;
    }
  }
  template <class P>
  TS_DEV void begin(const P& p) const {
    if (!writes()) return;
    u64 ns = 0, clock = 0;
    both(ns, clock);
    const u64 at = header(p), first = at + sizeof(StampHeader);
    store_global_words((void*)at, {(u32)ns, (u32)(ns >> 32), (u32)clock, (u32)(clock >> 32)});
    sts32(slot, (u32)first);
    sts32(slot + 4, (u32)(first >> 32));
    sts32(slot + 8, (u32)p.stamp_capacity);
  }
  template <class P>
  TS_DEV void end(const P& p) const {
    if (!writes()) return;
    u64 ns = 0, clock = 0;
    both(ns, clock);
    const u64 at = header(p);
    store_global_words((void*)(at + 16), {(u32)ns, (u32)(ns >> 32), (u32)clock, (u32)(clock >> 32)});
    store_global_words((void*)(at + 32), {(u32)p.stamp_capacity - lds32(slot + 8), sm_id(), 0, 0});
  }

  TS_DEV void put(u64 clock, u32 value, u32 event) const {
    const u32 left = lds32(slot + 8);
    sts32(slot + 8, left - 1);
    if ((int)left <= 0) return;
    const u64 at = lds32(slot) | (u64)lds32(slot + 4) << 32, next = at + sizeof(Stamp);
    sts32(slot, (u32)next);
    sts32(slot + 4, (u32)(next >> 32));
    store_global_words((void*)at, {(u32)clock, (u32)(clock >> 32), value, event});
  }
  TS_DEV void mark(Event event, int tile) const {
    if (writes()) put(sm_clock(), (u32)tile, event);
  }
  TS_DEV u32 now() const { return (u32)sm_clock(); }
  TS_DEV void waited(Event event, u32 since, int queue = 0) const {
    const u64 clock = sm_clock();
    if (writes()) put(clock, (u32)clock - since, event | (u32)queue << 8);
  }
  // Nothing is written where there was no need to wait.
  TS_DEV void wait(Event event, u32 bar, u32 parity) const {
    if (bar_ready(bar, parity)) return;
    const u32 since = now();
    bar_wait(bar, parity);
    waited(event, since);
  }
};

#else

struct Stamps {
  TS_DEV void mark(Event, int) const {}
  TS_DEV u32 now() const { return 0; }
  TS_DEV void waited(Event, u32, int = 0) const {}
  TS_DEV void wait(Event, u32 bar, u32 parity) const { bar_wait(bar, parity); }
};

#endif

// A ring whose waits are stamped as `event`: consumers wait for full slots, producers for empty ones.
template <class R>
struct Timed : R {
  Stamps stamps;
  Event event;
  TS_DEV Timed(const R& ring, const Stamps& stamps, Event event) : R(ring), stamps(stamps), event(event) {}
  TS_DEV void wait_full() { stamps.wait(event, this->full(), this->parity); }
  TS_DEV u32 take() {
    wait_full();
    return this->addr();
  }
  TS_DEV void wait_empty() { stamps.wait(event, this->empty(), this->parity ^ 1); }
  TS_DEV void wait_all_empty() {
    for (int i = 0; i < R::COUNT; ++i) stamps.wait(event, this->bars + (u32)i * 16 + 8, this->parity ^ 1);
  }
};

}  // namespace ts
