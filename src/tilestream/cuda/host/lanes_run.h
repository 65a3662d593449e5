// The host program around one kernel of lanes: build.py appends TS_LANES_MAIN(name) to its text.
//
// Its file starts with the kernel's argument, byte for byte as the device gets it. Addresses in it that have 1 in their top
// byte are offsets into the file.
#pragma once
#include <fcntl.h>
#include <sys/stat.h>

namespace ts_host {
void trap(const char* what) { fibers::give_up(what); }
}  // namespace ts_host

namespace lanes_host {

// What the lanes of a launch run.
template <class P>
struct Task {
  static inline const P* params;
  static inline void (*kernel)(const P);
  static inline std::atomic<int> ended{0};
  static void body() {
    kernel(*params);
    ended.fetch_add(1, std::memory_order_release);
    fibers::end();
  }
};

// `count` CTAs, one after another, or at the same time where they wait for each other (TS_TOGETHER).
template <class P>
void launch(void (*kernel)(const P), const P& params, int count, int threads, u32 bytes) {
#ifdef TS_TOGETHER
  const int at_once = count;
#else
  const int at_once = 1;
#endif
  const u32 room = (bytes + 1023) / 1024 * 1024;
  shared_bytes = bytes, blocks = count;
  Task<P>::params = &params, Task<P>::kernel = kernel;
  auto* const shared = (char*)std::aligned_alloc(1024, (u64)at_once * room);
  char* const stacks = fibers::stacks_of(at_once * threads);
  for (int first = 0; first < count; first += at_once) {
    std::vector<Cta> ctas(at_once);
    std::vector<Lane> lanes(at_once * threads);
    std::memset(shared, 0xff, (u64)at_once * room);
    for (int b = 0; b < at_once; ++b) {
      auto& cta = ctas[b];
      cta.block = first + b, cta.shared = shared + (u64)b * room;
      cta.warps = std::vector<Warp>(threads / 32), cta.reads = std::vector<Read>(room / 16);
      cta.everybody.count = (u32)threads;
      for (auto& warp : cta.warps) warp.ordered.count = warp.exchange.count = 32;
      for (int t = 0; t < threads; ++t) lanes[b * threads + t].cta = &cta, lanes[b * threads + t].thread = t;
    }
    fibers::run(lanes.data(), (int)lanes.size(), Task<P>::body, stacks);
    Task<P>::ended.load(std::memory_order_acquire);
  }
  fibers::give_back_stacks(stacks, at_once * threads);
  std::free(shared);
}

template <class P>
int run(char** argv, void (*kernel)(const P)) {
  const int file = open(argv[1], O_RDWR);
  struct stat info;
  fstat(file, &info);
  char* const base = (char*)mmap(nullptr, (u64)info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  P params;
  std::memcpy((void*)&params, base, sizeof(P));
  for (u64* word = (u64*)&params; word < (u64*)(&params + 1); ++word)
    if (*word >> 56 == 1) *word += (u64)base - (1ull << 56);
  fibers::order = (unsigned)std::atoi(argv[5]);
  launch(kernel, params, std::atoi(argv[2]), std::atoi(argv[3]), (u32)std::atoi(argv[4]));
  return 0;
}

}  // namespace lanes_host

// Arguments: file, CTAs, threads a CTA, bytes of shared memory, seed of the order of lanes.
#define TS_LANES_MAIN(name) \
  int main(int, char** argv) { return lanes_host::run(argv, name); }

// A function of a library, on memory of its process.
#define TS_LANES_LAUNCH(name, params)                                                        \
  extern "C" void launch_##name(const params* p, int ctas, int threads, int shared_bytes) { \
    lanes_host::launch<params>(name, *p, ctas, threads, (u32)shared_bytes);                 \
  }
