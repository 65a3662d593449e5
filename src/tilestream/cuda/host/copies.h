// The copy engine: bulk tensor copies, each in two halves.
#pragma once
#include <cstring>

#include "state.h"

namespace ts_host {

namespace {

// Pixels of a map in the im2col mode: number k of a box is k steps behind where the copy begins, along x, then y, then
// images; each moved by the tap's offsets.
struct Pictures {
  long channels, width, height, images, begin_x, begin_y, end_x, end_y, step_x, step_y;
  long x, y, image, offset_x, offset_y;
  explicit Pictures(const Job& j) {
    long* const words[] = {&channels, &width, &height};
    for (int k = 0; k < 3; ++k) *words[k] = (long)j.map[1 + k].load(relaxed);
    long* const more[] = {&images, &begin_x, &begin_y, &end_x, &end_y, &step_x, &step_y};
    for (int k = 0; k < 7; ++k) *more[k] = (long)j.map[7 + k].load(relaxed);
    x = j.x.load(relaxed), y = j.y.load(relaxed), image = j.image.load(relaxed);
    offset_x = j.offset_x.load(relaxed), offset_y = j.offset_y.load(relaxed);
  }
  // Which pixel of all pictures, or -1.
  long pixel(long k) const {
    const long across = (width - 1 + end_x - begin_x) / step_x + 1, down = (height - 1 + end_y - begin_y) / step_y + 1;
    if ((x - begin_x) % step_x != 0 || (y - begin_y) % step_y != 0) trap("pixels begin between two steps");
    const long at = (image * down + (y - begin_y) / step_y) * across + (x - begin_x) / step_x + k;
    const long px = begin_x + at % across * step_x + offset_x, py = begin_y + at / across % down * step_y + offset_y;
    const long n = at / across / down;
    return n < images && px >= 0 && px < width && py >= 0 && py < height ? (n * height + py) * width + px : -1;
  }
};

// Rows of 128 bytes between a matrix in memory and a tile in shared memory, 16 bytes at a time.
struct Box {
  char* base;
  long columns, rows, row_bytes, box_rows, element, x, y;
  bool of_pixels;
  Pictures pictures;
  explicit Box(const Job& j)
      : base((char*)j.map[0].load(relaxed)), columns(j.map[1].load(relaxed)), rows(j.map[2].load(relaxed)),
        row_bytes(j.map[3].load(relaxed)), box_rows(j.map[4].load(relaxed)), element(j.map[5].load(relaxed)),
        x(j.x.load(relaxed)), y(j.y.load(relaxed)), of_pixels(j.map[6].load(relaxed) != 0), pictures(j) {
    if (!of_pixels) return;
    x = j.column.load(relaxed);
    row_bytes = columns * element;
  }
  // Bytes of unit k (16 bytes) of a row that lie inside the matrix, and where they are.
  long valid(long row, long k) const {
    if (of_pixels ? pictures.pixel(row) < 0 : y + row < 0 || y + row >= rows) return 0;
    const long left = (columns - x) * element - 16 * k;
    return left < 0 ? 0 : left > 16 ? 16 : left;
  }
  char* at(long row, long k) const {
    return base + (of_pixels ? pictures.pixel(row) : y + row) * row_bytes + x * element + 16 * k;
  }
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

void issue(const TensorMap& map, const Corner& at, u32 smem, u32 bar, u32 mask) {
  Role& r = *self;
  const u32 n = r.issued.load(relaxed);
  wait_until(r.cta->event, "a free entry of the copy engine", [&] { return n - r.finished.load(relaxed) < JOBS; });
  Job& job = r.jobs[n % JOBS];
  for (int k = 0; k < MAP_WORDS; ++k) job.map[k].store(map.opaque[k], relaxed);
  job.x.store(at.x, relaxed);
  job.y.store(at.y, relaxed);
  job.column.store(at.column, relaxed);
  job.image.store(at.image, relaxed);
  job.offset_x.store(at.offset_x, relaxed);
  job.offset_y.store(at.offset_y, relaxed);
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

}  // namespace

}  // namespace ts_host
