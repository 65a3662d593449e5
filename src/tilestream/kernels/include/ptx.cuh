// The machine, one primitive a function: barriers, bulk tensor copies, flags, proxies, warpgroup products.
// Everything above this file is written against these names; host/ptx.cuh implements them with threads.
// Shared-memory addresses are 32-bit shared addresses throughout: a generic pointer would turn the
// epilogues' ld.shared into LD.E (measured: 480 against 450 us on the 8x256 chain).
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define TS_DEV __device__ __forceinline__
#define TS_LANES              // on the host: a loop over the 128 lanes t of a warpgroup
#define TS_LANE lane_in_group()  // t
// The same, computed anew for each pass: else every pass's addresses are kept from tile to tile, and spill.
#define TS_PASS const u32 pass_lane = fresh_lane();
#define TS_PASS_LANE pass_lane
#define TS_EACH(t, count)     // on the host: over the lanes from thread t on, as far as there are `count`; here t is this thread
#define TS_REG(r, k) (r).v[k]  // register k of lane t
#define TS_REG_OF(r, k, lane) __shfl_sync(~0u, (r).v[k], lane)  // of another lane of its warp; all lanes ask
#define TS_CONSTANT __constant__ const
#define TS_GLOBAL __device__ const  // tables that constant memory has no room for
#define TS_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define TS_RESIDENT_KERNEL(threads, ctas) extern "C" __global__ void __launch_bounds__(threads, ctas)
#define TS_PAIR_KERNEL(threads) extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(threads, 1)
#define TS_CLUSTER_KERNEL(threads, ctas) extern "C" __global__ void __cluster_dims__(ctas, 1, 1) __launch_bounds__(threads, 1)
#define TS_PARAM __grid_constant__
#define TS_SHARED(base)                               \
  extern __shared__ __align__(1024) char ts_shared[]; \
  const u32 base = (u32)__cvta_generic_to_shared(ts_shared)

struct alignas(64) TensorMap {
  u64 opaque[16];
};

#include "descriptors.cuh"
#include "rounding.cuh"

namespace ts {

// K registers of each lane of a warpgroup.
template <class V, int K>
struct Registers {
  V v[K];
};

constexpr int WARP = 32;  // on the host a warp is one thread,
constexpr int WARP_MEMBERS = 32;  // which counts for 128 at a named barrier
TS_DEV u32 lane_in_warp() { return threadIdx.x & 31; }
TS_DEV u32 lane_in_group() { return threadIdx.x & 127; }
TS_DEV u32 fresh_lane() {
  u32 t = threadIdx.x & 127;
  asm volatile("" : "+r"(t));
  return t;
}
// Provably uniform, else ptxas serialises the wgmma it guards (C7520).
TS_DEV int warp_index() { return __shfl_sync(~0u, threadIdx.x >> 5, 0); }
TS_DEV u32 sm_id() {
  u32 id;
  asm("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}
TS_DEV u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
TS_DEV u64 sm_clock() {
  u64 t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t));
  return t;
}
TS_DEV void trap() { asm volatile("trap;"); }
TS_DEV void sync_cta() { __syncthreads(); }
TS_DEV int cta_index() { return (int)blockIdx.x; }
TS_DEV int cta_count() { return (int)gridDim.x; }
TS_DEV bool cta_leader() { return threadIdx.x == 0; }
TS_DEV void sync_warp() { __syncwarp(); }
TS_DEV int warp_value(int v, int lane) { return __shfl_sync(~0u, v, lane); }  // that of one lane of the warp
TS_DEV u32 warp_vote(bool v) { return __ballot_sync(~0u, v); }  // a bit for each lane
TS_DEV int lowest(u32 v) { return __ffs((int)v) - 1; }           // which bit
TS_DEV float lane_across(float v, int far) { return __shfl_xor_sync(~0u, v, far); }  // that of lane ^ far

TS_DEV float float_of(u32 bits) { return __uint_as_float(bits); }
TS_DEV u32 bits_of(float x) { return __float_as_uint(x); }

// ---- shared memory
TS_DEV void sts32(u32 addr, u32 v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(addr), "r"(v) : "memory"); }
TS_DEV void sts16(u32 addr, u16 v) { asm volatile("st.shared.b16 [%0], %1;" ::"r"(addr), "h"(v) : "memory"); }
TS_DEV void sts64(u32 addr, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(addr), "f"(a), "f"(b) : "memory");
}
TS_DEV void stsf(u32 addr, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(addr), "f"(v) : "memory"); }
// Blocks `block`, an even number, and the next, 8 columns each, of a swizzled chunk of 64 rows: of either block lane t's pairs
// in both halves of its warp's 16 rows (tile.cuh). Four matrices of 8 x 8: lane l names row l % 8 of matrix l / 8.
TS_DEV void sts_blocks(u32 chunk, u32 t, u32 block, const u32 (&v)[2][2]) {
  const u32 row = (t >> 5) * 16 + (t & 15);
  const u32 line = chunk + row * 128 + (((block + ((t >> 4) & 1)) ^ (row & 7)) << 4);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(line), "r"(v[0][0]), "r"(v[0][1]), "r"(v[1][0]),
               "r"(v[1][1])
               : "memory");
}
TS_DEV u32 lds32(u32 addr) {
  u32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(addr) : "memory");
  return v;
}
TS_DEV void lds64(u32 addr, float& a, float& b) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(addr) : "memory");
}
TS_DEV float ldsf(u32 addr) { return __uint_as_float(lds32(addr)); }
TS_DEV u16 lds16(u32 addr) {
  u16 v;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(addr) : "memory");
  return v;
}
TS_DEV void sts_words(u32 addr, const u32 (&v)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
TS_DEV void lds_words(u32 addr, u32 (&v)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(addr) : "memory");
}

// ---- copies of 16 bytes past the registers: ordinary writes, there when they were waited for
TS_DEV void copy_async(u32 dst, const void* src, u32 bytes) {  // zeros behind the first `bytes`
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
TS_DEV void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }  // for those of this thread

// ---- barriers in shared memory
TS_DEV void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count)); }
TS_DEV void bar_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
TS_DEV void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
TS_DEV void bar_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Each of the group's four warps arrives once, after all its lanes.
TS_DEV void group_arrive(u32 bar) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) bar_arrive(bar);
}
// The same for the barriers of both CTAs of a pair. Unqualified: with .release.cluster it becomes a
// MEMBAR.ALL.GPU in the consumer, and what it frees was read by wgmma, not by ordinary loads.
TS_DEV void group_arrive_pair(u32 bar) {
  __syncwarp();
  u32 lane = threadIdx.x & 31;
  if (lane < 2)
    asm volatile(
        "{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(bar), "r"(lane)
        : "memory");
}
// By one thread: `count` arrivals at the barriers of both.
TS_DEV void arrive_pair(u32 bar, u32 count) {
#pragma unroll
  for (u32 rank = 0; rank < 2; ++rank)
    asm volatile(
        "{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r], %2;\n}" ::"r"(bar), "r"(rank),
        "r"(count)
        : "memory");
}
TS_DEV u32 cluster_rank() {
  u32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
TS_DEV void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Nobody goes on before all have come, and it orders nothing else.
TS_DEV void cluster_meet() { asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory"); }
// The address, in the shared memory of another CTA of the cluster, of what is at `addr` here.
TS_DEV u32 at_peer(u32 addr, u32 rank) {
  u32 r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(addr), "r"(rank));
  return r;
}
TS_DEV void store_at_peer(u32 addr, float a, float b, float c, float d) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
TS_DEV void copy_to_peer(u32 dst, u32 src, u32 bytes, u32 peer_bar) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "r"(src), "r"(bytes),
               "r"(peer_bar)
               : "memory");
}
TS_DEV bool bar_try(u32 bar, u32 parity) {
  u32 ok;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(ok)
      : "r"(bar), "r"(parity)
      : "memory");
  return ok;
}
// Does not suspend, as a try may.
TS_DEV bool bar_ready(u32 bar, u32 parity) {
  u32 ok;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(ok)
      : "r"(bar), "r"(parity)
      : "memory");
  return ok;
}
// Bounded: each try suspends for a fraction of a microsecond or more, so this gives up after seconds.
// A lost hand-over then ends the kernel; flag waits, which expire sooner, say which queue it was.
// (Reading a timer here instead costs registers in every product loop, and spills.)
TS_DEV void bar_wait(u32 bar, u32 parity) {
#pragma unroll 1
  for (u32 i = 0; i < (1u << 24); ++i)
    if (bar_try(bar, parity)) return;
  trap();
}
// All that wait come to it by one instruction, as bar.sync is barrier.sync.aligned; who goes on at once may be elsewhere.
TS_DEV void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
TS_DEV void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- proxies: generic accesses and bulk copies see each other only through these
TS_DEV void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
TS_DEV void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- bulk tensor copies
constexpr u64 EVICT_FIRST = 0x12F0000000000000ull, EVICT_LAST = 0x14F0000000000000ull, EVICT_NORMAL = 0x1000000000000000ull;
TS_DEV void tma_load(u32 dst, const TensorMap* map, int x, int y, u32 bar, u64 hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(x), "r"(y), "l"(hint)
      : "memory");
}
// A box of pixels in the im2col mode: from (x, y, image) on, in the order of the map's box, each moved by the offsets.
TS_DEV void tma_load_pixels(u32 dst, const TensorMap* map, int channel, int x, int y, int image, u16 offset_x, u16 offset_y, u32 bar,
                            u64 hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], "
      "{%7, %8}, %9;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(channel), "r"(x), "r"(y), "r"(image), "h"(offset_x), "h"(offset_y), "l"(hint)
      : "memory");
}
// 64 columns of some rows of [batch, head, row, column], in any order in memory (HeadsMap of tensor_maps.py).
TS_DEV void tma_load_heads(u32 dst, const TensorMap* map, int x, int y, int head, int batch, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst), "l"(map),
      "r"(bar), "r"(x), "r"(y), "r"(head), "r"(batch)
      : "memory");
}
TS_DEV void tma_store_heads(const TensorMap* map, int x, int y, int head, int batch, u32 src) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(src), "r"(x), "r"(y),
               "r"(head), "r"(batch)
               : "memory");
}
// Into the same place of every CTA of the cluster that the mask names, and on their barriers.
TS_DEV void tma_multicast(u32 dst, const TensorMap* map, int x, int y, u32 bar, u16 mask, u64 hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(
          dst),
      "l"(map), "r"(bar), "r"(x), "r"(y), "h"(mask), "l"(hint)
      : "memory");
}
TS_DEV void tma_store(const TensorMap* map, int x, int y, u32 src, u64 hint) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(map), "r"(src),
               "r"(x), "r"(y), "l"(hint)
               : "memory");
}
// Added to memory in the map's dtype; several CTAs may add to one place, in any order.
TS_DEV void tma_reduce_add(const TensorMap* map, int x, int y, u32 src) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(src), "r"(x), "r"(y)
               : "memory");
}
TS_DEV void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N>
TS_DEV void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
template <int N>
TS_DEV void store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// ---- flags in global memory, at gpu scope
TS_DEV u64 flag_acquire(const u64* flag) {
  u64 v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(flag) : "memory");
  return v;
}
TS_DEV u64 flag_peek(const u64* flag) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(flag) : "memory");
  return v;
}
TS_DEV void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
TS_DEV void flag_release(u64* flag, u64 v) { asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(v) : "memory"); }
TS_DEV void flag_relaxed(u64* flag, u64 v) { asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(v) : "memory"); }
TS_DEV u32 count_up(u32* counter) {
  u32 v;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(counter) : "memory");
  return v;
}
// ---- programmatic dependent launch: without it both do nothing
TS_DEV void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
TS_DEV void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

TS_DEV void fence_system() { __threadfence_system(); }
// Of a word in host memory, among this GPU's threads: few hosts let a GPU write theirs by atomics of system scope.
TS_DEV bool claim(u32* word) { return atomicCAS(word, 0u, 1u) == 0u; }

// ---- global memory
template <class T>
TS_DEV T load_global(const T* p) {
  return __ldg(p);
}
template <class T>
TS_DEV void store_global(T* p, T v) {
  *p = v;
}

TS_DEV void store_global_words(void* p, const u32 (&v)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

// Past the L1, which other SMs' stores do not reach.
TS_DEV void store_shared_words(void* p, const u32 (&v)[4]) {
  asm volatile("st.global.cg.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
TS_DEV void load_shared_words(const void* p, u32 (&v)[4]) {
  asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(p) : "memory");
}
TS_DEV void store_shared_floats(float* p, float a, float b, float c, float d) {
  asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
TS_DEV void load_shared_floats(const float* p, float (&v)[4]) {
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "l"(p) : "memory");
}

// Four words, each of them whole, in no order with anything else.
TS_DEV void store_relaxed_words(void* p, const u32 (&v)[4]) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
TS_DEV void load_relaxed_words(const void* p, u32 (&v)[4]) {
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(p) : "memory");
}

TS_DEV void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// ---- warpgroup products
// The values are in their registers now: without it ptxas moves them behind the fence (C7519).
template <int K>
TS_DEV void pin(Registers<float, K>& r) {
#pragma unroll
  for (int k = 0; k < K; ++k) asm volatile("" : "+f"(r.v[k])::"memory");
}
template <int K>
TS_DEV void pin(u32 (&v)[K]) {
#pragma unroll
  for (int k = 0; k < K; ++k) asm volatile("" : "+r"(v[k])::"memory");
}
template <int K>
TS_DEV void pin(Registers<u32, K>& r) { pin(r.v); }
TS_DEV void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TS_DEV void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
TS_DEV void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
template <int N>
TS_DEV void registers_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
TS_DEV void registers_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// acc[blocks AT to AT + BLOCKS] += a @ b.T; the emitter writes a specialisation for each width that a kernel needs.
template <class T, int BLOCKS, int AT>
struct Mma;
// acc[64, 8 BLOCKS] += a.T @ b, both [depth, columns]; without B_COLUMNS b is as above.
template <class T, int BLOCKS, bool B_COLUMNS>
struct MmaColumns;
// acc[64, 8 BLOCKS] += a @ b, a in registers, b [depth, columns].
template <class T, int BLOCKS>
struct MmaRows;
// The same, a in shared memory as [64, depth].
template <class T, int BLOCKS>
struct MmaMixed;

// ---- special functions, fast forms: relative error near 2^-21 unless said
#define TS_UNARY(name, instruction)                          \
  TS_DEV float name(float x) {                               \
    float y;                                                 \
    asm(instruction ".f32 %0, %1;" : "=f"(y) : "f"(x));      \
    return y;                                                \
  }
#define TS_BINARY(name, instruction)                                \
  TS_DEV float name(float a, float b) {                             \
    float y;                                                        \
    asm(instruction ".f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); \
    return y;                                                       \
  }
TS_UNARY(ex2, "ex2.approx.ftz")
TS_UNARY(lg2, "lg2.approx")
TS_UNARY(rcp, "rcp.approx")
TS_UNARY(rsq, "rsqrt.approx")
TS_UNARY(sqr, "sqrt.approx")
// of numbers that are not denormal, which saves their scaling
TS_UNARY(lg2_normal, "lg2.approx.ftz")
TS_UNARY(rcp_normal, "rcp.approx.ftz")
// within two steps of the exact quotient, everywhere; the exact one is a subroutine
TS_BINARY(quotient, "div.full")
TS_BINARY(max_nan, "max.NaN")
TS_BINARY(min_nan, "min.NaN")
#undef TS_UNARY
#undef TS_BINARY
TS_DEV float min_number(float a, float b) { return fminf(a, b); }  // the other one where one is NaN
TS_DEV float fma_(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// The four lanes of a row combine what they hold; all get the result.
template <class F>
TS_DEV void row_combined(Registers<float, 2>& r, const F& combine) {
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int far = 1; far < 4; far *= 2) r.v[j] = combine(r.v[j], lane_across(r.v[j], far));
}
TS_DEV void row_sum(Registers<float, 2>& r) { row_combined(r, [](float a, float b) { return a + b; }); }
TS_DEV void row_max(Registers<float, 2>& r) { row_combined(r, max_nan); }
// Over the 16 rows of a warp. Register k holds the larger of a lane's two rows in block k of eight columns; behind it
// register 0 of lane l holds columns 2l and 2l + 1 of those 64. In each of three steps lanes hand over half of what is left.
template <class T>
TS_DEV void max_of_rows(Registers<u32, 8>& m) {
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool upper = threadIdx.x & (4 * half);
#pragma unroll
    for (int k = 0; k < half; ++k) {
      const u32 mine = upper ? m.v[k + half] : m.v[k], other = upper ? m.v[k] : m.v[k + half];
      m.v[k] = T::larger(mine, __shfl_xor_sync(~0u, other, 4 * half));
    }
  }
}
TS_DEV bool group_leader() { return (threadIdx.x & 127) == 0; }

}  // namespace ts
