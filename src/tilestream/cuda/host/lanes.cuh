// The host twin of include/lanes.cuh: a lane is a fiber (fibers.h), a CTA's lanes run together.
//
// Only `together` and `all_together` order what lanes write: what lanes exchange in fragments, shuffles and products goes
// through relaxed atomics, which ThreadSanitizer takes for no order at all. A copy past the registers spoils its place
// when it is asked for, and happens when it is waited for.
#pragma once
#include <atomic>
#include <cstring>
#include <vector>

#include "fibers.h"
#include "ptx.cuh"

#define TS_LANES_KERNEL(threads, resident) static void
#define TS_LANES_SHARED(base) const u32 base = 0
#define TS_APART inline

namespace lanes_host {

constexpr auto relaxed = std::memory_order_relaxed;

// Lanes meet, `count` of them unless told: with `order`, all that was written before is seen behind it.
struct Meeting {
  std::atomic<u32> arrived{0}, turn{0};
  fibers::Queue waiting;
  u32 count = 0;
  template <bool ORDER>
  void meet(u32 members = 0) {
    if (arrived.fetch_add(1, ORDER ? std::memory_order_acq_rel : relaxed) + 1 == (members ? members : count)) {
      arrived.store(0, relaxed);
      turn.fetch_add(1, ORDER ? std::memory_order_release : relaxed);
      fibers::wake_all(waiting);
      return;
    }
    fibers::wait_in(waiting);
    turn.load(ORDER ? std::memory_order_acquire : relaxed);
  }
};

struct Warp {
  Meeting ordered, exchange, team[32];  // of teams by their first lane
  std::atomic<u64> words[2][32][8];  // two turns: who is ahead writes what nobody reads any more
  std::atomic<u64> of_teams[2][32];
};
// Copies that are under way: of multiples of 16 bytes, or of less with zeros behind.
struct Copies {
  struct Copy {
    u32 to;
    const void* from;
    u32 bytes;
  };
  Copy* all = nullptr;
  int count = 0, room = 0;
  TS_UNWATCHED void add(const Copy& copy) {
    if (count == room) all = (Copy*)std::realloc(all, (room = 2 * room + 16) * sizeof(Copy));
    all[count++] = copy;
  }
  TS_UNWATCHED void move_to(Copies& other) {
    for (int n = 0; n < count; ++n) other.add(all[n]);
    count = 0;
  }
  TS_UNWATCHED void happen(char* shared) {
    for (int n = 0; n < count; ++n) {
      std::memcpy(shared + all[n].to, all[n].from, all[n].bytes);
      if (all[n].bytes < 16) std::memset(shared + all[n].to + all[n].bytes, 0, 16 - all[n].bytes);
    }
    count = 0;
  }
};
// What a barrier of copies knows. Copies happen as late as they may: when somebody has waited for them.
struct Bar {
  std::atomic<u32> passed{0};  // orders who arrived before who waited
  fibers::Queue waiting;
  u32 count, left, phase = 0;
  Copies coming;
  TS_UNWATCHED void arrive() {
    if (--left) return;
    left = count, ++phase;
    fibers::wake_all(waiting);
  }
  TS_UNWATCHED void await(u32 parity) {
    while ((phase & 1) == parity) fibers::wait_in(waiting);
  }
};
struct Read {  // of 16 bytes of shared memory, the last: who, and how often it had put a fence in front of copies by then
  const struct Lane* by = nullptr;
  u32 fences = 0;
};
struct Cta {
  int block;
  std::vector<Read> reads;
  char* shared;
  std::vector<Warp> warps;
  Meeting everybody, some;
  Bar* bars[1 << 15];  // by address over eight
};
struct Lane : fibers::Fiber {
  Cta* cta;
  int thread;
  u32 turn = 0, team_turn = 0, fences = 0;
  u64 clock_ns = 0;
  Copies copies;
};
inline u32 shared_bytes;
inline int blocks;

TS_UNWATCHED Lane& self() { return *static_cast<Lane*>(fibers::running); }
inline Cta& cta() { return *self().cta; }
inline Warp& mine() { return cta().warps[self().thread / 32]; }

inline char* at(u32 address, u32 bytes) {
  if (address % bytes || address + bytes > shared_bytes) {
    std::fprintf(stderr, "%u bytes at %u of %u: outside of shared memory, or not aligned\n", bytes, address, shared_bytes);
    std::_Exit(42);
  }
  return cta().shared + address;
}

// A bulk copy may come before a load from its place that no fence follows, on a GPU: here such a copy is an error.
TS_UNWATCHED const char* read(u32 address, u32 bytes) {
  const char* const place = at(address, bytes);
  return cta().reads[address / 16] = {&self(), self().fences}, place;
}
TS_UNWATCHED void check_read(u32 address) {
  const Read last = cta().reads[address / 16];
  if (last.by && last.by->fences == last.fences) ts_host::trap("a bulk copy may come before a load from its place: no fence is between them");
}

// All lanes' `count` words, as a function of lane and word.
template <int COUNT>
auto exchanged(const u64 (&v)[COUNT]) {
  auto& slot = mine().words[self().turn++ & 1];
  for (int k = 0; k < COUNT; ++k) slot[self().thread % 32][k].store(v[k], relaxed);
  mine().exchange.meet<false>();
  return [&slot](int lane, int k) { return slot[lane][k].load(relaxed); };
}

// A lane's clock stands still while others run: nobody is late because the machine is busy.
inline u64 after_others() {
  fibers::give_way();
  return self().clock_ns += 1000;
}

}  // namespace lanes_host

namespace lanes {

using namespace ts;

TS_DEV int thread() { return lanes_host::self().thread; }
TS_DEV int lane() { return thread() % 32; }
TS_DEV int warp() { return thread() / 32; }
TS_DEV int block() { return lanes_host::cta().block; }
TS_DEV int blocks() { return lanes_host::blocks; }
TS_DEV void together() { lanes_host::mine().ordered.meet<true>(); }
TS_DEV void all_together() { lanes_host::cta().everybody.meet<true>(); }
TS_DEV void meet(int threads) { lanes_host::cta().some.meet<true>((u32)threads); }
TS_DEV u64 of_lane(u64 v, int lane) { return lanes_host::exchanged({v})(lane, 0); }
TS_DEV u32 word_of(u32 v, int lane) { return (u32)of_lane(v, lane); }

TS_DEV u32 vote(bool v) {
  const auto all = lanes_host::exchanged({(u64)v});
  u32 votes = 0;
  for (int k = 0; k < 32; ++k) votes |= (u32)all(k, 0) << k;
  return votes;
}
template <int COUNT>
TS_DEV void alike(u32 (&same)[COUNT], const u32 (&v)[COUNT], int shift, int bits) {
  for (int k = 0; k < COUNT; ++k) {
    const u64 mine = v[k] >> shift & ((1u << bits) - 1);
    const auto all = lanes_host::exchanged({mine});
    same[k] = 0;
    for (int lane = 0; lane < 32; ++lane) same[k] |= (u32)(all(lane, 0) == mine) << lane;
  }
}
TS_DEV u32 ones(u32 v) { return (u32)__builtin_popcount(v); }

TS_DEV float across(float v, int far) { return float_of((u32)of_lane(bits_of(v), lane() ^ far)); }
template <int TEAM>
TS_DEV float across_team(float v, int far) {
  auto& warp = lanes_host::mine();
  auto& slot = warp.of_teams[lanes_host::self().team_turn++ & 1];
  slot[lane()].store(bits_of(v), lanes_host::relaxed);
  warp.team[lane() / TEAM * TEAM].template meet<false>(TEAM);
  return float_of((u32)slot[lane() ^ far].load(lanes_host::relaxed));
}

TS_DEV void renew(int&) {}

// ---- shared memory
template <class V>
TS_DEV V get(u32 at) {
  return *(const V*)lanes_host::read(at, sizeof(V));
}
TS_DEV void put32(u32 at, u32 v) { *(u32*)lanes_host::at(at, 4) = v; }
TS_DEV void put_pair(u32 at, float a, float b) {
  lanes_host::at(at, 8);
  put32(at, bits_of(a)), put32(at + 4, bits_of(b));
}
TS_DEV void put16(u32 at, u32 v) { *(u16*)lanes_host::at(at, 2) = (u16)v; }
TS_DEV u32 get32(u32 at) { return get<u32>(at); }
TS_DEV u32 get16(u32 at) { return get<u16>(at); }
TS_DEV void get128(u32 at, u32 (&v)[4]) {
  std::memcpy(v, lanes_host::read(at, 16), 16);
}
template <int BYTES>
TS_DEV void get_words(u32 at, u32* words) {
  std::memcpy(words, lanes_host::read(at, BYTES), BYTES);
}
TS_DEV void add32(u32 at, u32 v) { ((std::atomic<u32>*)lanes_host::at(at, 4))->fetch_add(v, lanes_host::relaxed); }
TS_DEV void keep_smaller(u32 at, u32 v) {
  auto& word = *(std::atomic<u32>*)lanes_host::at(at, 4);
  for (u32 old = word.load(lanes_host::relaxed); v < old && !word.compare_exchange_weak(old, v, lanes_host::relaxed);) {
  }
}

// ---- global memory
TS_DEV u32 load16(const void* p) { return *(const u16*)p; }
TS_DEV long long load_index(const void* p, long long at, int wide) {
  return wide ? ((const long long*)p)[at] : (long long)((const int*)p)[at];
}
TS_DEV void load128(const void* p, u32 (&v)[4]) {
  if ((u64)p % 16) ts_host::trap("a load of 16 bytes is not aligned");
  for (int k = 0; k < 4; ++k) v[k] = ((const u32*)p)[k];
}
TS_DEV void load128_now(const void* p, u32 (&v)[4]) { load128(p, v); }
template <int BYTES>
TS_DEV void load_words(const void* p, u32* words) {
  if ((u64)p % BYTES) ts_host::trap("a load is not aligned");
  words[0] = 0;
  std::memcpy(words, p, BYTES);
}
template <int BYTES>
TS_DEV void store_words(void* p, const u32* words) {
  if ((u64)p % BYTES) ts_host::trap("a store is not aligned");
  std::memcpy(p, words, BYTES);
}
TS_DEV void store_shared(float* p, float v) { *p = v; }
TS_DEV float load_shared(const float* p) { return *p; }
TS_DEV u32 peek16(const u16* p) { return *p; }
TS_DEV void add_global(u32* p, u32 v) { __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
TS_DEV void post(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
TS_DEV u32 peek(const u32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
TS_DEV void post(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
TS_DEV u64 peek(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
TS_DEV void peek_pair(const u64* p, u64& first, u64& second) {
  if ((u64)p % 16) ts_host::trap("a load of 16 bytes is not aligned");
  first = peek(p), second = peek(p + 1);
}
TS_DEV u64 now_ns() { return lanes_host::after_others(); }
TS_DEV void rest() { lanes_host::after_others(); }
constexpr u32 BETWEEN_CLOCKS = 32;
TS_DEV void prefetch(const void*) {}
TS_DEV void store8(void* p, u32 v) { *(unsigned char*)p = (unsigned char)v; }
TS_DEV void store32(void* p, u32 v) { *(u32*)p = v; }
TS_DEV void store128(void* p, const u32 (&v)[4]) {
  if ((u64)p % 16) ts_host::trap("a store of 16 bytes is not aligned");
  for (int k = 0; k < 4; ++k) ((u32*)p)[k] = v[k];
}
TS_DEV void copy128(u32 to, const void* from, u32 bytes) {
  if ((u64)from % 16) ts_host::trap("a copy of 16 bytes is not aligned");
  char* const place = lanes_host::at(to, 16);
  for (int k = 0; k < 16; ++k) place[k] = (char)0xff;
  lanes_host::self().copies.add({to, from, bytes});
}
TS_DEV void copies_here() { lanes_host::self().copies.happen(lanes_host::cta().shared); }

// A bulk copy spoils its place when it is asked for.
TS_DEV lanes_host::Bar& bar_at(u32 bar) { return *lanes_host::cta().bars[bar / 8]; }
TS_DEV void begin_bar(u32 bar, u32 count) {
  auto* const made = new lanes_host::Bar;
  made->count = made->left = count;
  lanes_host::cta().bars[bar / 8] = made;
}
TS_DEV void arrive(u32 bar) {
  auto& b = bar_at(bar);
  b.passed.fetch_add(1, std::memory_order_acq_rel);
  b.arrive();
}
TS_DEV void ask(u32 to, const void* from, u32 bytes, u32 bar) {
  if ((u64)from % 16 || bytes % 16) ts_host::trap("a bulk copy is not aligned");
  for (u32 k = 0; k < bytes; k += 16) lanes_host::check_read(to + k), std::memset(lanes_host::at(to + k, 16), 0xff, 16);
  bar_at(bar).coming.add({to, from, bytes});
  arrive(bar);
}
TS_DEV void copies_arrive(u32 bar) {
  lanes_host::self().copies.move_to(bar_at(bar).coming);
  arrive(bar);
}
TS_DEV void await(u32 bar, u32 parity) {
  auto& b = bar_at(bar);
  b.await(parity);
  b.passed.load(std::memory_order_acquire);
  b.coming.happen(lanes_host::cta().shared);
  b.passed.fetch_add(1, std::memory_order_acq_rel);
}
TS_DEV void fence_copies() { ++lanes_host::self().fences; }

// ---- fragments
TS_DEV u32 pair_of(u32 low, u32 high) { return low | high << 16; }
TS_DEV void matrices(u32 (&r)[4], u32 row) {
  const auto rows = lanes_host::exchanged({(u64)row});
  for (int m = 0; m < 4; ++m) {
    const u32 at = (u32)rows(m * 8 + lane() / 4, 0);
    lanes_host::at(at, 16);
    r[m] = get32(at + lane() % 4 * 4);
  }
}
TS_DEV void matrices_turned(u32 (&r)[4], u32 row) {
  const auto rows = lanes_host::exchanged({(u64)row});
  for (int m = 0; m < 4; ++m) {
    u32 half[2];
    for (int k = 0; k < 2; ++k) {
      const u32 at = (u32)rows(m * 8 + lane() % 4 * 2 + k, 0);
      lanes_host::at(at, 16);
      half[k] = get16(at + lane() / 4 * 2);
    }
    r[m] = pair_of(half[0], half[1]);
  }
}
template <class T>
TS_DEV void product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const auto all = lanes_host::exchanged({(u64)a[0], (u64)a[1], (u64)a[2], (u64)a[3], (u64)b0, (u64)b1});
  const auto element = [](u64 word, int k) { return k % 2 ? T::high((u32)word) : T::low((u32)word); };
  for (int n = 0; n < 4; ++n) {
    const int row = lane() / 4 + n / 2 * 8, column = lane() % 4 * 2 + n % 2;
    for (int k = 0; k < 16; ++k) {
      const float x = element(all(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2), k);
      c[n] += x * element(all(column * 4 + k % 8 / 2, 4 + k / 8), k);
    }
  }
}

[[noreturn]] inline void stop() { std::_Exit(42); }
TS_DEV void give_up(u64* record, int what, int where, long long limit, long long found) {
  if (__atomic_exchange_n(record, 1, __ATOMIC_RELAXED)) std::_Exit(42);  // another CTA was first
  record[1] = (u64)(u32)where << 32 | (u32)what;
  record[2] = (u64)limit;
  record[3] = (u64)found;
  std::_Exit(42);
}

}  // namespace lanes
