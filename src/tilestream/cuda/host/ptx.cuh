// The host twin of include/ptx.cuh: the same names with the same meaning, for g++ and threads.
// A warpgroup is one thread that walks its 128 lanes in loops; a warp of the loader group is one thread.
#pragma once
#define TS_HOST 1

#include "machine.h"

#define TS_DEV inline
#define TS_LANES for (u32 ts_lane = 0; ts_lane < 128; ++ts_lane)
#define TS_LANE ts_lane
#define TS_PASS
#define TS_PASS_LANE ts_lane
#define TS_EACH(t, count) \
  for (u32 ts_first = (t), ts_lane = 0, t = ts_first; ts_lane < 128 && t < (u32)(count); t = ts_first + ++ts_lane)
#define TS_REG(r, k) (r).v[ts_lane][k]
#define TS_REG_OF(r, k, lane) (r).v[(ts_lane & ~31u) + (lane)][k]
#define TS_CONSTANT static const
#define TS_GLOBAL static const
#define TS_KERNEL(threads) static void
#define TS_RESIDENT_KERNEL(threads, ctas) static void
#define TS_PAIR_KERNEL(threads) static void
#define TS_CLUSTER_KERNEL(threads, ctas) static void
#define TS_PARAM
#define TS_SHARED(base) const u32 base = ts_host::shared_base
// threads have as many registers as they like
#define CONSUMER_REGISTERS 0
#define LOADER_REGISTERS 88

struct uint4 {
  u32 x, y, z, w;
};
#include "descriptors.cuh"

inline float __int_as_float(u32 v) { return __builtin_bit_cast(float, v); }

namespace ts {

template <class V, int K>
struct Registers {
  V v[128][K];
};

constexpr int WARP = 1, WARP_MEMBERS = 128;
TS_DEV u32 lane_in_warp() { return 0; }
TS_DEV u32 lane_in_group() { return 0; }
TS_DEV int warp_index() { return ts_host::warp(); }
TS_DEV u32 sm_id() { return (u32)ts_host::cta(); }
TS_DEV u64 now_ns() { return ts_host::now_ns(); }
TS_DEV u64 sm_clock() { return ts_host::now_ns(); }
TS_DEV void trap() { ts_host::trap("trap"); }
TS_DEV void sync_cta() { ts_host::sync_cta(); }
TS_DEV int cta_index() { return ts_host::cta(); }
TS_DEV int cta_count() { return ts_host::ctas(); }
TS_DEV bool cta_leader() { return ts_host::warp() == 0; }
TS_DEV u32 cluster_rank() { return (u32)ts_host::cluster_rank(); }
TS_DEV void cluster_sync() { ts_host::sync_cluster(); }
TS_DEV void cluster_meet() { ts_host::sync_cluster(); }
TS_DEV bool group_leader() { return true; }
TS_DEV void sync_warp() {}
TS_DEV int warp_value(int v, int) { return v; }
TS_DEV u32 warp_vote(bool v) { return v; }
TS_DEV int lowest(u32 v) { return __builtin_ctz(v); }
TS_DEV float lane_across(float, int) { ts_host::trap("lanes exchange values, and here a warp is one thread"); }

// ---- shared memory
template <class V>
TS_DEV V& shared_at(u32 addr) {
  const u32 at = addr - ts_host::shared_base;
  if (at + sizeof(V) > ts_host::shared_bytes) ts_host::trap("an access lies outside shared memory");
  return *reinterpret_cast<V*>(ts_host::shared + at);
}
TS_DEV void sts32(u32 addr, u32 v) { shared_at<u32>(addr) = v; }
TS_DEV void sts16(u32 addr, u16 v) { shared_at<u16>(addr) = v; }
TS_DEV void stsf(u32 addr, float v) { sts32(addr, __builtin_bit_cast(u32, v)); }
TS_DEV void sts64(u32 addr, float a, float b) {
  stsf(addr, a);
  stsf(addr + 4, b);
}
TS_DEV void sts_blocks(u32 chunk, u32 t, u32 block, const u32 (&v)[2][2]) {
  for (u32 k = 0; k < 4; ++k) {
    const u32 row = (t >> 5) * 16 + ((t & 31) >> 2) + 8 * (k & 1);
    sts32(chunk + row * 128 + (((block + (k >> 1)) ^ (row & 7)) << 4) + (t & 3) * 4, v[k >> 1][k & 1]);
  }
}
TS_DEV u32 lds32(u32 addr) { return shared_at<u32>(addr); }
TS_DEV u16 lds16(u32 addr) { return shared_at<u16>(addr); }
TS_DEV void lds_words(u32 addr, u32 (&v)[4]) {
  for (u32 k = 0; k < 4; ++k) v[k] = lds32(addr + 4 * k);
}
TS_DEV void sts_words(u32 addr, const u32 (&v)[4]) {
  for (u32 k = 0; k < 4; ++k) sts32(addr + 4 * k, v[k]);
}
TS_DEV void lds64(u32 addr, float& a, float& b) {
  a = __builtin_bit_cast(float, lds32(addr));
  b = __builtin_bit_cast(float, lds32(addr + 4));
}
TS_DEV float ldsf(u32 addr) { return __builtin_bit_cast(float, lds32(addr)); }

// ---- copies past the registers come as late as they may: when they are waited for
struct Copy {
  u32 dst, bytes;
  const void* src;
};
inline thread_local Copy copies[4096];
inline thread_local u32 copying = 0;
TS_DEV void copy_async(u32 dst, const void* src, u32 bytes) {
  if (copying == sizeof copies / sizeof *copies) ts_host::trap("too many copies are under way");
  copies[copying++] = {dst, bytes, src};
}
TS_DEV void copies_wait() {
  for (u32 c = 0; c < copying; ++c)
    for (u32 k = 0; k < 16; ++k)
      shared_at<unsigned char>(copies[c].dst + k) = k < copies[c].bytes ? ((const unsigned char*)copies[c].src)[k] : 0;
  copying = 0;
}

// ---- barriers in shared memory
TS_DEV void bar_init(u32 bar, u32 count) { ts_host::bar_init(bar, count); }
TS_DEV void bar_init_done() {}  // the CTA's barrier that follows orders it
TS_DEV void bar_arrive(u32 bar) { ts_host::bar_arrive(bar, 1, 0); }
TS_DEV void bar_expect(u32 bar, u32 bytes) { ts_host::bar_arrive(bar, 1, bytes); }
TS_DEV void group_arrive(u32 bar) { ts_host::bar_arrive(bar, 4, 0); }
TS_DEV void group_arrive_pair(u32 bar) { ts_host::bar_arrive_cluster(bar, 4); }
TS_DEV void arrive_pair(u32 bar, u32 count) { ts_host::bar_arrive_cluster(bar, count); }
TS_DEV bool bar_try(u32 bar, u32 parity) { return ts_host::bar_try(bar, parity) || ts_host::rest(); }
TS_DEV bool bar_ready(u32 bar, u32 parity) { return ts_host::bar_try(bar, parity); }
TS_DEV void bar_wait(u32 bar, u32 parity) { ts_host::bar_wait(bar, parity); }
TS_DEV void named_sync(int id, int threads) { ts_host::named(id, threads); }
TS_DEV void named_arrive(int id, int threads) { ts_host::named_arrive(id, threads); }

// ---- the shared memory of the other CTAs of a cluster: an address says in its upper bits whose it is
TS_DEV u32 at_peer(u32 addr, u32 rank) { return (addr & 0xFFFFFF) | rank << 24; }
TS_DEV void store_at_peer(u32 addr, float a, float b, float c, float d) {
  float* const to = reinterpret_cast<float*>(ts_host::peer_memory(addr, 16));
  to[0] = a, to[1] = b, to[2] = c, to[3] = d;
}
TS_DEV void copy_to_peer(u32 dst, u32 src, u32 bytes, u32 peer_bar) { ts_host::bulk_to_peer(dst, src, bytes, peer_bar); }

// ---- proxies
TS_DEV void fence_async_shared() { ts_host::fence_async_shared(); }
TS_DEV void fence_async_global() { ts_host::fence_async_global(); }

// ---- bulk tensor copies; hints say nothing here
constexpr u64 EVICT_FIRST = 0, EVICT_LAST = 1, EVICT_NORMAL = 2;
TS_DEV void tma_load(u32 dst, const TensorMap* map, int x, int y, u32 bar, u64) { ts_host::bulk_load(dst, *map, {x, y}, bar, 0); }
TS_DEV void tma_load_pixels(u32 dst, const TensorMap* map, int channel, int x, int y, int image, u16 offset_x, u16 offset_y, u32 bar, u64) {
  ts_host::bulk_load(dst, *map, {x, y, channel, image, offset_x, offset_y}, bar, 0);
}
TS_DEV void tma_load_heads(u32 dst, const TensorMap* map, int x, int y, int head, int batch, u32 bar) {
  ts_host::bulk_load(dst, *map, {x, y, head, batch}, bar, 0);
}
TS_DEV void tma_store_heads(const TensorMap* map, int x, int y, int head, int batch, u32 src) {
  ts_host::bulk_store(*map, {x, y, head, batch}, src);
}
TS_DEV void tma_multicast(u32 dst, const TensorMap* map, int x, int y, u32 bar, u16 mask, u64) {
  ts_host::bulk_load(dst, *map, {x, y}, bar, mask);
}
TS_DEV void tma_store(const TensorMap* map, int x, int y, u32 src, u64) { ts_host::bulk_store(*map, {x, y}, src); }
TS_DEV void tma_reduce_add(const TensorMap* map, int x, int y, u32 src) { ts_host::bulk_reduce_add(*map, x, y, src); }
TS_DEV void store_commit() { ts_host::bulk_commit(); }
template <int N>
TS_DEV void store_wait_read() {
  ts_host::bulk_wait(N, true);
}
template <int N>
TS_DEV void store_wait() {
  ts_host::bulk_wait(N, false);
}

// ---- flags, with the memory orders of the PTX
TS_DEV u64 flag_acquire(const u64* flag) {
  ts_host::pause(flag);
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
TS_DEV void flag_release(u64* flag, u64 v) {
  ts_host::reads_before_this();
  __atomic_store_n(flag, v, __ATOMIC_RELEASE);
  ts_host::flag_changed();
}
// Orders nothing but this: bulk reads whose bytes an mbarrier counted, and that this thread waited for, are over.
TS_DEV void flag_relaxed(u64* flag, u64 v) {
  ts_host::reads_before(flag);
  __atomic_store_n(flag, v, __ATOMIC_RELAXED);
  ts_host::flag_changed();
}
TS_DEV u64 flag_peek(const u64* flag) {
  ts_host::peeked(flag);
  return __atomic_load_n(flag, __ATOMIC_RELAXED);
}
TS_DEV void fence_gpu() { ts_host::acquire_peeked(); }
TS_DEV u32 count_up(u32* counter) { return __atomic_fetch_add(counter, 1u, __ATOMIC_ACQ_REL); }
TS_DEV void let_next_kernel_start() {}
TS_DEV void await_kernel_before() {}
TS_DEV void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
TS_DEV bool claim(u32* word) {
  u32 none = 0;
  return __atomic_compare_exchange_n(word, &none, 1u, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

// ---- global memory
template <class T>
TS_DEV T load_global(const T* p) {
  return *p;
}
template <class T>
TS_DEV void store_global(T* p, T v) {
  *p = v;
}

TS_DEV void store_global_words(void* p, const u32 (&v)[4]) {
  for (int k = 0; k < 4; ++k) ((u32*)p)[k] = v[k];
}
TS_DEV void store_shared_words(void* p, const u32 (&v)[4]) {
  for (int k = 0; k < 4; ++k) ((u32*)p)[k] = v[k];
}
TS_DEV void load_shared_words(const void* p, u32 (&v)[4]) {
  for (int k = 0; k < 4; ++k) v[k] = ((const u32*)p)[k];
}
TS_DEV void store_relaxed_words(void* p, const u32 (&v)[4]) {
  for (int k = 0; k < 4; ++k) __atomic_store_n(static_cast<u32*>(p) + k, v[k], __ATOMIC_RELAXED);
}
TS_DEV void load_relaxed_words(const void* p, u32 (&v)[4]) {
  for (int k = 0; k < 4; ++k) v[k] = __atomic_load_n(static_cast<const u32*>(p) + k, __ATOMIC_RELAXED);
}
TS_DEV void store_shared_floats(float* p, float a, float b, float c, float d) { p[0] = a, p[1] = b, p[2] = c, p[3] = d; }
TS_DEV void load_shared_floats(const float* p, float (&v)[4]) {
  for (int k = 0; k < 4; ++k) v[k] = p[k];
}

// ---- warpgroup products: read their operands as late as the program allows, at the wait for them
template <int BLOCKS>
struct Fragment;
template <int BLOCKS>
struct Packed;
template <int K>
TS_DEV void pin(Registers<float, K>&) {}
template <int K>
TS_DEV void pin(Registers<u32, K>&) {}
template <int K>
TS_DEV void pin(u32 (&)[K]) {}
TS_DEV void prefetch_l2(const void*) {}
TS_DEV void mma_fence() {}
TS_DEV void mma_commit() { ts_host::products_commit(); }
template <int N>
TS_DEV void mma_wait() {
  ts_host::products_wait(N);
}
template <int N>
TS_DEV void registers_inc() {}
template <int N>
TS_DEV void registers_dec() {}

template <class T, int BLOCKS, int AT>
struct Mma {
  template <int N>
  static void shared(Fragment<N>& acc, u64 a, u64 b) {
    ts_host::product({&acc.v[0][4 * AT], 4 * N, BLOCKS, nullptr, 0, T::ELEMENT, a, b});
  }
  template <int N>
  static void start(Fragment<N>& acc, u64 a, u64 b) {
    for (auto& lane : acc.v)
      for (int k = 4 * AT; k < 4 * (AT + BLOCKS); ++k) lane[k] = 0.0f;
    shared(acc, a, b);
  }
  template <int N, int M>
  static void registers(Fragment<N>& acc, const Packed<M>& a, int k, u64 b) {
    ts_host::product({&acc.v[0][4 * AT], 4 * N, BLOCKS, &a.v[0][k], 2 * M, T::ELEMENT, 0, b});
  }
};

template <class T, int BLOCKS, bool B_COLUMNS>
struct MmaColumns {
  template <int N>
  static void shared(Fragment<N>& acc, u64 a, u64 b) {
    ts_host::product({&acc.v[0][0], 4 * N, BLOCKS, nullptr, 0, T::ELEMENT, a, b, true, B_COLUMNS});
  }
};
template <class T, int BLOCKS>
struct MmaRows {
  template <int N, int M>
  static void registers(Fragment<N>& acc, const Packed<M>& a, int k, u64 b) {
    ts_host::product({&acc.v[0][0], 4 * N, BLOCKS, &a.v[0][k], 2 * M, T::ELEMENT, 0, b, false, true});
  }
};
template <class T, int BLOCKS>
struct MmaMixed {
  template <int N>
  static void shared(Fragment<N>& acc, u64 a, u64 b) {
    ts_host::product({&acc.v[0][0], 4 * N, BLOCKS, nullptr, 0, T::ELEMENT, a, b, false, true});
  }
  template <int N>
  static void start(Fragment<N>& acc, u64 a, u64 b) {
    for (auto& lane : acc.v)
      for (int k = 0; k < 4 * BLOCKS; ++k) lane[k] = 0.0f;
    shared(acc, a, b);
  }
};

// ---- rounding, to nearest even
TS_DEV u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
TS_DEV float float_of(u32 v) { return __builtin_bit_cast(float, v); }
TS_DEV u32 to_bf16(float x) {
  u32 v = bits_of(x);
  return x != x ? 0x7fffu : (v + 0x7fffu + ((v >> 16) & 1u)) >> 16;
}
TS_DEV u32 to_f16(float x) {
  const u32 sign = (bits_of(x) >> 16) & 0x8000u;
  const float a = float_of(bits_of(x) & 0x7fffffffu);
  if (a != a) return 0x7fffu;
  if (a >= 65520.0f) return sign | 0x7c00u;
  // below 2^-14 the halves are 2^-24 apart: let the addition round
  if (a < 6.103515625e-05f) return sign | (bits_of(a + 0.5f) - bits_of(0.5f));
  const u32 v = bits_of(a);
  return sign | ((v + 0xfffu + ((v >> 13) & 1u) - (112u << 23)) >> 13);
}
TS_DEV float from_f16(u32 h) {
  const u32 e = (h >> 10) & 31u, m = h & 0x3ffu, sign = (h & 0x8000u) << 16;
  if (e == 0) return (sign ? -1.0f : 1.0f) * (float)m * 5.9604644775390625e-08f;
  return float_of(sign | (e == 31 ? 0x7f800000u : (e + 112u) << 23) | (m << 13));
}
TS_DEV float larger_of(float a, float b) { return a != a || b != b ? __builtin_nanf("") : a > b ? a : b; }
struct bf16 {
  static constexpr int BYTES = 2, ELEMENT = 0;
  static TS_DEV u32 pack(float a, float b) { return to_bf16(a) | to_bf16(b) << 16; }
  static TS_DEV u32 larger(u32 a, u32 b) { return pack(larger_of(low(a), low(b)), larger_of(high(a), high(b))); }
  static TS_DEV float low(u32 v) { return float_of(v << 16); }
  static TS_DEV float high(u32 v) { return float_of(v & 0xffff0000u); }
};
struct f16 {
  static constexpr int BYTES = 2, ELEMENT = 1;
  static TS_DEV u32 pack(float a, float b) { return to_f16(a) | to_f16(b) << 16; }
  static TS_DEV u32 larger(u32 a, u32 b) { return pack(larger_of(low(a), low(b)), larger_of(high(a), high(b))); }
  static TS_DEV float low(u32 v) { return from_f16(v & 0xffffu); }
  static TS_DEV float high(u32 v) { return from_f16(v >> 16); }
};
struct f32 {
  static constexpr int BYTES = 4, ELEMENT = 2;
  static TS_DEV float to_tf32(float x) { return x != x ? x : float_of((bits_of(x) + 0x1000u) & 0xffffe000u); }
  static TS_DEV float to_tf32_as_copied(float x) {
    return x != x ? x : float_of((bits_of(x) + 0xfffu + ((bits_of(x) >> 13) & 1u)) & 0xffffe000u);
  }
};

// ---- special functions
TS_DEV float ex2(float x) { return __builtin_exp2f(x); }
TS_DEV float lg2(float x) { return __builtin_log2f(x); }
TS_DEV float lg2_normal(float x) { return lg2(x); }
TS_DEV float rcp(float x) { return 1.0f / x; }
TS_DEV float rcp_normal(float x) { return 1.0f / x; }
TS_DEV float quotient(float a, float b) { return a / b; }
TS_DEV float rsq(float x) { return 1.0f / __builtin_sqrtf(x); }
TS_DEV float sqr(float x) { return __builtin_sqrtf(x); }
TS_DEV float max_nan(float a, float b) { return larger_of(a, b); }
TS_DEV float min_nan(float a, float b) { return a != a || b != b ? __builtin_nanf("") : a < b ? a : b; }
TS_DEV float min_number(float a, float b) { return __builtin_fminf(a, b); }
TS_DEV float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// In the order of the device's shuffles: neighbours first.
template <class F>
TS_DEV void row_combined(Registers<float, 2>& r, const F& combine) {
  for (u32 t = 0; t < 128; t += 4)
    for (int j = 0; j < 2; ++j) {
      const float all = combine(combine(r.v[t][j], r.v[t + 1][j]), combine(r.v[t + 2][j], r.v[t + 3][j]));
      for (u32 q = 0; q < 4; ++q) r.v[t + q][j] = all;
    }
}
TS_DEV void row_sum(Registers<float, 2>& r) { row_combined(r, [](float a, float b) { return a + b; }); }
TS_DEV void row_max(Registers<float, 2>& r) { row_combined(r, max_nan); }
template <class T>
TS_DEV void max_of_rows(Registers<u32, 8>& m) {
  for (u32 first = 0; first < 128; first += 32) {
    u32 most[32];
    for (u32 lane = 0; lane < 32; ++lane) {
      most[lane] = m.v[first + lane % 4][lane / 4];
      for (u32 row = 1; row < 8; ++row) most[lane] = T::larger(most[lane], m.v[first + 4 * row + lane % 4][lane / 4]);
    }
    for (u32 lane = 0; lane < 32; ++lane) m.v[first + lane][0] = most[lane];
  }
}

}  // namespace ts
