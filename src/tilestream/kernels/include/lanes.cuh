// What kernels of plain warps use, one primitive a function: copies past the registers, fragments, small products.
// host/lanes.cuh implements the same names with a fiber a lane, which ThreadSanitizer takes for a thread: lanes race there.
#pragma once
#include "ptx.cuh"

// CTAs of so many threads, of which so many fit on an SM.
#define TS_LANES_KERNEL(threads, resident) extern "C" __global__ void __launch_bounds__(threads, resident)
#define TS_LANES_SHARED(base) TS_SHARED(base)
#define TS_APART __device__ __noinline__  // a function of its own

namespace lanes {

using namespace ts;

TS_DEV int thread() { return (int)threadIdx.x; }
TS_DEV int lane() { return (int)(threadIdx.x & 31); }
TS_DEV int warp() { return (int)(threadIdx.x >> 5); }
TS_DEV int block() { return (int)blockIdx.x; }
TS_DEV int blocks() { return (int)gridDim.x; }
TS_DEV void together() { __syncwarp(); }  // the lanes of a warp; what they wrote before, all see behind it
TS_DEV void all_together() { __syncthreads(); }
TS_DEV void meet(int threads) { named_sync(1, threads); }  // so many of a CTA, always the same ones

TS_DEV u64 of_lane(u64 v, int lane) {
  const u32 low = __shfl_sync(~0u, (u32)v, lane), high = __shfl_sync(~0u, (u32)(v >> 32), lane);
  return (u64)high << 32 | low;
}

TS_DEV u32 word_of(u32 v, int lane) { return __shfl_sync(~0u, v, lane); }

TS_DEV u32 vote(bool v) { return __ballot_sync(~0u, v); }
// A bit for each lane that has the same `bits` bits from `shift` on. Bit by bit: match.any takes as long as there are
// different values, three times as long for 32 of 9 bits (H200).
template <int COUNT>
TS_DEV void alike(u32 (&same)[COUNT], const u32 (&v)[COUNT], int shift, int bits) {
#pragma unroll
  for (int k = 0; k < COUNT; ++k) same[k] = ~0u;
  for (int bit = shift; bit < shift + bits; ++bit)
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const bool one = v[k] >> bit & 1;
      same[k] &= vote(one) ^ (one ? 0u : ~0u);
    }
}
TS_DEV u32 ones(u32 v) { return (u32)__popc(v); }

TS_DEV float across(float v, int far) { return lane_across(v, far); }  // that of lane ^ far
// The same among the lanes of a team, neighbours of which each team of a warp may be elsewhere in the code.
template <int TEAM>
TS_DEV float across_team(float v, int far) {
  const u32 members = TEAM == 32 ? ~0u : ((1u << TEAM) - 1u) << (threadIdx.x & 31 & ~(TEAM - 1));
  return __shfl_xor_sync(members, v, far);
}

// A value that the compiler takes for another one, so that what is made from it is made again: kept for a whole loop it would
// take registers. Its own from its own lane: an empty asm is none to ptxas, which moves code out of loops too.
TS_DEV void renew(int& v) { v = __shfl_sync(~0u, v, (int)(threadIdx.x & 31)); }

// ---- shared memory
TS_DEV void put32(u32 at, u32 v) { sts32(at, v); }
TS_DEV void put_pair(u32 at, float a, float b) { sts64(at, a, b); }
TS_DEV void put16(u32 at, u32 v) { sts16(at, (u16)v); }
TS_DEV u32 get32(u32 at) { return lds32(at); }
TS_DEV u32 get16(u32 at) { return lds16(at); }
TS_DEV void get128(u32 at, u32 (&v)[4]) { lds_words(at, v); }
// BYTES (4, 8 or 16) of shared memory.
template <int BYTES>
TS_DEV void get_words(u32 at, u32* words) {
  if constexpr (BYTES == 4) words[0] = lds32(at);
  if constexpr (BYTES == 8) {
    float a, b;
    lds64(at, a, b), words[0] = bits_of(a), words[1] = bits_of(b);
  }
  if constexpr (BYTES == 16) lds_words(at, *(u32(*)[4])words);
}
TS_DEV void add32(u32 at, u32 v) { asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
TS_DEV void keep_smaller(u32 at, u32 v) { asm volatile("red.shared.min.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }

// ---- global memory
TS_DEV u32 load16(const void* p) { return __ldg((const u16*)p); }
TS_DEV long long load_index(const void* p, long long at, int wide) {
  return wide ? __ldg((const long long*)p + at) : (long long)__ldg((const int*)p + at);
}
TS_DEV void load128(const void* p, u32 (&v)[4]) {
  const uint4 all = __ldg((const uint4*)p);
  v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
}
// Where it stands: ptxas moves other loads of 16 bytes behind a wait for the kernel in front.
TS_DEV void load128_now(const void* p, u32 (&v)[4]) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(p) : "memory");
}
// BYTES (2, 4, 8 or 16) to or from as many words of 32 bits, at least one.
template <int BYTES>
TS_DEV void load_words(const void* p, u32* words) {
  if constexpr (BYTES == 2) words[0] = __ldg((const u16*)p);
  if constexpr (BYTES == 4) words[0] = __ldg((const u32*)p);
  if constexpr (BYTES == 8) {
    const uint2 both = __ldg((const uint2*)p);
    words[0] = both.x, words[1] = both.y;
  }
  if constexpr (BYTES == 16) {
    const uint4 all = __ldg((const uint4*)p);
    words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
  }
}
template <int BYTES>
TS_DEV void store_words(void* p, const u32* words) {
  if constexpr (BYTES == 2) *(u16*)p = (u16)words[0];
  if constexpr (BYTES == 4) *(u32*)p = words[0];
  if constexpr (BYTES == 8) *(uint2*)p = {words[0], words[1]};
  if constexpr (BYTES == 16) *(uint4*)p = {words[0], words[1], words[2], words[3]};
}
// What other CTAs read or have written: past the L1.
TS_DEV void store_shared(float* p, float v) { asm volatile("st.global.cg.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory"); }
TS_DEV float load_shared(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
TS_DEV u32 peek16(const u16* p) {
  u16 v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}
TS_DEV void add_global(u32* p, u32 v) { asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
// A word that says all that its readers want to know, among CTAs that run.
TS_DEV void post(u32* p, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
TS_DEV u32 peek(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
TS_DEV void post(u64* p, u64 v) { asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
TS_DEV u64 peek(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
TS_DEV void peek_pair(const u64* p, u64& first, u64& second) {  // each whole
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(p) : "memory");
}
TS_DEV void rest() {}                 // while others are waited for
constexpr u32 BETWEEN_CLOCKS = 1024;  // tries
TS_DEV void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
TS_DEV void store8(void* p, u32 v) { *(unsigned char*)p = (unsigned char)v; }
TS_DEV void store32(void* p, u32 v) { *(u32*)p = v; }
TS_DEV void store128(void* p, const u32 (&v)[4]) { *(uint4*)p = {v[0], v[1], v[2], v[3]}; }
TS_DEV void copy128(u32 to, const void* from, u32 bytes) { copy_async(to, from, bytes); }  // zeros behind `bytes`
TS_DEV void copies_here() { copies_wait(); }                                               // this lane's own

// Bulk copies, in 16 bytes; those of one barrier are waited for together.
TS_DEV void begin_bar(u32 bar, u32 count) {  // of lanes that ask or arrive
  bar_init(bar, count);
  bar_init_done();
}
TS_DEV void ask(u32 to, const void* from, u32 bytes, u32 bar) {
  bar_expect(bar, bytes);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from),
               "r"(bytes), "r"(bar), "l"(EVICT_FIRST)
               : "memory");
}
TS_DEV void arrive(u32 bar) { bar_arrive(bar); }
TS_DEV void copies_arrive(u32 bar) {  // once this lane's own copies (copy128) are here
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
TS_DEV void await(u32 bar, u32 parity) { bar_wait(bar, parity); }  // all lanes of a warp
TS_DEV void fence_copies() { fence_async_shared(); }  // this lane's loads come before copies that whoever sees it arrive asks for

// ---- fragments: four matrices of 8 x 8 elements of 16 bits, lane l names row l % 8 of matrix l / 8
TS_DEV void matrices(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
TS_DEV void matrices_turned(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
// c[16, 8] += a[16, 16] @ b[8, 16].T in fp32
template <class T>
TS_DEV void product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
#define TS_PRODUCT(type, name)                                                                                             \
  template <>                                                                                                              \
  TS_DEV void product<type>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {                                            \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "       \
        "{%0, %1, %2, %3};"                                                                                                \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                                   \
  }
TS_PRODUCT(bf16, "bf16")
TS_PRODUCT(f16, "f16")
#undef TS_PRODUCT

// ---- the end: nothing is kept in registers for what would come behind
[[noreturn]] TS_DEV void stop() {
  asm volatile("exit;");
  __builtin_unreachable();
}
// Words in host memory that outlive the trap; one lane of the grid writes them
TS_DEV void give_up(u64* record, int what, int where, long long limit, long long found) {
  if (claim((u32*)record)) {
    record[1] = (u64)(u32)where << 32 | (u32)what;
    record[2] = (u64)limit;
    record[3] = (u64)found;
    fence_system();
    trap();
  }
  for (u64 start = now_ns(); now_ns() - start < 500000000ull;) {  // a trap now would cut the other's words off
  }
  trap();
}

}  // namespace lanes
