// A CTA on the host: its threads, what each of them knows, its barriers.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <climits>
#include <deque>
#include <vector>

#include "clock.h"
#include "machine.h"

namespace ts_host {

namespace {

constexpr auto relaxed = std::memory_order_relaxed;
constexpr int MOST_ROLES = 7, JOBS = 64, BARRIER_BYTES = 8, BOX_BYTES = 256 * 128;
// A shared address has in its upper bits whose it is: the CTA's rank in its cluster.
constexpr u32 PEER_SHIFT = 24, PEER_ADDRESS = (1u << PEER_SHIFT) - 1;

// Threads sleep on events, outside what ThreadSanitizer sees: an event orders nothing.
struct Event {
  std::atomic<u32> count{0}, sleepers{0};
  void notify() {
    count.fetch_add(1, relaxed);
    if (sleepers.load(relaxed) != 0) syscall(SYS_futex, &count, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
  void sleep(u32 seen) {  // until the count differs, or a little while: a wake-up may be missed
    sleepers.fetch_add(1, relaxed);
    timespec most = {0, 1000000};
    syscall(SYS_futex, &count, FUTEX_WAIT_PRIVATE, seen, &most, nullptr, 0);
    sleepers.fetch_sub(1, relaxed);
  }
};
Event flags_event;

// From memory, to memory, added to memory, to the shared memory of another CTA of the cluster.
enum class Kind : int { LOAD, STORE, ADD, PEER };

// A bulk copy on its way to the engine. Every field is relaxed: the hand-over itself orders nothing.
struct Job {
  std::atomic<u64> map[MAP_WORDS];
  std::atomic<int> x, y, column, image, offset_x, offset_y;
  std::atomic<Kind> kind;
  std::atomic<u32> smem, bar, group, mask;  // mask: CTAs of the cluster that a load writes to
  std::atomic<u32> to, bytes;               // of a copy to a peer
  char issued = 0, fenced_shared = 0, fenced_global = 0;  // clocks at the time of issue
};

struct Cta;

// One thread of a CTA, and the proxies that work for it.
struct Role {
  Cta* cta = nullptr;
  int warp = 0;
  Job jobs[JOBS];
  std::atomic<u32> issued{0}, finished{0};           // jobs
  std::atomic<u32> groups_read{0}, groups_done{0};   // store groups
  bool sent = false;  // copies to other CTAs of the cluster, and no barrier of it since
  bool adds = false;  // the open group is of additions, which are groups of their own here
  u32 group = 0, in_group = 0, groups_seen = 0, groups_complete = 0, groups_fenced = 0;
  char read_clock[JOBS], done_clock[JOBS], fence_clock = 0, products_clock = 0, over_clock = 0;
  bool half = false;               // the engine has read the head job's source
  std::vector<char> buffer;        // and keeps it here
  Clock visible_shared;            // ordinary writes to shared memory that this thread knows bulk copies may read
  Clock visible_global;            // the same for global memory
  Clock reads;                     // bulk reads of global memory that this thread knows to be over
  Clock load_global, load_shared;  // the two ends of its bulk loads
  Clock store_shared, store_global;
  Clock products;
  std::deque<std::vector<Product>> queued;
  std::vector<Product> open;
  const void* polled = nullptr;
  u32 polls = 0, polled_at = 0;
  std::vector<const u64*> peeked;  // flags that relaxed loads read since the last fence
};

struct Cta {
  int index = 0, count = 0;
  Cta** cluster = nullptr;
  int cluster_size = 1;
  u32 bytes = 0;
  char* memory = nullptr;
  Event event;
  std::atomic<u64> named[17];  // 0: the whole CTA; 16, of a cluster's first CTA: the whole cluster
  char named_clock[17];
  std::vector<u64> visible_clock, reads_clock;  // by barrier
  int threads = 0;  // that run the kernel; `roles` has room for more
  std::atomic<int> running{0};
  std::array<Role, MOST_ROLES> roles;
};

thread_local Role* self = nullptr;
double limit_s = 20;

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class F>
void wait_until(Event& event, const char* what, F done) {
  for (int k = 0; k < 8; ++k) {
    if (done()) return;
    sched_yield();
  }
  const double end = seconds() + limit_s;
  for (;;) {
    const u32 seen = event.count.load(relaxed);
    if (done()) return;
    event.sleep(seen);
    if (seconds() > end) trap(what);
  }
}

// ---- mbarriers: bytes outstanding | arrivals a phase | arrivals missing | phase
std::atomic<u64>& word(Cta& cta, u32 bar) { return *reinterpret_cast<std::atomic<u64>*>(cta.memory + bar); }

void update(Cta& cta, u32 bar, u32 arrivals, long bytes) {
  std::atomic<u64>& w = word(cta, bar);
  u64 old = w.load(relaxed), next;
  do {
    u64 phase = old & 1, missing = (old >> 1) & 0x7fff, count = (old >> 16) & 0xffff;
    long left = (long)(int)(old >> 32) + bytes;  // a multicast may come before the wait for it is set up
    if (arrivals > missing) trap("an mbarrier got more arrivals than it counts");
    if (left < -0xfffff || left > 0xfffff) trap("an mbarrier counts more bytes than it can");
    missing -= arrivals;
    if (missing == 0 && left == 0) {
      phase ^= 1;
      missing = count;
    }
    next = (u64)(u32)(int)left << 32 | count << 16 | missing << 1 | phase;
  } while (!w.compare_exchange_weak(old, next, std::memory_order_release, relaxed));
  cta.event.notify();
}

}  // namespace

}  // namespace ts_host
