// Threads, barriers, bulk copies and products behind the host twin of ptx.cuh.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>

#include "copies.h"
#include "products.h"

namespace ts_host {

thread_local char* shared = nullptr;
thread_local u32 shared_base = 0;
thread_local u32 shared_bytes = 0;

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

// From the start of this CTA's shared memory.
static u32 own(u32 addr) {
  if (addr - shared_base >= shared_bytes) trap("an address lies outside this CTA's shared memory");
  return addr - shared_base;
}
// The CTA of the cluster whose shared memory it is in.
static Cta& whose(u32 addr) {
  if (addr >> PEER_SHIFT >= (u32)self->cta->cluster_size) trap("an address of no CTA of the cluster");
  return *self->cta->cluster[addr >> PEER_SHIFT];
}

void bar_init(u32 at, u32 count) {
  const u32 bar = own(at);
  if (bar % BARRIER_BYTES != 0 || bar + BARRIER_BYTES > self->cta->bytes) trap("an mbarrier lies outside shared memory");
  writes(&word(*self->cta, bar), BARRIER_BYTES);  // who counts on it, in another CTA perhaps, comes after
  word(*self->cta, bar).store((u64)count << 16 | (u64)count << 1, relaxed);
}
void bar_arrive(u32 at, u32 arrivals, u32 bytes) {
  const u32 bar = own(at);
  self->visible_shared.release(&self->cta->visible_clock[bar / BARRIER_BYTES]);
  self->reads.release(&self->cta->reads_clock[bar / BARRIER_BYTES]);
  release_edge(&word(*self->cta, bar));
  update(*self->cta, bar, arrivals, bytes);
}
void bar_arrive_cluster(u32 at, u32 arrivals) {
  const u32 bar = own(at);
  for (int k = 0; k < self->cta->cluster_size; ++k) {
    Cta& to = *self->cta->cluster[k];
    self->visible_shared.release(&to.visible_clock[bar / BARRIER_BYTES]);
    self->reads.release(&to.reads_clock[bar / BARRIER_BYTES]);
    release_edge(&word(to, bar));
    update(to, bar, arrivals, 0);
  }
}
bool bar_try(u32 at, u32 parity) {
  const u32 bar = own(at);
  Role& r = *self;
  std::atomic<u64>& w = word(*r.cta, bar);
  if ((w.load(relaxed) & 1) == parity) return false;  // a try that fails orders nothing
  std::atomic_thread_fence(std::memory_order_acquire);
  acquire_edge(&w);
  r.visible_shared.acquire(&r.cta->visible_clock[bar / BARRIER_BYTES]);
  r.reads.acquire(&r.cta->reads_clock[bar / BARRIER_BYTES]);
  return true;
}
bool rest() {
  self->cta->event.sleep(self->cta->event.count.load(relaxed));
  return false;
}
void bar_wait(u32 bar, u32 parity) {
  wait_until(self->cta->event, "an mbarrier was waited for too long", [&] { return bar_try(bar, parity); });
}

// Generations in the high half, threads that have come in the low one.
static u64 come(Cta& c, int id, int threads) {  // the generation that it belongs to
  std::atomic<u64>& w = c.named[id];
  self->visible_shared.release(&c.named_clock[id]);
  release_edge(&w);
  u64 old = w.load(relaxed), next;
  do {
    const u32 come = (u32)old + 128;
    next = come == (u32)threads ? ((old >> 32) + 1) << 32 : old + 128;
  } while (!w.compare_exchange_weak(old, next, std::memory_order_acq_rel, relaxed));
  c.event.notify();
  return old >> 32;
}
static void meet(Cta& c, int id, int threads) {
  std::atomic<u64>& w = c.named[id];
  const u64 generation = come(c, id, threads);
  wait_until(c.event, "a named barrier was waited for too long", [&] { return w.load(relaxed) >> 32 != generation; });
  std::atomic_thread_fence(std::memory_order_acquire);
  acquire_edge(&w);
  self->visible_shared.acquire(&c.named_clock[id]);
}
static int of_whole_groups(int id, int threads) {
  if (id < 1 || id > 15) trap("named barriers are 1 to 15");
  return (threads + 127) / 128 * 128;  // some warps of a warpgroup are all of it
}
void named(int id, int threads) { meet(*self->cta, id, of_whole_groups(id, threads)); }
void named_arrive(int id, int threads) { come(*self->cta, id, of_whole_groups(id, threads)); }
void sync_cta() { meet(*self->cta, 0, self->cta->threads * 128); }
void sync_cluster() {
  self->sent = false;
  meet(*self->cta->cluster[0], 16, self->cta->cluster_size * self->cta->threads * 128);
}

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

void bulk_load(u32 dst, const TensorMap& map, const Corner& at, u32 bar, u32 mask) {
  issue(Kind::LOAD, map, at, own(dst), own(bar), mask != 0 ? mask : 1u << cluster_rank());
}
void bulk_store(const TensorMap& map, const Corner& at, u32 src) {
  ++self->in_group;
  issue(Kind::STORE, map, at, own(src), 0, 0);
}
void bulk_reduce_add(const TensorMap& map, int x, int y, u32 src) {
  self->adds = true;
  issue(Kind::ADD, map, {x, y}, own(src), 0, 0);
  ++self->group;
}
void bulk_to_peer(u32 dst, u32 src, u32 bytes, u32 bar) {
  if (&whose(dst) != &whose(bar)) trap("a copy to a peer and its barrier are in two CTAs");
  if (bytes > BOX_BYTES || bytes % 16 != 0 || dst % 16 != 0 || src % 16 != 0) trap("a copy to a peer is of whole 16 bytes");
  self->sent = true;
  issue(Kind::PEER, {}, {0, 0}, own(src), bar, 0, dst, bytes);
}
char* peer_memory(u32 addr, u32 bytes) {
  Cta& peer = whose(addr);
  if ((addr & PEER_ADDRESS) + bytes > peer.bytes) trap("a store to a peer lies outside shared memory");
  if (peer.running.load(relaxed) == 0) trap("a store came to a CTA that had left its cluster");
  return peer.memory + (addr & PEER_ADDRESS);
}
void bulk_commit() {
  if (self->adds) return void(self->adds = false);
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
// By this thread's clock: a releasing store overwrites what its flag had before.
void reads_before_this() {
  self->reads.release(&self->over_clock);
  acquire_edge(&self->over_clock);
}
void peeked(const u64* flag) {
  pause(flag);
  auto& seen = self->peeked;
  if (std::find(seen.begin(), seen.end(), flag) == seen.end()) seen.push_back(flag);
}
void acquire_peeked() {
  std::atomic_thread_fence(std::memory_order_acquire);
  for (const u64* flag : self->peeked) acquire_edge(flag);
  self->peeked.clear();
}
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
    c.threads = launch.warpgroups + 4;
    c.running.store(c.threads, relaxed);
    for (int r = 0; r < c.threads; ++r) {
      c.roles[(size_t)r].cta = &c;
      c.roles[(size_t)r].warp = r < launch.warpgroups ? 4 * r : 3 * launch.warpgroups + r;  // then the loader's four
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
    for (int k = 0; k < c->threads; ++k)
      threads.emplace_back([&r = c->roles[(size_t)k], &launch] {
        self = &r;
        shared = r.cta->memory;
        shared_bytes = r.cta->bytes;
        shared_base = (u32)cluster_rank() << PEER_SHIFT;
        launch.body(launch.params);
        if (r.sent) trap("a CTA leaves its cluster with no barrier behind its copies to others");
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
