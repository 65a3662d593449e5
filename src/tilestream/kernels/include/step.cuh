// A whole decode step of one sequence as one persistent kernel: every CTA has rows of every product of every layer.
//
// A layer is five stages: QKV product; attention over shares of the cache; output projection with the residual; gate and
// up; down with the residual. A value goes from one to the next as a word of 64 bits, a tag beside it (as in NCCL's LL
// protocol): whoever reads polls the value itself, and no fence, counter or barrier of the grid is needed. A buffer is
// written again two layers later. Ten stages lie between, each of which needs all of the one before, so nobody reads it any
// more. Weights come by bulk copies into a ring of each warp in the order in which the warp will want them, stage after
// stage: they are on their way while it waits for values.
//
// A norm is applied behind its product: every CTA reads the whole row, so the sum of squares costs a few shuffles. Attention
// over a share of the cache leaves its result and the logarithm of its sum; who reads it for the output projection puts the
// shares together.
//
// Compiled for WIDTH, HIDDEN, HEADS, KEY_HEADS, FEATURES (of a head), POSITIONS (of the cache), VOCABULARY, LAYERS, SPLITS
// (of the cache), HEAD_NORMS, MASKED, WARPS (of a CTA), SLOTS (of a warp's ring), TIMEOUT (ns), DELAYS, behind StepParams (step/kernel.py).
#pragma once
#include "step_rows.cuh"

struct Step : StepRows {
  using StepRows::StepRows;

  // ---- attention of the queries of one head of keys over a share of the cache
  static constexpr int OF_POSITION = FEATURES / 8, AT_ONCE = LANES / OF_POSITION;  // lanes of a position; positions of a warp
  static constexpr int EACH = GROUP > 3 ? 1 : 2, BATCH = EACH * WARPS * AT_ONCE;                   // loads under way of a lane; positions of a CTA
  struct Cached {
    u32 keys[EACH][4], values[EACH][4];
    float masks[EACH];
  };
  TS_DEV int place(int start, int e) const { return start + (e * WARPS + warp) * AT_ONCE + lane / OF_POSITION; }
  TS_DEV void load_cached(Cached& c, int head, int start, int end) const {
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int s = place(start, e);
      c.masks[e] = NOTHING;
      if (s >= end) continue;
      const long long at = (((long long)head * POSITIONS + s) * FEATURES + lane % OF_POSITION * 8) * 2;
      if (s != position) {
        lanes::load128(p.layers[layer].keys + at, c.keys[e]);
        lanes::load128(p.layers[layer].values + at, c.values[e]);
      }
#if MASKED
      c.masks[e] = single(p.mask, s);
#else
      c.masks[e] = 0;
#endif
    }
  }
  // A head of a query or a key: its norm, its rotation; each lane has elements lane, lane + 32, ...
  TS_DEV void turned(u32 at, const char* weights, bool is_key, char* to) const {
    constexpr int OF_LANE = FEATURES / LANES;
    float v[OF_LANE], t[OF_LANE];
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) v[j] = get_float(at + (lane + j * LANES) * 4);
#if HEAD_NORMS
    float squares = 0;
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) squares += v[j] * v[j];
    const float rstd = ts::rsqrt_(over_lanes(squares) * (1.0f / FEATURES) + p.head_eps);
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) v[j] *= rstd * single(weights, lane + j * LANES);
#endif
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) {
      const float other = j < OF_LANE / 2 ? -v[(j + OF_LANE / 2) % OF_LANE] : v[j - OF_LANE / 2];
      t[j] = v[j] * single(p.cos, lane + j * LANES) + other * single(p.sin, lane + j * LANES);
    }
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) {
      const u32 rounded = Element::pack(t[j], 0);
      put_float(at + (lane + j * LANES) * 4, is_key ? Element::low(rounded) : t[j] * (p.scale * LOG2_E));
      if (to != nullptr) *(u16*)(to + (lane + j * LANES) * 2) = (u16)rounded;
    }
  }
  TS_DEV int item() const {  // a head and a share; -1: none of this CTA
    const int spread = grid / (KEY_HEADS * SPLITS), item = block / spread;
    return block % spread == 0 && item < KEY_HEADS * SPLITS ? item : -1;
  }
  TS_DEV void attend(int item, long long place_of_token) {
    if (item < 0) return;
    delay(ATTEND);
    if (place_of_token < 0 || place_of_token >= POSITIONS) lanes::give_up(p.record, NO_POSITION, block, POSITIONS, place_of_token);
    position = (int)place_of_token;
    const int head = item / SPLITS, share = item % SPLITS, each = (limit + SPLITS - 1) / SPLITS;
    const int start = share * each, end = start + each < limit ? start + each : limit;
    const StepLayer& l = p.layers[layer];
    Cached c;
    load_cached(c, head, start, end);
    // Queries, key, value of this head, as they come: in the staged row that the products do not read now.
    const u32 given = staged(side ^ 1), merged = staged(side);
    const u64* from = words(layer, PROJECTED);
    const Wanted w = wanted(ATTEND);
    for (int i = thread; i < (GROUP + 2) * FEATURES; i += THREADS) {
      const int which = i / FEATURES, f = i % FEATURES;
      const int at = which < GROUP ? head * GROUP * FEATURES + i : QUERY + (which - GROUP) * KEYS + head * FEATURES + f;
      put_float(given + i * 4, value_of(settled(lanes::peek(from + at), from + at, w, at)));
    }
    lanes::all_together();
    const int owner = position / each;
    const bool owns = (owner < SPLITS ? owner : SPLITS - 1) == share;
    const long long mine = ((long long)head * POSITIONS + position) * FEATURES * 2;
    if (warp < GROUP) turned(given + warp * FEATURES * 4, l.query_norm, false, nullptr);
    if (warp == GROUP) turned(given + GROUP * FEATURES * 4, l.key_norm, true, owns ? l.keys + mine : nullptr);
    if (warp == GROUP + 1)
      for (int f = lane; f < FEATURES; f += LANES) {
        const u32 at = given + ((GROUP + 1) * FEATURES + f) * 4, rounded = Element::pack(get_float(at), 0);
        put_float(at, Element::low(rounded));
        if (owns) *(u16*)(l.values + mine + f * 2) = (u16)rounded;
      }
    lanes::all_together();
    float most[GROUP], sum[GROUP], values[GROUP][8];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      most[g] = NOTHING, sum[g] = 0;
#pragma unroll
      for (int k = 0; k < 8; ++k) values[g][k] = 0;
    }
    const u32 feature = lane % OF_POSITION * 32;
#pragma unroll 1
    for (int first = start; first < end; first += BATCH) {
      float keys[EACH][8], cached[EACH][8], masks[EACH];
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const bool is_new = place(first, e) == position;
        masks[e] = c.masks[e] > NOTHING ? c.masks[e] * LOG2_E : NOTHING;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const u32 at = given + GROUP * FEATURES * 4 + feature + k * 4;
          keys[e][k] = k % 2 ? Element::high(c.keys[e][k / 2]) : Element::low(c.keys[e][k / 2]);
          cached[e][k] = k % 2 ? Element::high(c.values[e][k / 2]) : Element::low(c.values[e][k / 2]);
          if (is_new) keys[e][k] = get_float(at), cached[e][k] = get_float(at + FEATURES * 4);
        }
      }
      load_cached(c, head, first + BATCH, end);
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
        u32 q[2][4];
        lanes::get128(given + g * FEATURES * 4 + feature, q[0]);
        lanes::get128(given + g * FEATURES * 4 + feature + 16, q[1]);
        float scores[EACH], now = most[g];
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          scores[e] = 0;
#pragma unroll
          for (int k = 0; k < 8; ++k) scores[e] += keys[e][k] * ts::float_of(q[k / 4][k % 4]);
        }
#pragma unroll
        for (int far = 1; far < OF_POSITION; far *= 2)
#pragma unroll
          for (int e = 0; e < EACH; ++e) scores[e] += lanes::across(scores[e], far);
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          scores[e] = masks[e] > NOTHING ? scores[e] + masks[e] : NOTHING;
          now = scores[e] > now ? scores[e] : now;
        }
        const float before = ts::ex2(most[g] - now);
        most[g] = now, sum[g] *= before;
#pragma unroll
        for (int k = 0; k < 8; ++k) values[g][k] *= before;
#pragma unroll
        for (int e = 0; e < EACH; ++e)
          if (scores[e] > NOTHING) {
            const float weight = ts::ex2(scores[e] - now);
            sum[g] += weight;
#pragma unroll
            for (int k = 0; k < 8; ++k) values[g][k] += weight * cached[e][k];
          }
      }
    }
    // Positions of a warp together, then warps.
    constexpr int PART = FEATURES + 2;
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
#pragma unroll
      for (int far = OF_POSITION; far < LANES; far *= 2) {
        const float theirs = lanes::across(most[g], far), now = theirs > most[g] ? theirs : most[g];
        const float mine = ts::ex2(most[g] - now), other = ts::ex2(theirs - now);
        most[g] = now;
        sum[g] = sum[g] * mine + lanes::across(sum[g], far) * other;
#pragma unroll
        for (int k = 0; k < 8; ++k) values[g][k] = values[g][k] * mine + lanes::across(values[g][k], far) * other;
      }
      const u32 to = merged + (warp * GROUP + g) * PART * 4;
      if (lane < OF_POSITION) {
#pragma unroll
        for (int k = 0; k < 8; k += 2) lanes::put_pair(to + feature + k * 4, values[g][k], values[g][k + 1]);
      }
      if (lane == 0) lanes::put_pair(to + FEATURES * 4, most[g], sum[g]);
    }
    lanes::all_together();
    for (int i = thread; i < GROUP * FEATURES / 2; i += THREADS) {
      const int g = i / (FEATURES / 2), f = i % (FEATURES / 2) * 2, query = head * GROUP + g;
      float largest = NOTHING, total = 0, low = 0, high = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float theirs = get_float(merged + ((w * GROUP + g) * PART + FEATURES) * 4);
        largest = theirs > largest ? theirs : largest;
      }
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const u32 at = merged + (w * GROUP + g) * PART * 4;
            const float theirs = get_float(at + FEATURES * 4), of = get_float(at + FEATURES * 4 + 4);
        const float a = get_float(at + f * 4), b = get_float(at + f * 4 + 4);
        const float weight = ts::ex2(theirs - largest);
        total += weight * of, low += weight * a, high += weight * b;
      }
      const float times = total > 0 ? 1.0f / total : 0.0f;
      store_word(words(layer, ATTENDED) + share * (QUERY / 2) + query * (FEATURES / 2) + f / 2, Element::pack(low * times, high * times), tag);
      if (f == 0) store_word(words(layer, SUMS) + share * HEADS + query, ts::bits_of(total > 0 ? largest + ts::lg2(total) : NOTHING), tag);
    }
  }
  // The shares of attention together, staged.
  TS_DEV void attended() {
    side ^= 1;
    delay(OUTPUT);
    const u64 *of = words(layer, ATTENDED), *sums = words(layer, SUMS);
    const Wanted w = wanted(OUTPUT);
    if (block < WIDTH)
      for (int i = thread; i < QUERY / 2; i += THREADS) {
        const int head = i / (FEATURES / 2);
        u64 parts[SPLITS], each[SPLITS];
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
          parts[s] = lanes::peek(of + s * (QUERY / 2) + i);
          each[s] = lanes::peek(sums + s * HEADS + head);
        }
        float most = NOTHING, total = 0, low = 0, high = 0;
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
          parts[s] = settled(parts[s], of + s * (QUERY / 2) + i, w, s * (QUERY / 2) + i);
          each[s] = settled(each[s], sums + s * HEADS + head, w, s * HEADS + head);
          most = value_of(each[s]) > most ? value_of(each[s]) : most;
        }
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
          const float weight = value_of(each[s]) > NOTHING ? ts::ex2(value_of(each[s]) - most) : 0.0f;
          total += weight, low += weight * Element::low((u32)parts[s]), high += weight * Element::high((u32)parts[s]);
        }
        put_pair(2 * i, low / total, high / total);
      }
    lanes::all_together();
  }

  // ---- the whole
  TS_DEV void begin() {
    if (thread < WARPS * SLOTS) lanes::begin_bar(base + BARRIERS + thread * 8);
    tag = p.epochs[block];
    limit = POSITIONS;
#if MASKED
    int last = 0;  // of the positions that count; the rest of the cache is not read
    for (int s = thread; s < POSITIONS; s += THREADS)
      if (single(p.mask, s) > NOTHING) last = s + 1;
    limit = last;
#pragma unroll
    for (int far = 16; far; far >>= 1) {
      last = (int)lanes::across((float)limit, far);
      limit = last > limit ? last : limit;
    }
    if (lane == 0) lanes::put32(base + PARTS + warp * 4, limit);
    lanes::all_together();
    for (int w = 0; w < WARPS; ++w) {
      last = (int)lanes::get32(base + PARTS + w * 4);
      limit = last > limit ? last : limit;
    }
    limit = limit > 1 ? limit : 1;
#endif
    lanes::all_together();
    for (int n = 0; n < SLOTS; ++n) ask();
  }
  TS_DEV void run() {
    const auto none = [](int) { return 0.0f; };
    for (; layer < LAYERS; ++layer) {
      ++tag;
      const StepLayer& l = p.layers[layer];
      const int item = this->item();
      const long long position = item < 0 ? 0 : *l.length;
      float rstd = normed(ROW, l.norm, PROJECT);
      u64* to = words(layer, PROJECTED);
      products<PROJECT>(0, none, [&](int row, float sum, float, float) { store_word(to + row, ts::bits_of(sum * rstd), tag); });
      attend(item, position);
      const auto given = [&](int row) { return residual(ROW, row, OUTPUT); };
      float first = given(first_row(OUTPUT));
      attended();
      to = words(layer, MIDDLE);
      products<OUTPUT>(first, given, [&](int row, float sum, float, float x) { store_word(to + row, ts::bits_of(x + sum), tag); });
      rstd = normed(MIDDLE, l.middle_norm, GATE);
      to = words(layer, GATED);
      products<GATE>(0, none, [&](int row, float sum, float other, float) {
        store_word(to + row, ts::bits_of(ts::silu(sum * rstd) * (other * rstd)), tag);
      });
      const auto middle = [&](int row) { return residual(MIDDLE, row, DOWN); };
      first = middle(first_row(DOWN));
      side ^= 1;
      delay(DOWN);
      if (block < WIDTH) gather<HIDDEN>(words(layer, GATED), DOWN, [&](int i, float a, float b) { put_pair(i, a, b); });
      lanes::all_together();
      to = words(layer + 1, ROW);
      products<DOWN>(first, middle, [&](int row, float sum, float, float x) { store_word(to + row, ts::bits_of(x + sum), tag + 1); });
    }
    ++tag;
    const float rstd = normed(ROW, p.norm, HEAD);
    products<HEAD>(0, none, [&](int row, float sum, float, float) {
      *(u16*)(p.out + row * 2ll) = (u16)Element::pack(sum * rstd, 0);
    });
    if (thread == 0) p.epochs[block] = tag;
    // Whoever read a length has done its part of what this CTA was waiting for.
    if (p.counted && block == 0)
      for (int n = thread; n < LAYERS; n += THREADS) ++*p.layers[n].length;
  }
};

TS_LANES_KERNEL(THREADS, 1) tilestream_step(const TS_PARAM StepParams p) {
  TS_LANES_SHARED(base);
  Step step(p, base);
  step.begin();
  step.run();
}
