// What the host twin of ptx.cuh needs from the machine below it (machine.cpp): a CTA is six or seven threads,
// one for each consumer warpgroup, one for each warp of the loader group, one for the bulk-copy engine.
// No standard header here: this is compiled again for every generated kernel.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// As encoded by build.py: address, columns, rows, bytes a row, rows of a box, bytes an element, 0. Or of pictures in the
// im2col mode: address, channels, width, height, pixels of a box, bytes an element, 1, images; and (x, y) each of where
// the box begins, beside the first pixel, and ends, beside the last, and of the step. Or of heads: as of a matrix, a head's,
// then 2, bytes from head to head and from batch to batch. The last two words are of results
// that are added in memory: bytes of a row of a box, and 1 for f16 (0: bf16).
struct alignas(64) TensorMap {
  u64 opaque[16];
};

namespace ts_host {

constexpr int MAP_WORDS = 16;  // of a TensorMap, that say something

// Where a bulk copy begins: a column and a row; of pictures also an image, and how far the tap is from the lowest; of heads also
// a head (`column`) and a batch (`image`).
struct Corner {
  int x, y;
  int column = 0, image = 0, offset_x = 0, offset_y = 0;
};

extern thread_local char* shared;  // the CTA's shared memory
extern thread_local u32 shared_bytes;
extern thread_local u32 shared_base;  // its address: as on the device, the CTA's rank in its cluster above 24 lower bits

// acc[64, 8 AT to 8 (AT + BLOCKS)] += A @ B.T over 32 bytes of depth
struct Product {
  float* acc;  // register 4 AT of lane 0
  int acc_stride, blocks;
  const u32* packed;  // lane 0's first of four registers of A, or null: A in shared memory
  int packed_stride;
  int element;  // 0 bf16, 1 f16, 2 tf32
  u64 a, b;     // descriptors
  bool a_columns = false, b_columns = false;  // operands that lie [depth, columns]
};

int warp();
int cta();
int ctas();
u64 now_ns();
[[noreturn]] void trap(const char* why);
int cluster_rank();
void sync_cta();
void sync_cluster();

void bar_init(u32 bar, u32 count);
void bar_arrive(u32 bar, u32 arrivals, u32 bytes);
void bar_arrive_cluster(u32 bar, u32 arrivals);  // in every CTA of the cluster
bool bar_try(u32 bar, u32 parity);
bool rest();  // false, after a little while
void bar_wait(u32 bar, u32 parity);
void named(int id, int threads);
void named_arrive(int id, int threads);

void fence_async_shared();
void fence_async_global();
void bulk_load(u32 dst, const TensorMap& map, const Corner& at, u32 bar, u32 mask);  // mask 0: this CTA alone
void bulk_store(const TensorMap& map, const Corner& at, u32 src);
void bulk_reduce_add(const TensorMap& map, int x, int y, u32 src);
void bulk_to_peer(u32 dst, u32 src, u32 bytes, u32 bar);  // dst and bar of at_peer
char* peer_memory(u32 addr, u32 bytes);
void bulk_commit();
void bulk_wait(int groups, bool read_only);

void reads_before(u64* flag);  // what a relaxed store may rely on: see flag_relaxed
void reads_before_this();      // the same for a releasing store
void peeked(const u64* flag);  // a relaxed load: what it found orders something only behind acquire_peeked
void acquire_peeked();
void flag_changed();
void pause(const u64* flag);

void product(const Product& p);
void products_commit();
void products_wait(int groups);

// One launch, as build.py describes it in words of 64 bits; see run.cuh.
struct Launch {
  void (*body)(const void* params);
  const void* params;
  int ctas, cluster;
  u32 shared_bytes;
  double limit_s;
  u64 seed;
  int warpgroups;  // of consumers
};
void run(const Launch& launch);
void* map_file(const char* path, u64& bytes);

}  // namespace ts_host
