// Threads, barriers, bulk copies and products behind the host twin of ptx.cuh.
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "clock.h"
#include "machine.h"

namespace ts_host {

thread_local char* shared = nullptr;
thread_local u32 shared_bytes = 0;

namespace {

constexpr auto relaxed = std::memory_order_relaxed;
constexpr int ROLES = 6, JOBS = 64, BARRIER_BYTES = 8, BOX_BYTES = 256 * 128;
constexpr int ROLE_OF_WARP[] = {0, 4, 8, 9, 10, 11};  // first warps of both consumer groups, then the loader's four

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

// A bulk copy on its way to the engine. Every field is relaxed: the hand-over itself orders nothing.
struct Job {
  std::atomic<u64> map[6];
  std::atomic<int> x, y, load;
  std::atomic<u32> smem, bar, group, mask;  // mask: CTAs of the cluster that a load writes to
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
  u32 group = 0, in_group = 0, groups_seen = 0, groups_complete = 0, groups_fenced = 0;
  char read_clock[JOBS], done_clock[JOBS], fence_clock = 0, products_clock = 0;
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
  std::atomic<int> running{ROLES};
  std::array<Role, ROLES> roles;
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

// ---- bulk copies
// Rows of 128 bytes between a matrix in memory and a tile in shared memory, 16 bytes at a time.
struct Box {
  char* base;
  long columns, rows, row_bytes, box_rows, element, x, y;
  explicit Box(const Job& j)
      : base((char*)j.map[0].load(relaxed)), columns(j.map[1].load(relaxed)), rows(j.map[2].load(relaxed)),
        row_bytes(j.map[3].load(relaxed)), box_rows(j.map[4].load(relaxed)), element(j.map[5].load(relaxed)),
        x(j.x.load(relaxed)), y(j.y.load(relaxed)) {}
  // Bytes of unit k (16 bytes) of a row that lie inside the matrix, and where they are.
  long valid(long row, long k) const {
    if (y + row < 0 || y + row >= rows) return 0;
    const long left = (columns - x) * element - 16 * k;
    return left < 0 ? 0 : left > 16 ? 16 : left;
  }
  char* at(long row, long k) const { return base + (y + row) * row_bytes + x * element + 16 * k; }
};

char* swizzled(char* tile, long row, long k) { return tile + row * 128 + ((k ^ (row & 7)) << 4); }

// A copy goes through a buffer between its two ends, which may lie far apart in time.
void read_global(const Box& b, char* buffer) {
  for (long r = 0; r < b.box_rows; ++r)
    for (long k = 0; k < 8; ++k) {
      char* const to = buffer + r * 128 + 16 * k;
      const long n = b.valid(r, k);
      std::memset(to, 0, 16);
      if (n == 0) continue;
      reads(b.at(r, k), (size_t)n);
      std::memcpy(to, b.at(r, k), (size_t)n);
    }
}
void write_global(const Box& b, const char* buffer) {
  for (long r = 0; r < b.box_rows; ++r)
    for (long k = 0; k < 8; ++k) {
      const long n = b.valid(r, k);
      if (n == 0) continue;
      writes(b.at(r, k), (size_t)n);
      std::memcpy(b.at(r, k), buffer + r * 128 + 16 * k, (size_t)n);
    }
}
void read_shared(const Box& b, char* tile, char* buffer) {
  reads(tile, (size_t)b.box_rows * 128);
  for (long r = 0; r < b.box_rows; ++r)
    for (long k = 0; k < 8; ++k) std::memcpy(buffer + r * 128 + 16 * k, swizzled(tile, r, k), 16);
}
void write_shared(const Box& b, char* tile, const char* buffer) {
  writes(tile, (size_t)b.box_rows * 128);
  for (long r = 0; r < b.box_rows; ++r)
    for (long k = 0; k < 8; ++k) std::memcpy(swizzled(tile, r, k), buffer + r * 128 + 16 * k, 16);
}

// One end of the head job of a role: loads read global memory, then write shared; stores the other way.
void step(Cta& cta, Role& role) {
  const u32 n = role.finished.load(relaxed);
  Job& job = role.jobs[n % JOBS];
  std::atomic_thread_fence(std::memory_order_acquire);
  const Box box(job);
  const u32 bar = job.bar.load(relaxed), group = job.group.load(relaxed);
  char* const tile = cta.memory + job.smem.load(relaxed);
  if ((job.smem.load(relaxed) & 1023) != 0) trap("a swizzled tile must start on 1024 bytes");
  const bool load = job.load.load(relaxed) != 0;
  char* const buffer = role.buffer.data();
  if (load && !role.half) {
    role.load_global.acquire(&job.fenced_global);
    role.load_global.run([&] { read_global(box, buffer); });
    for (int k = 0; k < cta.cluster_size; ++k)
      if (job.mask.load(relaxed) >> k & 1) role.load_global.release(&cta.cluster[k]->reads_clock[bar / BARRIER_BYTES]);
  } else if (load) {
    role.load_shared.acquire(&job.issued);
    role.load_shared.run([&] {
      for (int k = 0; k < cta.cluster_size; ++k) {
        if ((job.mask.load(relaxed) >> k & 1) == 0) continue;
        Cta& to = *cta.cluster[k];
        write_shared(box, to.memory + job.smem.load(relaxed), buffer);
        release_edge(&to.visible_clock[bar / BARRIER_BYTES]);
        release_edge(&word(to, bar));
        update(to, bar, 0, -box.box_rows * 128);
      }
    });
  } else if (!role.half) {
    role.store_shared.acquire(&job.fenced_shared);
    role.store_shared.run([&] { read_shared(box, tile, buffer); });
    role.store_shared.release(&role.read_clock[group % JOBS]);
    role.groups_read.store(group, relaxed);
    cta.event.notify();
  } else {
    role.store_global.acquire(&job.issued);
    role.store_global.run([&] { write_global(box, buffer); });
    role.store_global.release(&role.done_clock[group % JOBS]);
    std::atomic_thread_fence(std::memory_order_release);
    role.groups_done.store(group, relaxed);
    cta.event.notify();
  }
  role.half = !role.half;
  if (!role.half) role.finished.store(n + 1, relaxed);
}

// The engine takes jobs of different threads in any order: a seeded one.
void engine(Cta& cta, u64 seed) {
  u64 state = seed * 0x9e3779b97f4a7c15ull + (u64)cta.index + 1;
  for (;;) {
    const u32 seen = cta.event.count.load(relaxed);
    const bool last = cta.running.load(relaxed) == 0;
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const int first = (int)((state >> 33) % ROLES);
    bool worked = false;
    for (int k = 0; k < ROLES && !worked; ++k) {
      Role& role = cta.roles[(size_t)(first + k) % ROLES];
      if (role.finished.load(relaxed) != role.issued.load(relaxed)) {
        step(cta, role);
        worked = true;
      }
    }
    if (worked && (state >> 60) == 0) sched_yield();  // now and then, fall behind
    if (!worked && last) return;
    if (!worked) cta.event.sleep(seen);
  }
}

void issue(const TensorMap& map, int x, int y, u32 smem, u32 bar, u32 mask) {
  Role& r = *self;
  const u32 n = r.issued.load(relaxed);
  wait_until(r.cta->event, "a free entry of the copy engine", [&] { return n - r.finished.load(relaxed) < JOBS; });
  Job& job = r.jobs[n % JOBS];
  for (int k = 0; k < 6; ++k) job.map[k].store(map.opaque[k], relaxed);
  job.x.store(x, relaxed);
  job.y.store(y, relaxed);
  job.smem.store(smem, relaxed);
  job.bar.store(bar, relaxed);
  job.load.store(mask != 0, relaxed);
  job.mask.store(mask, relaxed);
  job.group.store(r.group + 1, relaxed);
  release_edge(&job.issued);
  r.visible_shared.release(&job.fenced_shared);
  r.visible_global.release(&job.fenced_global);
  std::atomic_thread_fence(std::memory_order_release);
  r.issued.store(n + 1, relaxed);
  r.cta->event.notify();
}

// ---- products
float from_half(u32 h) {
  const u32 e = (h >> 10) & 31, m = h & 0x3ff, sign = (h & 0x8000) << 16;
  if (e == 0) return (sign ? -1.0f : 1.0f) * (float)m * 5.9604644775390625e-08f;
  return __builtin_bit_cast(float, sign | (e == 31 ? 0x7f800000u : (e + 112) << 23) | m << 13);
}
float element_of(const unsigned char* bytes, int k, int element) {
  if (element == 2) {
    u32 v;
    std::memcpy(&v, bytes + 4 * k, 4);
    return __builtin_bit_cast(float, v & 0xffffe000u);
  }
  u16 v;
  std::memcpy(&v, bytes + 2 * k, 2);
  return element == 0 ? __builtin_bit_cast(float, (u32)v << 16) : from_half(v);
}
// 32 bytes of one row of a swizzled operand
void operand_row(u64 desc, int row, unsigned char* to) {
  const u32 start = (u32)(desc & 0x3fff) << 4, group = (u32)((desc >> 32) & 0x3fff) << 4;
  for (u32 k = 0; k < 2; ++k) {
    const u32 at = start + (u32)(row / 8) * group + (u32)(row % 8) * 128 + 16 * k;
    const char* const from = shared + (at ^ ((at >> 3) & 0x70));
    reads(from, 16);
    std::memcpy(to + 16 * k, from, 16);
  }
}
void packed_rows(const Product& p, float* a) {
  for (int r = 0; r < 64; ++r)
    for (int c = 0; c < 16; ++c) {
      const int lane = r / 16 * 32 + r % 8 * 4 + c % 8 / 2;
      const u32 v = p.packed[(long)lane * p.packed_stride + c / 8 * 2 + r % 16 / 8];
      const u16 h = (u16)(c % 2 ? v >> 16 : v);
      a[r * 16 + c] = p.element == 0 ? __builtin_bit_cast(float, (u32)h << 16) : from_half(h);
    }
}
void accumulate(const Product& p, int depth, const float* a, const float* bt) {
  const int columns = 8 * p.blocks;
  float sums[256];
  for (int r = 0; r < 64; ++r) {
    for (int n = 0; n < columns; ++n) sums[n] = 0;
    for (int k = 0; k < depth; ++k)
      for (int n = 0; n < columns; ++n) sums[n] += a[r * 16 + k] * bt[k * 256 + n];
    for (int n = 0; n < columns; ++n) {
      const int lane = r / 16 * 32 + r % 8 * 4 + n % 8 / 2;
      p.acc[(long)lane * p.acc_stride + n / 8 * 4 + r % 16 / 8 * 2 + n % 2] += sums[n];
    }
  }
}
void execute(const Product& p) {
  const int depth = p.element == 2 ? 8 : 16;
  static thread_local float a[64 * 16], bt[16 * 256];
  unsigned char bytes[32];
  Role& r = *self;
  r.products.run([&] {
    for (int n = 0; n < 8 * p.blocks; ++n) {
      operand_row(p.b, n, bytes);
      for (int k = 0; k < depth; ++k) bt[k * 256 + n] = element_of(bytes, k, p.element);
    }
    if (p.packed == nullptr)
      for (int m = 0; m < 64; ++m) {
        operand_row(p.a, m, bytes);
        for (int k = 0; k < depth; ++k) a[m * 16 + k] = element_of(bytes, k, p.element);
      }
    if (p.packed != nullptr) packed_rows(p, a);
    accumulate(p, depth, a, bt);
  });
}

}  // namespace

// ---- who and when
int warp() { return self->warp; }
int cta() { return self->cta->index; }
int ctas() { return self->cta->count; }
u64 now_ns() { return (u64)(seconds() * 1e9); }
void trap(const char* why) {
  if (self != nullptr)
    std::fprintf(stderr, "trap in CTA %d, warp %d: %s\n", self->cta->index, self->warp, why);
  else
    std::fprintf(stderr, "trap in a copy engine: %s\n", why);
  std::fflush(stderr);
  _exit(42);
}
int cluster_rank() { return self->cta->index % self->cta->cluster_size; }

void bar_init(u32 bar, u32 count) {
  if (bar % BARRIER_BYTES != 0 || bar + BARRIER_BYTES > self->cta->bytes) trap("an mbarrier lies outside shared memory");
  word(*self->cta, bar).store((u64)count << 16 | (u64)count << 1, relaxed);
}
void bar_arrive(u32 bar, u32 arrivals, u32 bytes) {
  self->visible_shared.release(&self->cta->visible_clock[bar / BARRIER_BYTES]);
  release_edge(&word(*self->cta, bar));
  update(*self->cta, bar, arrivals, bytes);
}
void bar_arrive_cluster(u32 bar, u32 arrivals) {
  for (int k = 0; k < self->cta->cluster_size; ++k) {
    Cta& to = *self->cta->cluster[k];
    self->visible_shared.release(&to.visible_clock[bar / BARRIER_BYTES]);
    release_edge(&word(to, bar));
    update(to, bar, arrivals, 0);
  }
}
bool bar_try(u32 bar, u32 parity) {
  Role& r = *self;
  std::atomic<u64>& w = word(*r.cta, bar);
  if ((w.load(relaxed) & 1) == parity) return false;  // a try that fails orders nothing
  std::atomic_thread_fence(std::memory_order_acquire);
  acquire_edge(&w);
  r.visible_shared.acquire(&r.cta->visible_clock[bar / BARRIER_BYTES]);
  r.reads.acquire(&r.cta->reads_clock[bar / BARRIER_BYTES]);
  return true;
}
void bar_wait(u32 bar, u32 parity) {
  wait_until(self->cta->event, "an mbarrier was waited for too long", [&] { return bar_try(bar, parity); });
}

// Generations in the high half, threads that have come in the low one.
static void meet(Cta& c, int id, int threads, bool wait) {
  std::atomic<u64>& w = c.named[id];
  self->visible_shared.release(&c.named_clock[id]);
  release_edge(&w);
  u64 old = w.load(relaxed), next;
  do {
    const u32 come = (u32)old + 128;
    next = come == (u32)threads ? ((old >> 32) + 1) << 32 : old + 128;
  } while (!w.compare_exchange_weak(old, next, std::memory_order_acq_rel, relaxed));
  c.event.notify();
  if (!wait) return;
  wait_until(c.event, "a named barrier was waited for too long", [&] { return w.load(relaxed) >> 32 != old >> 32; });
  std::atomic_thread_fence(std::memory_order_acquire);
  acquire_edge(&w);
  self->visible_shared.acquire(&c.named_clock[id]);
}
void named(int id, int threads, bool wait) {
  if (id < 1 || id > 15) trap("named barriers are 1 to 15");
  meet(*self->cta, id, threads, wait);
}
void sync_cta() { meet(*self->cta, 0, ROLES * 128, true); }
void sync_cluster() { meet(*self->cta->cluster[0], 16, self->cta->cluster_size * ROLES * 128, true); }

// ---- proxies
void fence_async_shared() {
  release_edge(&self->fence_clock);
  self->visible_shared.acquire(&self->fence_clock);
}
// Both ways: bulk copies issued from here on see what this thread sees, and this thread (and whom it tells) sees
// the bulk stores that it has waited for.
void fence_async_global() {
  Role& r = *self;
  for (; r.groups_fenced != r.groups_complete; ++r.groups_fenced) acquire_edge(&r.done_clock[(r.groups_fenced + 1) % JOBS]);
  release_edge(&r.fence_clock);
  r.visible_global.acquire(&r.fence_clock);
}

void bulk_load(u32 dst, const TensorMap& map, int x, int y, u32 bar, u32 mask) {
  issue(map, x, y, dst, bar, mask != 0 ? mask : 1u << cluster_rank());
}
void bulk_store(const TensorMap& map, int x, int y, u32 src) {
  ++self->in_group;
  issue(map, x, y, src, 0, 0);
}
void bulk_commit() {
  if (self->in_group != 1) trap("the model of bulk groups holds one store a group");
  self->in_group = 0;
  ++self->group;
}
void bulk_wait(int groups, bool read_only) {
  Role& r = *self;
  if (r.group < (u32)groups) return;
  const u32 upto = r.group - (u32)groups;
  std::atomic<u32>& progress = read_only ? r.groups_read : r.groups_done;
  wait_until(r.cta->event, "a bulk store was waited for too long", [&] { return (int)(progress.load(relaxed) - upto) >= 0; });
  std::atomic_thread_fence(std::memory_order_acquire);
  for (; (int)(upto - r.groups_seen) > 0; ++r.groups_seen) acquire_edge(&r.read_clock[(r.groups_seen + 1) % JOBS]);
  if (!read_only) r.groups_complete = upto;
}

void reads_before(u64* flag) { self->reads.release(flag); }
void flag_changed() { flags_event.notify(); }
// Called at each poll of a flag: a poll that finds nothing new lets others run.
void pause(const u64* flag) {
  Role& r = *self;
  if (r.polled != flag) {
    r.polled = flag;
    r.polls = 0;
  } else if (++r.polls > 4) {
    flags_event.sleep(r.polled_at);
  }
  r.polled_at = flags_event.count.load(relaxed);
}

// ---- products
void product(const Product& p) { self->open.push_back(p); }
void products_commit() {
  self->visible_shared.release(&self->products_clock);
  self->products.acquire(&self->products_clock);
  self->queued.push_back(std::move(self->open));
  self->open.clear();
}
void products_wait(int groups) {
  Role& r = *self;
  if ((int)r.queued.size() <= groups) return;
  for (; (int)r.queued.size() > groups; r.queued.pop_front())
    for (const Product& p : r.queued.front()) execute(p);
  r.products.release(&r.products_clock);
  acquire_edge(&r.products_clock);
}

// ---- a launch
void run(const Launch& launch) {
  limit_s = launch.limit_s;
  if (launch.ctas % launch.cluster != 0) trap("the CTAs are no whole number of clusters");
  std::vector<std::unique_ptr<Cta>> ctas;
  const size_t bytes = ((size_t)launch.shared_bytes + 1023) / 1024 * 1024;
  for (int k = 0; k < launch.ctas; ++k) {
    ctas.push_back(std::make_unique<Cta>());
    Cta& c = *ctas.back();
    c.index = k;
    c.count = launch.ctas;
    c.bytes = launch.shared_bytes;
    c.memory = (char*)std::aligned_alloc(1024, bytes);
    std::memset(c.memory, 0xff, bytes);  // NaNs: a read of what was never written shows
    c.visible_clock.resize(bytes / BARRIER_BYTES);
    c.reads_clock.resize(bytes / BARRIER_BYTES);
    for (auto& w : c.named) w.store(0, relaxed);
    for (int r = 0; r < ROLES; ++r) {
      c.roles[(size_t)r].cta = &c;
      c.roles[(size_t)r].warp = ROLE_OF_WARP[r];
      c.roles[(size_t)r].buffer.resize(BOX_BYTES);
    }
  }
  std::vector<Cta*> all;
  for (auto& c : ctas) all.push_back(c.get());
  for (auto& c : ctas) {
    c->cluster_size = launch.cluster;
    c->cluster = &all[(size_t)(c->index / launch.cluster * launch.cluster)];
  }
  std::vector<std::thread> threads;
  for (auto& c : ctas) {
    for (Role& r : c->roles)
      threads.emplace_back([&r, &launch] {
        self = &r;
        shared = r.cta->memory;
        shared_bytes = r.cta->bytes;
        launch.body(launch.params);
        r.cta->running.fetch_sub(1, relaxed);
        r.cta->event.notify();
      });
    threads.emplace_back([&c, &launch] { engine(*c, launch.seed); });
  }
  for (auto& t : threads) t.join();
  for (auto& c : ctas) {  // the end of a kernel orders everything
    for (Role& r : c->roles)
      for (Clock* clock : {&r.load_global, &r.load_shared, &r.store_shared, &r.store_global, &r.products}) {
        clock->release(&r.fence_clock);
        acquire_edge(&r.fence_clock);
      }
    std::free(c->memory);
  }
}

void* map_file(const char* path, u64& bytes) {
  const int file = open(path, O_RDWR);
  struct stat about;
  if (file < 0 || fstat(file, &about) != 0) trap("the launch's file cannot be opened");
  bytes = (u64)about.st_size;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) trap("the launch's file cannot be mapped");
  close(file);
  return at;
}

}  // namespace ts_host
