// A whole decode step of 1 to 32 sequences as one persistent kernel: every CTA has rows of every product of every layer.
//
// A layer is five stages: QKV product; attention over shares of the cache; output projection with the residual; gate and
// up; down with the residual. Two values, or one, go from one stage to the next as a word of 64 bits, a tag beside them (as
// in NCCL's LL protocol): whoever reads polls the word itself, and no fence, counter or barrier of the grid is needed. A
// buffer is written again two layers later. Ten stages lie between, each of which needs all of the one before, so nobody
// reads it any more. Weights, and keys and values of the cache, come by copies into a ring, which a warp of its own asks for
// (step_loader.cuh) in the order in which the others will want them, stage after stage: they are on their way while these wait.
//
// A product is cut into tiles of eight rows. The warps of a CTA share a tile's columns, each multiplies its own with the
// values of all sequences by tensor cores, and their sums are put together in shared memory in one order. So a warp gathers
// the values of its columns alone, straight into fragments. The rows of a head's queries, key and value are those of the
// CTAs that attend to it, so that only these wait for each other there.
//
// Whatever a decoder has besides is a stage's beginning (a norm, shares put together) or its end (a residual, an activation):
// the table at the top of step_tiles.cuh, `before` and `store` in `run`.
//
// Compiled for WIDTH, HIDDEN, HEADS, KEY_HEADS, FEATURES (of a head), POSITIONS (of the cache), VOCABULARY, LAYERS, BATCH,
// SPLITS (of the cache), HEAD_NORMS, MASKED, ROTARY, LAYER_NORMS, BIASED, TURNED (weights [inputs, outputs]), GATED, WARPS (of a
// CTA, that multiply), SLOTS (of the ring), SLOT (bytes), CHUNK (most columns of a warp's piece), ATTENTION (bytes of its parts),
// BUFFERS (of sums), TIMEOUT (ns), DELAYS, STAMPS, behind StepParams (step/kernel.py).
#pragma once
#include "step_rows.cuh"

struct Step : StepRows {
  using StepRows::StepRows;

  // ---- attention of the queries of one head of keys over a share of the cache
  static constexpr int OF_POSITION = FEATURES / 8, ABREAST = LANES / OF_POSITION;  // lanes of a position; positions of a warp
  static constexpr int OF_LANE = FEATURES / LANES;
  struct Angles {
    float cos[OF_LANE], sin[OF_LANE];
  };
  // The weights of a head's norm, which are on their way while the head is waited for.
  TS_DEV void load_head_norm(float (&w)[OF_LANE], const char* weights) const {
#pragma unroll
    for (int j = 0; j < OF_LANE && HEAD_NORMS; ++j) w[j] = single(weights, lane + j * LANES);
  }
  // A head of a query or a key: its norm, its rotation; each lane has elements lane, lane + 32, ...
  TS_DEV void turn_head(float (&v)[OF_LANE], const Angles& angles, const float (&w)[OF_LANE]) const {
#if HEAD_NORMS
    float squares = 0;
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) squares += v[j] * v[j];
    const float rstd = ts::rsqrt_(over_lanes(squares) * (1.0f / FEATURES) + p.head_eps);
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) v[j] *= rstd * w[j];
#endif
    float t[OF_LANE];
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) {
      const float other = j < OF_LANE / 2 ? -v[(j + OF_LANE / 2) % OF_LANE] : v[j - OF_LANE / 2];
      t[j] = ROTARY ? v[j] * angles.cos[j] + other * angles.sin[j] : v[j];
    }
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j) v[j] = t[j];
  }
  TS_DEV float mask_of(const Share& s, int position) const {
#if MASKED
    return position < s.end ? single(p.mask, s.sequence * p.mask_step + position) : NOTHING;
#else
    return position < s.end ? 0.0f : NOTHING;
#endif
  }
  // Shares of the cache of the sequences, of the heads of this CTA's team.
  TS_DEV void attend(long long place_of_token) {
    if (member >= items) return;
    renew();
    mark(ATTEND, 0);
    delay(ATTEND);
    if (place_of_token < 0 || place_of_token >= POSITIONS) lanes::give_up(p.record, NO_POSITION, block, POSITIONS, place_of_token);
#pragma unroll 1
    for (int item = member; item < items; item += members) attend(share_of(base, item), (int)place_of_token);
    mark(ATTEND, 2);
  }
  TS_DEV void attend(const Share& s, int position) {
    const StepLayer& l = p.layers[layer];
    const u32 given = base + ATTENTION_AT, merged = given + OF_HEAD * 4;
    const u64* from = words(layer, PROJECTED) + (s.sequence * KEY_HEADS + s.head) * OF_HEAD;
    const int owner = position / s.each, own_row = warp * ABREAST + lane / OF_POSITION;
    const bool owns = (owner < SPLITS ? owner : SPLITS - 1) == s.share;
    const long long mine = (s.row + position) * FEATURES * 2;
    float mask = mask_of(s, s.start + own_row);  // of the next round
    Angles angles;
#pragma unroll
    for (int j = 0; j < OF_LANE && ROTARY; ++j) {
      const int f = s.sequence * p.turn_step + lane + j * LANES;
      angles.cos[j] = single(p.cos, f), angles.sin[j] = single(p.sin, f);
    }
    together();  // what lay there is read
    // Queries, key, value of this head, as they come: each by a warp.
#pragma unroll 1
    for (int h = warp; h < GROUP + 2; h += WARPS) {
      u64 come[OF_LANE];
      float norm[OF_LANE] = {};
      load_head_norm(norm, h < GROUP ? l.query_norm : l.key_norm);
      waited(come, from + h * FEATURES + lane, wanted(ATTEND));
      float v[OF_LANE];
#pragma unroll
      for (int j = 0; j < OF_LANE; ++j) v[j] = value_of(come[j]);
      if (h <= GROUP) turn_head(v, angles, norm);
      char* const to = h < GROUP || !owns ? nullptr : (h == GROUP ? l.keys : l.values) + mine;
#pragma unroll
      for (int j = 0; j < OF_LANE; ++j) {
        const u32 rounded = Element::pack(v[j], 0);
        put_float(given + (h * FEATURES + lane + j * LANES) * 4, h < GROUP ? v[j] * (p.scale * LOG2_E) : Element::low(rounded));
        if (to != nullptr) *(u16*)(to + (lane + j * LANES) * 2) = (u16)rounded;
      }
    }
    mark(ATTEND, 1);
    together();
    float most[GROUP], sum[GROUP], values[GROUP][8];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      most[g] = NOTHING, sum[g] = 0;
#pragma unroll
      for (int k = 0; k < 8; ++k) values[g][k] = 0;
    }
    const u32 feature = lane % OF_POSITION * 32;
#pragma unroll 1
    for (int first = s.start; first < s.end; first += OF_SLOT) {
      const int count = s.end - first < OF_SLOT ? s.end - first : OF_SLOT;
      const u32 slot = base + turn.slot * SLOT;
      lanes::await(base + FULL + turn.slot * 8, turn.parity);
#pragma unroll 1
      for (int at = 0; at < count; at += WARPS * ABREAST) {
        const int row = at + own_row;
        const bool is_there = row < count, is_new = is_there && first + row == position, counts = is_there && mask > NOTHING;
        const float added = mask * LOG2_E;
        const int next = at + WARPS * ABREAST < count ? first + row + WARPS * ABREAST : first + OF_SLOT + own_row;
        mask = mask_of(s, next);
        float keys[8] = {}, cached[8] = {};
        if (is_new) {
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            const u32 its = given + GROUP * FEATURES * 4 + feature + k * 4;
            keys[k] = get_float(its), cached[k] = get_float(its + FEATURES * 4);
          }
        } else if (is_there) {
          u32 v[2][4];
          const u32 its = slot + row * (FEATURES * 2) + feature / 2;
          lanes::get128(its, v[0]), lanes::get128(its + OF_SLOT * FEATURES * 2, v[1]);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            keys[2 * k] = Element::low(v[0][k]), keys[2 * k + 1] = Element::high(v[0][k]);
            cached[2 * k] = Element::low(v[1][k]), cached[2 * k + 1] = Element::high(v[1][k]);
          }
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
          u32 q[2][4];
          lanes::get128(given + g * FEATURES * 4 + feature, q[0]), lanes::get128(given + g * FEATURES * 4 + feature + 16, q[1]);
          float score = 0;
#pragma unroll
          for (int k = 0; k < 8; ++k) score += keys[k] * ts::float_of(q[k / 4][k % 4]);
#pragma unroll
          for (int far = 1; far < OF_POSITION; far *= 2) score += lanes::across(score, far);
          score = counts ? score + added : NOTHING;
          const float now = score > most[g] ? score : most[g], before = ts::ex2(most[g] - now);
          const float weight = counts ? ts::ex2(score - now) : 0.0f;
          most[g] = now, sum[g] = sum[g] * before + weight;
#pragma unroll
          for (int k = 0; k < 8; ++k) values[g][k] = values[g][k] * before + weight * cached[k];
        }
      }
      free_slots(1);
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
    together();
    for (int i = thread; i < GROUP * FEATURES / 2; i += THREADS) {
      const int g = i / (FEATURES / 2), f = i % (FEATURES / 2) * 2, query = s.head * GROUP + g;
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
      const int row = s.share * BATCH + s.sequence;
      store_word(words(layer, ATTENDED) + row * (QUERY / 2) + spot(query * (FEATURES / 2) + f / 2), Element::pack(low * times, high * times), tag);
      if (f % 8 == 0 && SPLITS > 1)
        store_word(words(layer, SUMS) + (row * QUERY + query * FEATURES + f) / 8, ts::bits_of(total > 0 ? largest + ts::lg2(total) : NOTHING), tag);
    }
  }

  // ---- what sums are added to: biases, and the residual, which whoever has a row keeps in fp32
  TS_DEV float* own(const Place& at) const { return p.rows + (long long)at.sequence * WIDTH + at.row; }
  TS_DEV static Pair bias(const char* of, int row) { return BIASED ? both(of, row) : Pair{0, 0}; }
  TS_DEV Pair residual(const Place& at, bool is_first) const {
    if (is_first) return both(p.row, (long long)at.sequence * WIDTH + at.row);
    return {lanes::load_shared(own(at)), lanes::load_shared(own(at) + 1)};
  }
  TS_DEV void hand_over(int layer, int part, int width, const Place& at, Pair v, u32 tag) const {
    store_word(words(layer, part) + at.sequence * width / 2 + spot(at.row / 2), Element::pack(v.a, v.b), tag);
  }
  TS_DEV void keep(const Place& at, Pair v) const { lanes::store_shared(own(at), v.a), lanes::store_shared(own(at) + 1, v.b); }

  // ---- the whole
  TS_DEV void begin() {
    tag = p.epochs[block];
    for (int s = warp; s < BATCH; s += WARPS) {  // positions that count: behind the last of them the cache is not read
      int last = POSITIONS;
#if MASKED
      last = 0;
      for (int n = lane; n < POSITIONS; n += LANES)
        if (single(p.mask, s * p.mask_step + n) > NOTHING) last = n + 1;
#pragma unroll
      for (int far = 16; far; far >>= 1) {
        const int other = (int)lanes::across((float)last, far);
        last = other > last ? other : last;
      }
#endif
      if (lane == 0) lanes::put32(base + LIMITS + s * 4, last > 1 ? last : 1);
    }
    lanes::together();
    if (lane == 0) lanes::arrive(base + LIMITS_THERE);
  }
  TS_DEV void run() {
#pragma unroll 1
    for (; layer < LAYERS; ++layer) {
      ++tag;
      const StepLayer& l = p.layers[layer];
      const long long position = (long long)lanes::peek((const u64*)l.length);
      products<PROJECT>(
          [&](const Place& at) {
            int row;
            const char* const of = of_three(at.tile, l.query_bias, l.key_bias, l.value_bias, row);
            return bias(of, row + at.row % TILE);
          },
          [&](const Place& at, Pair v, Pair) {
            u64* const to = words(layer, PROJECTED) + (at.sequence * KEY_HEADS + head_of(at.tile)) * OF_HEAD + within(at.tile) + at.row % TILE;
            store_word(to, ts::bits_of(v.a), tag), store_word(to + 1, ts::bits_of(v.b), tag);
          });
      attend(position);
      products<OUTPUT>([&](const Place& at) { return residual(at, layer == 0) + bias(l.output_bias, at.row); },
                       [&](const Place& at, Pair v, Pair) { keep(at, v), hand_over(layer, MIDDLE, WIDTH, at, v, tag); });
      products<GATE>([&](const Place& at) { return bias(l.gate_bias, at.row); },
                     [&](const Place& at, Pair v, Pair up) {
                       v = GATED ? Pair{ts::silu(v.a) * up.a, ts::silu(v.b) * up.b} : Pair{ts::gelu_tanh(v.a), ts::gelu_tanh(v.b)};
                       hand_over(layer, GATED_ROW, HIDDEN, at, v, tag);
                     });
      products<DOWN>([&](const Place& at) { return residual(at, false) + bias(l.down_bias, at.row); },
                     [&](const Place& at, Pair v, Pair) { keep(at, v), hand_over(layer + 1, ROW, WIDTH, at, v, tag + 1); });
    }
    ++tag;
    products<HEAD>([](const Place&) { return Pair{0, 0}; },
                   [&](const Place& at, Pair v, Pair) {
                     const u32 logits = Element::pack(v.a, v.b);
                     u16* const to = (u16*)p.out + (long long)at.sequence * VOCABULARY + at.row;
                     if (at.row < VOCABULARY) to[0] = (u16)logits;
                     if (at.row + 1 < VOCABULARY) to[1] = (u16)(logits >> 16);
                   });
    if (thread == 0) p.epochs[block] = tag;
    // Whoever read a length has done its part of what this CTA was waiting for.
    if (p.counted && block == 0)
      for (int n = thread; n < LAYERS; n += THREADS) {
        u64* const length = (u64*)p.layers[n].length;
        lanes::post(length, lanes::peek(length) + 1);
      }
  }
};

TS_LANES_KERNEL(THREADS + LANES, 1) tilestream_step(const TS_PARAM StepParams p) {
  TS_LANES_SHARED(base);
  for (int slot = lanes::thread(); slot < SLOTS; slot += THREADS + LANES)
    lanes::begin_bar(base + FULL + slot * 8, LANES), lanes::begin_bar(base + FREE + slot * 8, WARPS);
  if (lanes::thread() == 0) lanes::begin_bar(base + LIMITS_THERE, WARPS);
  lanes::all_together();
  if (lanes::warp() == WARPS) {
    Loader(p, base).run();
  } else {
    Step step(p, base);
    step.begin();
    step.run();
  }
}
