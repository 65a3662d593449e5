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
// SPLITS (of the cache), MASKED, ROTARY (features), NO_ROPE (a bit a layer), what a `Form` says (step/form.py: HEAD_NORMS, LAYER_NORMS, PLUS_ONE, ACTIVATION,
// GATED, BIASED (a bit a stage), TURNED (weights [inputs, outputs]), BY_HEADS, PARALLEL), WARPS (of a CTA, that multiply), SLOTS (of the ring), SLOT (bytes), CHUNK (most columns of a warp's piece), ATTENTION (bytes of its parts),
// BUFFERS (of sums), TIMEOUT (ns), DELAYS, STAMPS, behind StepParams (step/kernel.py).
#pragma once
#include "step_attention.cuh"

struct Step : Attention {
  using Attention::Attention;

  // ---- what sums are added to: biases, and the residual, which whoever has a row keeps in fp32
  TS_DEV float* own(const Place& at) const { return p.rows + (long long)at.sequence * WIDTH + at.row; }
  template <int STAGE>
  TS_DEV static Pair bias(const char* of, int row) {
    return is_biased(STAGE) ? both(of, row) : Pair{0, 0};
  }
  TS_DEV Pair residual(const Place& at, bool is_first) const {
    if (is_first) return both(p.row, (long long)at.sequence * WIDTH + at.row);
    return {lanes::load_shared(own(at)), lanes::load_shared(own(at) + 1)};
  }
  TS_DEV void hand_over(int layer, int part, int width, const Place& at, Pair v, u32 tag) const {
    store_word(words(layer, part) + at.sequence * width / 2 + spot(at.row / 2), Element::pack(v.a, v.b), tag);
  }
  TS_DEV static float activated(float v) {
    switch (ACTIVATION) {  // in the order of `ACTIVATIONS` (step/form.py)
      case 0: return ts::silu(v);
      case 1: return ts::gelu(v);
      case 2: return ts::gelu_tanh(v);
      case 3: return ts::relu(v);
      default: return ts::relu(v) * ts::relu(v);
    }
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
  TS_DEV void grow(const StepLayer& l) {
    products<GATE>([&](const Place& at) { return bias<GATE>(l.gate_bias, at.row); },
                   [&](const Place& at, Pair v, Pair up) {
                     v = {activated(v.a), activated(v.b)};
                     hand_over(layer, GATED_ROW, HIDDEN, at, GATED ? Pair{v.a * up.a, v.b * up.b} : v, tag);
                   });
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
            return bias<PROJECT>(of, row + at.row % TILE);
          },
          [&](const Place& at, Pair v, Pair) {
            u64* const to = words(layer, PROJECTED) + (at.sequence * KEY_HEADS + head_of(at.tile)) * OF_HEAD + within(at.tile) + at.row % TILE;
            store_word(to, ts::bits_of(v.a), tag), store_word(to + 1, ts::bits_of(v.b), tag);
          });
      if (PARALLEL) grow(l);
      attend(position);
      products<OUTPUT>([&](const Place& at) { return residual(at, layer == 0) + bias<OUTPUT>(l.output_bias, at.row) * p.times; },
                       [&](const Place& at, Pair v, Pair) {
                         keep(at, v);
                         if (!PARALLEL) hand_over(layer, MIDDLE, WIDTH, at, v, tag);
                       });
      if (!PARALLEL) grow(l);
      products<DOWN>([&](const Place& at) { return residual(at, false) + bias<DOWN>(l.down_bias, at.row) * p.times; },
                     [&](const Place& at, Pair v, Pair) { keep(at, v), hand_over(layer + 1, ROW, WIDTH, at, v, tag + 1); });
    }
    ++tag;
    products<HEAD>([&](const Place& at) {
                     if (is_biased(HEAD) && at.row == VOCABULARY - 1) return Pair{single(p.head_bias, at.row), 0};
                     return at.row < VOCABULARY ? bias<HEAD>(p.head_bias, at.row) : Pair{0, 0};
                   },
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
