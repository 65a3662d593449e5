// Rows of a decode step (step.cuh): weights on their way, products, values of other CTAs, norms.
#pragma once
#include "lanes.cuh"
#include "math.cuh"

using Element = ts::bf16;

constexpr int LANES = 32, THREADS = WARPS * LANES;
constexpr int QUERY = HEADS * FEATURES, KEYS = KEY_HEADS * FEATURES, QKV = QUERY + 2 * KEYS;
constexpr int GROUP = HEADS / KEY_HEADS, PIECE = 1024, SLOT = PIECE * 2;
enum { PROJECT, ATTEND, OUTPUT, GATE, DOWN, HEAD };  // stages: five of a layer, and one
enum { NO_POSITION = 16 };                           // in a record: the index is not one of the cache
// Shared memory: rings, two staged rows, barriers, parts of sums.
constexpr u32 RINGS = WARPS * SLOTS * SLOT, BARRIERS = RINGS + 2 * STAGED * 4, PARTS = BARRIERS + WARPS * SLOTS * 8;
// Words of a buffer. There are two, of even and of odd layers.
constexpr int ROW = 0, PROJECTED = ROW + WIDTH, ATTENDED = PROJECTED + QKV, SUMS = ATTENDED + SPLITS * QUERY / 2,
              MIDDLE = SUMS + SPLITS * HEADS + (SPLITS * HEADS & 1), GATED = MIDDLE + WIDTH;
static_assert(GATED + HIDDEN == WORDS && PARTS + 2 * WARPS * 4 == SHARED_BYTES && STAGED % 8 == 0);
static_assert(FEATURES % 64 == 0 && FEATURES <= 256 && GROUP <= 8 && GROUP + 2 <= WARPS && WIDTH % 8 == 0 && HIDDEN % 8 == 0);
constexpr float LOG2_E = 1.44269504f, NOTHING = -3.0e38f;  // below every score

TS_DEV u32 tag_of(u64 v) { return (u32)(v >> 32); }
TS_DEV float value_of(u64 v) { return ts::float_of((u32)v); }
TS_DEV void store_word(u64* p, u32 bits, u32 tag) { lanes::post(p, (u64)tag << 32 | bits); }
TS_DEV void put_float(u32 at, float v) { lanes::put32(at, ts::bits_of(v)); }
TS_DEV float get_float(u32 at) { return ts::float_of(lanes::get32(at)); }
// Where element i of a staged row lies: halves of 8 apart, so that lanes that read 16 bytes each meet no bank twice.
// Elements 2k and 2k + 1 are neighbours.
TS_DEV int placed(int i) { return (i >> 3 << 2 | (i & 3)) + (i >> 2 & 1) * (STAGED / 2); }
TS_DEV float over_lanes(float v) {
#pragma unroll
  for (int far = 16; far; far >>= 1) v += lanes::across(v, far);
  return v;
}
TS_DEV float single(const char* of, int i) { return Element::low(lanes::load16(of + i * 2)); }
TS_DEV void both(const char* of, int i, float& a, float& b) {
  u32 w[1];
  lanes::load_words<4>(of + i * 2, w);
  a = Element::low(w[0]), b = Element::high(w[0]);
}

// Who waits for what, for the record.
struct Wanted {
  u64* record;
  u32 tag;
  int stage, layer;
  TS_APART void expired(int element, u32 found) const {
    lanes::give_up(record, stage, layer << 16 | lanes::block(), element, found);
  }
};
// Polls until a word has its tag; a call of its own, since nearly all others find theirs at once.
TS_APART u64 waited(const u64* at, const Wanted& w, int element) {
  const u64 start = lanes::now_ns();
  for (u32 tries = 1;; ++tries) {
    const u64 v = lanes::peek(at);
    if (tag_of(v) == w.tag) return v;
    lanes::rest();
    if (tries % 1024 == 0 && lanes::now_ns() - start > TIMEOUT) w.expired(element, tag_of(v));
  }
}
TS_DEV u64 settled(u64 v, const u64* at, const Wanted& w, int element) {
  return tag_of(v) == w.tag ? v : waited(at, w, element);
}

struct StepRows {
  const StepParams& p;
  const u32 base;
  const int thread, warp, lane, block, grid;
  u32 tag;  // of this layer's values
  int layer, side, limit, position;
  // The weights to come: the next to be asked for; how many pieces have been asked for, and used.
  int ahead_stage, ahead_layer, ahead_row, ahead_start, ahead_half, asked, used;

  TS_DEV StepRows(const StepParams& p, u32 base)
      : p(p),
        base(base),
        thread(lanes::thread()),
        warp(lanes::warp()),
        lane(lanes::lane()),
        block(lanes::block()),
        grid(lanes::blocks()),
        layer(0),
        side(0),
        ahead_stage(PROJECT),
        ahead_layer(0),
        ahead_row(first_row(PROJECT)),
        ahead_start(0),
        ahead_half(0),
        asked(0),
        used(0) {}

  // ---- rows of a product: spread over CTAs first, from another warp on in each stage
  TS_DEV int first_row(int stage) const { return ((warp + 5 * stage) & (WARPS - 1)) * grid + block; }
  static TS_DEV int rows(int stage) {
    return stage == PROJECT ? QKV : stage == GATE ? HIDDEN : stage == HEAD ? VOCABULARY : WIDTH;
  }
  static TS_DEV int columns(int stage) { return stage == OUTPUT ? QUERY : stage == DOWN ? HIDDEN : WIDTH; }
  TS_DEV const char* weight() const {
    const StepLayer& l = p.layers[ahead_stage == HEAD ? 0 : ahead_layer];
    const char* of = p.head;
    int row = ahead_row;
    if (ahead_stage == PROJECT) {
      of = row < QUERY ? l.query : row < QUERY + KEYS ? l.key : l.value;
      row -= row < QUERY ? 0 : row < QUERY + KEYS ? QUERY : QUERY + KEYS;
    }
    if (ahead_stage == OUTPUT) of = l.output;
    if (ahead_stage == GATE) of = ahead_half ? l.up : l.gate;
    if (ahead_stage == DOWN) of = l.down;
    return of + ((long long)row * columns(ahead_stage) + ahead_start) * 2;
  }
  TS_DEV u32 slot(int n) const { return base + (warp * SLOTS + n % SLOTS) * SLOT; }
  TS_DEV u32 barrier(int n) const { return base + BARRIERS + (warp * SLOTS + n % SLOTS) * 8; }
  // Ask for the next piece that this warp will want, if there is one: of gate and up in turns.
  TS_DEV void ask() {
    while (ahead_row >= rows(ahead_stage)) {
      if (ahead_stage == HEAD) return;
      if (ahead_stage == DOWN) {
        ahead_stage = ++ahead_layer < LAYERS ? PROJECT : HEAD;
      } else {
        ahead_stage += ahead_stage == PROJECT ? 2 : 1;
      }
      ahead_row = first_row(ahead_stage);
    }
    const int left = columns(ahead_stage) - ahead_start;
    if (lane == 0) {
      lanes::ask(slot(asked), weight(), (left < PIECE ? left : PIECE) * 2, barrier(asked));
    }
    ++asked;
    ahead_half = ahead_stage == GATE && !ahead_half;
    if (ahead_half) return;
    ahead_start += PIECE;
    if (left <= PIECE) ahead_start = 0, ahead_row += WARPS * grid;
  }
  // This lane's share of the next piece times the staged row from column `start` on.
  TS_DEV float piece(int start, int count) {
    lanes::await(barrier(used), used / SLOTS & 1);
    const u32 from = slot(used), x = base + RINGS + side * (STAGED * 4) + start * 2;  // 8 columns are 16 bytes of each half
    float sum = 0;
#pragma unroll
    for (int j = 0; j < PIECE / (8 * LANES); ++j) {
      const int c = lane + LANES * j;
      if (c * 8 < count) {
        u32 w[4], a[4], b[4];
        lanes::get128(from + c * 16, w);
        lanes::get128(x + c * 16, a);
        lanes::get128(x + STAGED * 2 + c * 16, b);
        sum += Element::low(w[0]) * ts::float_of(a[0]) + Element::high(w[0]) * ts::float_of(a[1]);
        sum += Element::low(w[1]) * ts::float_of(a[2]) + Element::high(w[1]) * ts::float_of(a[3]);
        sum += Element::low(w[2]) * ts::float_of(b[0]) + Element::high(w[2]) * ts::float_of(b[1]);
        sum += Element::low(w[3]) * ts::float_of(b[2]) + Element::high(w[3]) * ts::float_of(b[3]);
      }
    }
    lanes::together();
    ++used;
    ask();
    return sum;
  }
  // Every row that this warp has of a product, the first of which has `before` already; `store` is called by one lane.
  template <int STAGE, class Before, class Store>
  TS_DEV void products(float first, Before before, Store store) {
    constexpr int COLUMNS = STAGE == OUTPUT ? QUERY : STAGE == DOWN ? HIDDEN : WIDTH;
    float given = first;
    for (int row = first_row(STAGE); row < rows(STAGE); row += WARPS * grid) {
      float sum = 0, other = 0;
#pragma unroll 1
      for (int start = 0; start < COLUMNS; start += PIECE) {
        const int count = COLUMNS - start < PIECE ? COLUMNS - start : PIECE;
        sum += piece(start, count);
        if constexpr (STAGE == GATE) other += piece(start, count);
      }
      sum = over_lanes(sum);
      if constexpr (STAGE == GATE) other = over_lanes(other);
      if (lane == 0) store(row, sum, other, given);
      if (row + WARPS * grid < rows(STAGE)) given = before(row + WARPS * grid);
    }
  }

  // ---- values of other CTAs
  TS_DEV u64* words(int layer, int part) const { return p.words + (layer & 1) * (long long)WORDS + part; }
  TS_DEV Wanted wanted(int stage) const { return {p.record, tag, stage, layer}; }
  TS_DEV void delay(int stage) const {
#if DELAYS
    u32 h = (tag * 6 + stage) * 2654435761u ^ block * 2246822519u;
    h ^= h >> 15, h *= 2246822519u, h ^= h >> 13;
    if (h % 8 == 0)
      for (const u64 start = lanes::now_ns(); lanes::now_ns() - start < h % 20000;) {
      }
#endif
  }
  TS_DEV u32 staged(int which) const { return base + RINGS + which * (STAGED * 4); }
  TS_DEV void put_pair(int i, float a, float b) const { lanes::put_pair(staged(side) + placed(i) * 4, a, b); }
  // Tagged words of a row, two at once and all of a thread's under way together, to `take(i, first, second)`.
  template <int COUNT, class Take>
  TS_DEV void gather(const u64* from, int stage, Take take) const {
    constexpr int PASSES = (COUNT + 2 * THREADS - 1) / (2 * THREADS), BATCH = PASSES < 8 ? PASSES : 8;
    const Wanted w = wanted(stage);
    for (int first = thread * 2; first < COUNT; first += BATCH * THREADS * 2) {
      u64 v[BATCH][2];
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        const int i = first + b * THREADS * 2;
        if (i < COUNT) lanes::peek_pair(from + i, v[b]);
      }
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        const int i = first + b * THREADS * 2;
        if (i < COUNT) take(i, value_of(settled(v[b][0], from + i, w, i)), value_of(settled(v[b][1], from + i + 1, w, i + 1)));
      }
    }
  }
  // A row of the residual stream times a norm's weights, staged; returns the reciprocal of its root mean square.
  TS_DEV float normed(int part, const char* weights, int stage) {
    side ^= 1;
    delay(stage);
    float squares = 0;
    const auto take = [&](int i, float a, float b) {
      float g, h;
      both(weights, i, g, h);
      put_pair(i, a * g, b * h);
      squares += a * a + b * b;
    };
    if (block < rows(stage)) {
      if (layer == 0 && part == ROW) {
        for (int i = thread * 2; i < WIDTH; i += THREADS * 2) {
          float a, b;
          both(p.row, i, a, b);
          take(i, a, b);
        }
      } else {
        gather<WIDTH>(words(layer, part), stage, take);
      }
    }
    squares = over_lanes(squares);
    const u32 parts = base + PARTS + side * (WARPS * 4);
    if (lane == 0) put_float(parts + warp * 4, squares);
    lanes::all_together();
    squares = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w += 4) {
      u32 v[4];
      lanes::get128(parts + w * 4, v);
      squares += (ts::float_of(v[0]) + ts::float_of(v[1])) + (ts::float_of(v[2]) + ts::float_of(v[3]));
    }
    return ts::rsqrt_(squares * (1.0f / WIDTH) + p.eps);
  }
  // An element of the row that a product is added to. It is known since a stage before, so that nobody waits for it.
  TS_DEV float residual(int part, int row, int stage) const {
    if (row >= WIDTH) return 0;
    if (layer == 0 && part == ROW) return single(p.row, row);
    const u64* at = words(layer, part) + row;
    return value_of(settled(lanes::peek(at), at, wanted(stage), row));
  }
};
