// Happens-before edges as ThreadSanitizer sees them; nothing in a build without it.
//
// The machine orders more finely than a C++ thread: bulk copies and products run in a proxy of their own, which
// sees ordinary writes only behind a fence. A Clock is such a proxy: what runs in it counts as another thread,
// ordered with the rest by the edges written down here and by no others.
//
// The machine itself is compiled without instrumentation: ThreadSanitizer sees the kernel's own accesses and
// flags, the accesses that are reported here, and these edges.
#pragma once

#if defined(TS_TSAN)
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* at);
void __tsan_release(void* at);
void __tsan_read_range(void* at, unsigned long bytes);
void __tsan_write_range(void* at, unsigned long bytes);
}
#endif

namespace ts_host {

#if defined(TS_TSAN)

inline void acquire_edge(const void* at) { __tsan_acquire(const_cast<void*>(at)); }
inline void release_edge(const void* at) { __tsan_release(const_cast<void*>(at)); }

inline void reads(const void* at, unsigned long bytes) { __tsan_read_range(const_cast<void*>(at), bytes); }
inline void writes(void* at, unsigned long bytes) { __tsan_write_range(at, bytes); }

class Clock {
 public:
  Clock() : fiber_(__tsan_create_fiber(0)) {}
  template <class F>
  void run(F body) {
    void* const here = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(fiber_, 1);  // 1: no edge from the switch itself
    body();
    __tsan_switch_to_fiber(here, 1);
  }
  void acquire(const void* at) {
    run([at] { acquire_edge(at); });
  }
  void release(const void* at) {
    run([at] { release_edge(at); });
  }

 private:
  void* fiber_;
};

#else

inline void acquire_edge(const void*) {}
inline void release_edge(const void*) {}
inline void reads(const void*, unsigned long) {}
inline void writes(void*, unsigned long) {}

class Clock {
 public:
  template <class F>
  void run(F body) {
    body();
  }
  void acquire(const void*) {}
  void release(const void*) {}
};

#endif

}  // namespace ts_host
