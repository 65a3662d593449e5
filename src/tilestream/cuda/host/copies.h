// The copy engine: bulk tensor copies, each in two halves.
#pragma once
#include <cstring>
#include <mutex>

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
  long columns, rows, row_bytes, box_rows, element, x, y, width, format;  // 0 bf16 or any that is not converted, 1 f16, 2 fp32 that is rounded to tf32
  bool of_pixels;
  Pictures pictures;
  explicit Box(const Job& j)
      : base((char*)j.map[0].load(relaxed)), columns(j.map[1].load(relaxed)), rows(j.map[2].load(relaxed)),
        row_bytes(j.map[3].load(relaxed)), box_rows(j.map[4].load(relaxed)), element(j.map[5].load(relaxed)),
        x(j.x.load(relaxed)), y(j.y.load(relaxed)), width((long)j.map[14].load(relaxed)), format((long)j.map[15].load(relaxed)),
        of_pixels(j.map[6].load(relaxed) == 1), pictures(j) {
    if (j.map[6].load(relaxed) == 2)  // a head of a batch is a matrix
      base += j.column.load(relaxed) * (long)j.map[7].load(relaxed) + j.image.load(relaxed) * (long)j.map[8].load(relaxed);
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

// Rows of `width` bytes; only those of 128 are swizzled.
char* in_box(const Box& b, char* tile, long row, long k) {
  return b.width == 128 ? tile + row * 128 + ((k ^ (row & 7)) << 4) : tile + row * b.width + 16 * k;
}
char* swizzled(char* tile, long row, long k) { return tile + row * 128 + ((k ^ (row & 7)) << 4); }

float from_bf16(u16 v) { return __builtin_bit_cast(float, (u32)v << 16); }
u16 bf16_of(float x) {
  const u32 v = __builtin_bit_cast(u32, x);
  return x != x ? 0x7fff : (u16)((v + 0x7fff + ((v >> 16) & 1)) >> 16);
}
u16 half_of(float x) { return __builtin_bit_cast(u16, (_Float16)x); }

// Ties to even.
void round_to_tf32(char* at) {
  u32 v;
  std::memcpy(&v, at, 4);
  const float x = __builtin_bit_cast(float, v);
  v = x != x ? v : (v + 0xfff + ((v >> 13) & 1)) & 0xffffe000u;
  std::memcpy(at, &v, 4);
}

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
      for (long e = 0; b.format == 2 && e < n; e += 4) round_to_tf32(to + e);
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

// Additions of several CTAs to one place take turns, in whatever order they come.
std::mutex adding;
void add_global(const Box& b, const char* buffer) {
  const std::lock_guard<std::mutex> turn(adding);
  for (long r = 0; r < b.box_rows; ++r)
    for (long k = 0; k < b.width / 16; ++k) {
      const long n = b.valid(r, k);
      if (n == 0) continue;
      reads(b.at(r, k), (size_t)n);  // who cleared it, or reads the sum, must be ordered with this; other additions need not
      u16* const to = (u16*)b.at(r, k);
      const u16* const what = (const u16*)(buffer + r * 128 + 16 * k);
      for (long e = 0; e < n / 2; ++e) to[e] = b.format == 1 ? half_of((float)__builtin_bit_cast(_Float16, to[e]) + (float)__builtin_bit_cast(_Float16, what[e])) : bf16_of(from_bf16(to[e]) + from_bf16(what[e]));
    }
}

void next_half(Role& role) {
  role.half = !role.half;
  if (!role.half) role.finished.store(role.finished.load(relaxed) + 1, relaxed);
}

// One end of a copy to the same cluster: both CTAs must be there.
void step_to_peer(Cta& cta, Role& role, Job& job) {
  const u32 to = job.to.load(relaxed), bar = job.bar.load(relaxed) & PEER_ADDRESS, bytes = job.bytes.load(relaxed);
  Cta& peer = *cta.cluster[to >> PEER_SHIFT];
  if (!role.half) {
    if (cta.running.load(relaxed) == 0) trap("a CTA left its cluster while its copies to others were under way");
    char* const from = cta.memory + job.smem.load(relaxed);
    role.store_shared.acquire(&job.fenced_shared);
    role.store_shared.run([&] {
      reads(from, bytes);
      for (u32 k = 0; k < bytes; k += 16) std::memcpy(role.buffer.data() + k, from + k, 16);  // inlined: no call that is watched
    });
  } else {
    if (peer.running.load(relaxed) == 0) trap("a bulk copy came to a CTA that had left its cluster");
    role.load_shared.acquire(&job.issued);
    role.load_shared.run([&] {
      char* const at = peer.memory + (to & PEER_ADDRESS);
      reads(&word(peer, bar), BARRIER_BYTES);
      writes(at, bytes);
      for (u32 k = 0; k < bytes; k += 16) std::memcpy(at + k, role.buffer.data() + k, 16);
      release_edge(&peer.visible_clock[bar / BARRIER_BYTES]);
      release_edge(&word(peer, bar));
      update(peer, bar, 0, -(long)bytes);
    });
  }
  next_half(role);
}

// One end of the head job of a role: loads read global memory, then write shared; stores the other way.
void step(Cta& cta, Role& role) {
  Job& job = role.jobs[role.finished.load(relaxed) % JOBS];
  std::atomic_thread_fence(std::memory_order_acquire);
  const Kind kind = job.kind.load(relaxed);
  if (kind == Kind::PEER) return step_to_peer(cta, role, job);
  const Box box(job);
  const u32 bar = job.bar.load(relaxed), group = job.group.load(relaxed);
  char* const tile = cta.memory + job.smem.load(relaxed);
  if (kind != Kind::ADD && (job.smem.load(relaxed) & 1023) != 0) trap("a swizzled tile must start on 1024 bytes");
  const bool load = kind == Kind::LOAD;
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
    role.store_shared.run([&] {
      if (kind == Kind::STORE) return read_shared(box, tile, buffer);
      reads(tile, (size_t)(box.box_rows * box.width));
      for (long r = 0; r < box.box_rows; ++r)
        for (long k = 0; k < box.width / 16; ++k) std::memcpy(buffer + r * 128 + 16 * k, in_box(box, tile, r, k), 16);
    });
    role.store_shared.release(&role.read_clock[group % JOBS]);
    role.groups_read.store(group, relaxed);
    cta.event.notify();
  } else {
    role.store_global.acquire(&job.issued);
    role.store_global.run([&] { kind == Kind::ADD ? add_global(box, buffer) : write_global(box, buffer); });
    role.store_global.release(&role.done_clock[group % JOBS]);
    std::atomic_thread_fence(std::memory_order_release);
    role.groups_done.store(group, relaxed);
    cta.event.notify();
  }
  next_half(role);
}

// The engine takes jobs of different threads in any order: a seeded one.
void engine(Cta& cta, u64 seed) {
  u64 state = seed * 0x9e3779b97f4a7c15ull + (u64)cta.index + 1;
  for (;;) {
    const u32 seen = cta.event.count.load(relaxed);
    const bool last = cta.running.load(relaxed) == 0;
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const int first = (int)((state >> 33) % (u64)cta.threads);
    bool worked = false;
    for (int k = 0; k < cta.threads && !worked; ++k) {
      Role& role = cta.roles[(size_t)((first + k) % cta.threads)];
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

void issue(Kind kind, const TensorMap& map, const Corner& at, u32 smem, u32 bar, u32 mask, u32 to = 0, u32 bytes = 0) {
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
  job.kind.store(kind, relaxed);
  job.to.store(to, relaxed);
  job.bytes.store(bytes, relaxed);
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
