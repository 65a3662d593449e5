// Two layers over the tokens of an image, as MLP-Mixer has them: out = residual + W2 act(W1 norm(x) + b1) + b2, each of
// [tokens, channels], for every channel by itself. Nothing is transposed in memory.
//
// A CTA has 128 channels of an image, two consumer warpgroups of 64. Channels are the rows of both products: the image is
// the left operand as it lies, [depth, rows]; weights are right operands, [columns, depth]. The hidden layer, 64 at a
// time, goes from the accumulators of the first product through its epilogue into the left operand of the second, and
// leaves no register. Sums of all tokens stay in registers, so there are at most 256.
//
// The norm is over an image's channels, of which a CTA has a part: the CTAs of an image are a cluster, which exchange the
// mean and the squared deviations of each token's 64 channels (Chan, Golub and LeVeque, 1979, has how they add up).
//
// The ring has two slots, each with two warps of its own that fill it: 64 rows of W1 and 64 columns of W2; the last one the
// residual, in whose place the result is left. W1's rows may start on 4 or 8 bytes, where no bulk copy can read them.
//
// Compiled for DTYPE, TOKENS, HIDDEN, CHANNELS; ACTIVATION, a function of math.cuh; NORMED, RESIDUAL; CLUSTER, the CTAs of an
// image if NORMED, else 1; PIECE, the bytes that W1's rows are copied by; behind TokenMixingParams (token_mixing.py).
#pragma once

namespace ts {

using Params = ::TokenMixingParams;
constexpr int GROUPS = 2, LOADER = 4 * GROUPS, LOADERS = 4, SLOTS = 2, HIDDEN_CHUNK = 64;
constexpr int CHUNKS = (HIDDEN + HIDDEN_CHUNK - 1) / HIDDEN_CHUNK, PARTS = (CHANNELS + 64 * GROUPS - 1) / (64 * GROUPS);
constexpr int DEPTH = (TOKENS + 15) / 16 * 16, TOKEN_BLOCKS = (TOKENS + 7) / 8;  // of the first product; of the second's columns
constexpr u32 IMAGE_BYTES = DEPTH * 128;                                          // of 64 channels
// A slot: W1's 64 rows in chunks of 64 tokens, W2's tokens behind them; or the residual of both warpgroups.
constexpr u32 FIRST_BYTES = (DEPTH + 63) / 64 * CHUNK_BYTES, SECOND_BYTES = TOKEN_BLOCKS * 1024;
constexpr u32 SLOT_BYTES = FIRST_BYTES + SECOND_BYTES > GROUPS * IMAGE_BYTES ? FIRST_BYTES + SECOND_BYTES : GROUPS * IMAGE_BYTES;
// Shared memory: the image, the ring, its barriers and that of the image, what each part of the cluster knows of each token.
constexpr u32 RING_AT = GROUPS * IMAGE_BYTES, BARS_AT = RING_AT + SLOTS * SLOT_BYTES, IMAGE_BAR = BARS_AT + 16 * SLOTS;
constexpr u32 KNOWN_AT = IMAGE_BAR + 16, KNOWN_BYTES = 8 * DEPTH;
constexpr u32 FULL_ARRIVALS = LOADERS / SLOTS + 1;  // each warp's that fills it, and that for what comes in bulk
constexpr int LOADER_KEEPS = 56, CONSUMER_KEEPS = 224;  // registers
static_assert(CHANNELS % 8 == 0 && HIDDEN % 8 == 0 && TOKENS * 2 % PIECE == 0 && TOKENS <= 256);
static_assert(!NORMED || (CLUSTER == PARTS && CLUSTER <= 8));

using SlotRing = Ring<SLOTS, (int)SLOT_BYTES>;
struct Place {
  int image, channel;  // of the CTA, its first
};
TS_DEV Place place_of(int cta) { return {cta / PARTS, cta % PARTS * 64 * GROUPS}; }
// Channels that 64 of them, the part `part` of an image, are.
TS_DEV int channels_of(int part) {
  const int left = CHANNELS - 64 * part;
  return left < 0 ? 0 : left < 64 ? left : 64;
}

// ---- the producers: four warps
TS_DEV void load_image(const TensorMap* map, const Place& at, u32 to, u32 bar) {
  bar_expect(bar, GROUPS * IMAGE_BYTES);
  for (int g = 0; g < GROUPS; ++g) tma_load_heads(to + g * IMAGE_BYTES, map, at.channel + 64 * g, 0, 0, at.image, bar);
}
// A warp's half of 64 rows of W1; zeros beyond its end.
TS_DEV void copy_rows(const char* w1, int chunk, int half, u32 to) {
  constexpr int PIECES = DEPTH * 2 / PIECE, PRESENT = TOKENS * 2 / PIECE;
  const int first = half * WARP + (int)lane_in_warp();
#pragma unroll 4
  for (int k = first; k < HIDDEN_CHUNK * PIECES; k += 2 * WARP) {
    const int row = k / PIECES, piece = k % PIECES, hidden = chunk * HIDDEN_CHUNK + row;
    const bool there = hidden < HIDDEN && piece < PRESENT;
    const u32 byte = piece * PIECE, line = to + byte / 128 * CHUNK_BYTES + row * 128;
    const char* const from = w1 + (there ? ((u64)hidden * TOKENS * 2 + byte) : 0);
    copy_async_of<PIECE>(line + (((byte / 16 & 7) ^ (row & 7)) << 4) + (byte & 15), from, there ? PIECE : 0);
  }
}
TS_DEV void load(const Params& p, const Place& at, u32 smem, int warp) {
  const int slot = warp / (LOADERS / SLOTS), half = warp % (LOADERS / SLOTS);
  const bool leads = lane_in_warp() == 0, leads_both = leads && half == 0;
  const u32 full = smem + BARS_AT + 16 * slot, to = smem + RING_AT + slot * SLOT_BYTES;
  if (warp == 0 && leads) load_image(&p.x, at, smem, smem + IMAGE_BAR);
  u32 parity = 1;
#pragma unroll 1
  for (int chunk = slot; chunk <= CHUNKS; chunk += SLOTS, parity ^= 1) {
    bar_wait(full + 8, parity);
    if (chunk < CHUNKS) {
      if (leads_both) {
        bar_expect(full, SECOND_BYTES);
        tma_load(to + FIRST_BYTES, &p.w2, chunk * HIDDEN_CHUNK, 0, full, EVICT_LAST);
      }
      copy_rows(p.w1, chunk, half, to);
      copies_wait();
      fence_async_shared();
    } else if (leads_both) {
      if (RESIDUAL)
        load_image(&p.residual, at, to, full);
      else
        bar_arrive(full);
    }
    sync_warp();
    if (leads) bar_arrive(full);
    if (CLUSTER > 1 && chunk == slot) cluster_sync();
  }
}

// ---- a consumer warpgroup
// Address of 16 bytes, 8 channels, of a token.
TS_DEV u32 eight_of(u32 image, u32 token, u32 piece) { return image + token * 128 + ((piece ^ (token & 7)) << 4); }
TS_DEV void eight_floats(u32 from, float (&v)[8]) {
  u32 words[4];
  lds_words(from, words);
#pragma unroll
  for (int k = 0; k < 4; ++k) v[2 * k] = DTYPE::low(words[k]), v[2 * k + 1] = DTYPE::high(words[k]);
}
// The mean and the squared deviations of a token's channels, of those that the warpgroup has.
TS_DEV void know(u32 image, u32 token, int channels, float& mean, float& square) {
  float sum = 0.0f, v[8];
  square = 0.0f;
  for (int k = 0; k < channels / 8; ++k) {
    eight_floats(eight_of(image, token, k), v);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += v[e];
  }
  mean = channels ? quotient(sum, (float)channels) : 0.0f;
  for (int k = 0; k < channels / 8; ++k) {
    eight_floats(eight_of(image, token, k), v);
#pragma unroll
    for (int e = 0; e < 8; ++e) square = fma_(v[e] - mean, v[e] - mean, square);
  }
}
TS_DEV void normalise(const Params& p, u32 image, u32 known, u32 token, int channel, int channels) {
  float mean = 0.0f, square = 0.0f, all = 0.0f;
#pragma unroll 1
  for (int part = 0; part < PARTS * GROUPS; ++part) {
    float m, s;
    lds64(known + part * KNOWN_BYTES + 8 * token, m, s);
    const float n = (float)channels_of(part), both = all + n, far = m - mean;
    if (n == 0.0f) break;
    mean = fma_(far, quotient(n, both), mean);
    square += fma_(far * far, quotient(all * n, both), s);
    all = both;
  }
  const float over = rsq(fma_(square, 1.0f / CHANNELS, p.eps)), shift = -mean * over;
#pragma unroll 2
  for (int k = 0; k < channels / 8; ++k) {
    const u32 at = eight_of(image, token, k);
    float v[8];
    u32 words[4];
    eight_floats(at, v);
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      float g[2] = {1.0f, 1.0f}, b[2] = {};
      if (p.gamma) Io<DTYPE>::param2(p.gamma, channel + 8 * k + e, g[0], g[1]);
      if (p.beta) Io<DTYPE>::param2(p.beta, channel + 8 * k + e, b[0], b[1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) v[e + i] = fma_(fma_(v[e + i], over, shift), g[i], b[i]);
      words[e / 2] = DTYPE::pack(v[e], v[e + 1]);
    }
    sts_words(at, words);
  }
}
TS_DEV void norm(const Params& p, const Place& at, u32 smem, int g) {
  const u32 image = smem + g * IMAGE_BYTES, known = smem + KNOWN_AT;
  const int channels = channels_of(at.channel / 64 + g);
  const u32 mine = known + (at.channel / 64 + g) * KNOWN_BYTES;
  TS_LANES {
    const u32 t = TS_LANE;
    if (2 * t < TOKENS) {
      float a, b, c, d;
      know(image, 2 * t, channels, a, b);
      know(image, 2 * t + 1, channels, c, d);  // zeros behind an odd last one
      for (int rank = 0; rank < CLUSTER; ++rank) store_at_peer(at_peer(mine + 16 * t, rank), a, b, c, d);
    }
  }
  if (CLUSTER > 1)
    cluster_sync();
  else
    named_sync(BOTH_GROUPS, 128 * GROUPS);
  TS_LANES {
    for (u32 token = TS_LANE; token < TOKENS; token += 128) normalise(p, image, known, token, at.channel + 64 * g, channels);
  }
  fence_async_shared();
  named_sync(GROUP_BARRIER + g, 128);
}

using Hidden = Fragment<HIDDEN_CHUNK / 8>;
using Sums = Fragment<TOKEN_BLOCKS>;
TS_DEV void first_product(Hidden& h, u32 image, u32 w1) {
  const u64 a = mma_desc_columns(image, IMAGE_BYTES), b = mma_desc(w1);
  clear(h);
  mma_fence();
#pragma unroll
  for (int k = 0; k < DEPTH / 16; ++k)
    MmaColumns<DTYPE, HIDDEN_CHUNK / 8, false>::shared(h, a + 128 * k, b + (k / 4) * (CHUNK_BYTES / 16) + 2 * (k % 4));
  mma_commit();
}
TS_DEV void activate(const Params& p, Packed<HIDDEN_CHUNK / 8>& packed, const Hidden& h, int chunk) {
  TS_LANES {
    const u32 t = TS_LANE;
#pragma unroll
    for (int i = 0; i < HIDDEN_CHUNK / 8; ++i) {
      const int first = chunk * HIDDEN_CHUNK + col_of(t, i);
      float b[2] = {};
      if (p.b1 && first < HIDDEN) Io<DTYPE>::param2(p.b1, first, b[0], b[1]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float v[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) v[e] = ACTIVATION(TS_REG(h, 4 * i + 2 * j + e) + b[e]);
        TS_REG(packed, 2 * i + j) = DTYPE::pack(v[0], v[1]);
      }
    }
  }
}
TS_DEV void second_product(Sums& out, const Packed<HIDDEN_CHUNK / 8>& h, u32 w2) {
  const u64 b = mma_desc(w2);
  mma_fence();
#pragma unroll
  for (int k = 0; k < HIDDEN_CHUNK / 16; ++k) Mma<DTYPE, TOKEN_BLOCKS, 0>::registers(out, h, 4 * k, b + 2 * k);
  mma_commit();
}
// The result, in the place of the residual, and from there to memory: a lane's sums are of two channels.
TS_DEV void store_result(const Params& p, const Place& at, u32 image, int g, Sums& out) {
  TS_LANES {
    const u32 t = TS_LANE;
#pragma unroll
    for (int i = 0; i < TOKEN_BLOCKS; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = col_of(t, i) + e;
        if (TOKENS % 8 && token >= TOKENS) continue;
        const float bias = p.b2 ? Io<DTYPE>::param(p.b2, token) : 0.0f;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const u32 channel = row_of(t, j), addr = eight_of(image, token, channel / 8) + channel % 8 * 2;
          const float v = TS_REG(out, 4 * i + 2 * j + e) + bias;
          Io<DTYPE>::store1(addr, RESIDUAL ? v + Io<DTYPE>::load1(addr) : v);
        }
      }
  }
  fence_async_shared();
  named_sync(GROUP_BARRIER + g, 128);
  if (!group_leader() || at.channel + 64 * g >= CHANNELS) return;
  tma_store_heads(&p.out, at.channel + 64 * g, 0, 0, at.image, image);
  store_commit();
  store_wait_read<0>();
}
TS_DEV void mix(const Params& p, const Place& at, u32 smem, int g) {
  SlotRing ring(smem + BARS_AT, smem + RING_AT);
  const u32 image = smem + g * IMAGE_BYTES;
  Sums out;
  clear(out);
  bar_wait(smem + IMAGE_BAR, 0);
  if (NORMED) norm(p, at, smem, g);
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    const u32 slot = ring.take();
    Hidden h;
    Packed<HIDDEN_CHUNK / 8> packed;
    first_product(h, image, slot);
    mma_wait<0>();
    pin(h);
    activate(p, packed, h, chunk);
    pin(packed);
    pin(out);
    second_product(out, packed, slot + FIRST_BYTES);
    mma_wait<0>();
    pin(out);
    ring.release();
    ring.advance();
  }
  const u32 residual = ring.take();
  store_result(p, at, residual + g * IMAGE_BYTES, g, out);
}

TS_DEV void token_mixing(const Params& p, u32 smem) {
  const int warp = warp_index();
  const Place at = place_of(cta_index());
  if (cta_leader()) {
    for (int i = 0; i < SLOTS; ++i) {
      bar_init(smem + BARS_AT + 16 * i, FULL_ARRIVALS);
      bar_init(smem + BARS_AT + 16 * i + 8, 4 * GROUPS);  // one a warp
    }
    bar_init(smem + IMAGE_BAR, 1);
    bar_init_done();
  }
  sync_cta();
  if (CLUSTER > 1) cluster_sync();  // nobody writes to a CTA that has not begun
  if (warp < LOADER) {
    registers_inc<CONSUMER_KEEPS>();
    mix(p, at, smem, warp / 4);
  } else {
    registers_dec<LOADER_KEEPS>();
    load(p, at, smem, warp - LOADER);
  }
}

}  // namespace ts

TS_CLUSTER_KERNEL(32 * (ts::LOADER + ts::LOADERS), CLUSTER) tilestream_token_mixing(const TS_PARAM TokenMixingParams p) {
  TS_SHARED(smem);
  ts::token_mixing(p, smem);
}
