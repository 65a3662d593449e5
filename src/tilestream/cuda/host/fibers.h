// Fibers of one thread: each runs until it waits for another. So a run repeats exactly, however busy the machine is, and a wait
// without end is seen at once.
//
// ThreadSanitizer takes each for a thread, and a switch for no order. What keeps them is not watched.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

#define TS_UNWATCHED __attribute__((noinline, no_sanitize_thread)) inline

namespace fibers {

constexpr size_t STACK = 1 << 19, GUARD = 1 << 12;

struct Fiber {
  ucontext_t context;
  void* known = nullptr;   // ThreadSanitizer's
  Fiber* next = nullptr;   // in the queue that it waits in
};

struct Queue {
  Fiber *first = nullptr, *last = nullptr;
  TS_UNWATCHED void add(Fiber* f) {
    f->next = nullptr;
    (last ? last->next : first) = f;
    last = f;
  }
  TS_UNWATCHED void add_first(Fiber* f) {
    f->next = first;
    first = f;
    if (!last) last = f;
  }
  TS_UNWATCHED Fiber* take() {
    Fiber* const f = first;
    if (f && !(first = f->next)) last = nullptr;
    return f;
  }
};

inline Fiber outside, *running = &outside;
inline Queue ready;
inline int left;            // have not ended
inline unsigned order = 0;  // of those that are ready: in turn, or by this seed

[[noreturn]] inline void give_up(const char* why) {
  std::fprintf(stderr, "%s\n", why);
  std::_Exit(42);
}

TS_UNWATCHED void go(Fiber* to) {
  Fiber* const from = running;
  if (from == to) return;
  running = to;
#ifdef __SANITIZE_THREAD__
  __tsan_switch_to_fiber(to->known, __tsan_switch_to_fiber_no_sync);
#endif
  swapcontext(&from->context, &to->context);
}

TS_UNWATCHED void wake(Fiber* f) {
  if (order && (order = order * 1664525u + 1013904223u) >> 31)
    ready.add_first(f);
  else
    ready.add(f);
}
TS_UNWATCHED void wake_all(Queue& waiting) {
  while (Fiber* const f = waiting.take()) wake(f);
}
// The next that is ready goes on; behind the last one's end, who ran them.
TS_UNWATCHED void go_on() {
  Fiber* const next = ready.take();
  if (!next && left) give_up("a lane did not come: all that are left wait");
  go(next ? next : &outside);
}
TS_UNWATCHED void wait_in(Queue& waiting) {
  waiting.add(running);
  go_on();
}
// Lets the others go on. A seed may not let one that polls have every turn: it goes last.
TS_UNWATCHED void give_way() {
  ready.add(running);
  go_on();
}
TS_UNWATCHED void end() { --left, go_on(); }

// Runs `count` of them to their ends, each with its own part of `stacks`.
template <class F>
void run(F* all, int count, void (*body)(), char* stacks) {
  for (int k = 0; k < count; ++k) {
    Fiber* const f = &all[k];
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = stacks + k * STACK + GUARD;
    f->context.uc_stack.ss_size = STACK - GUARD;
    f->context.uc_link = nullptr;
    makecontext(&f->context, body, 0);
#ifdef __SANITIZE_THREAD__
    f->known = __tsan_create_fiber(0);
#endif
    ready.add(f);
  }
#ifdef __SANITIZE_THREAD__
  outside.known = __tsan_get_current_fiber();
#endif
  left = count;
  go(ready.take());
#ifdef __SANITIZE_THREAD__
  for (int k = 0; k < count; ++k) __tsan_destroy_fiber(all[k].known);
#endif
}

inline char* stacks_of(int count) {
  auto* const made = (char*)mmap(nullptr, count * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) give_up("there is no memory for the lanes' stacks");
  for (int k = 0; k < count; ++k) mprotect(made + k * STACK, GUARD, PROT_NONE);
  return made;
}
inline void give_back_stacks(char* stacks, int count) { munmap(stacks, count * STACK); }

}  // namespace fibers
