// The host program around one kernel of lanes: build.py appends TS_LANES_MAIN(name) to its text.
//
// Its file starts with the kernel's argument, byte for byte as the device gets it. Addresses in it that have 1 in their top
// byte are offsets into the file.
#pragma once
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

namespace ts_host {
void trap(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(42);
}
}  // namespace ts_host

namespace lanes_host {

template <class P>
struct Task {
  const P* params;
  void (*kernel)(const P);
  int thread, block, blocks;
  static void* run(void* given) {
    const Task& task = *(const Task*)given;
    lanes_host::thread = task.thread;
    lanes_host::block = task.block;
    lanes_host::blocks = task.blocks;
    task.kernel(*task.params);
    return nullptr;
  }
};

// `count` CTAs, one after another; where they wait for each other (TS_TOGETHER) each is a process, at the same time.
template <class P>
void launch(void (*kernel)(const P), const P& params, int count, int threads, u32 bytes) {
  shared_bytes = bytes;
  shared = (char*)std::aligned_alloc(1024, (bytes + 1023) / 1024 * 1024);
  everybody.count = (u32)threads;
  auto* const tasks = new Task<P>[threads];
  auto* const running = new pthread_t[threads];
  for (int b = 0; b < count; ++b) {
#ifdef TS_TOGETHER
    if (b + 1 < count && fork() != 0) continue;
#endif
    std::memset(shared, 0xff, bytes);
    warps = new Warp[threads / 32];
    for (int w = 0; w < threads / 32; ++w) warps[w].ordered.count = warps[w].exchange.count = 32;
    for (int t = 0; t < threads; ++t) {
      tasks[t] = {&params, kernel, t, b, count};
      pthread_create(&running[t], nullptr, Task<P>::run, &tasks[t]);
    }
    for (int t = 0; t < threads; ++t) pthread_join(running[t], nullptr);
    delete[] warps;
#ifdef TS_TOGETHER
    if (b + 1 < count) std::_Exit(0);
    for (int left; wait(&left) > 0;)
      if (left != 0) std::_Exit(WEXITSTATUS(left));
#endif
  }
  delete[] running;
  delete[] tasks;
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
  launch(kernel, params, std::atoi(argv[2]), std::atoi(argv[3]), (u32)std::atoi(argv[4]));
  return 0;
}

}  // namespace lanes_host

// Arguments: file, CTAs, threads a CTA, bytes of shared memory.
#define TS_LANES_MAIN(name) \
  int main(int, char** argv) { return lanes_host::run(argv, name); }

// A function of a library, on memory of its process.
#define TS_LANES_LAUNCH(name, params)                                                        \
  extern "C" void launch_##name(const params* p, int ctas, int threads, int shared_bytes) { \
    lanes_host::launch<params>(name, *p, ctas, threads, (u32)shared_bytes);                 \
  }
