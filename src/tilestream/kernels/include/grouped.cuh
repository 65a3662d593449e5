// Convolution of groups of channels, of pictures whose channels lie last, by tensor cores; with a bias, a scale and a shift
// of each channel and an activation behind it, and sums of what it wrote.
//
// A CTA has OF_CTA channels of a tile of ROWS x COLUMNS output pixels. Their input pixels and the channels' weights lie in
// shared memory. A warp has OF_WARP channels of all these pixels: 16 pixels are the rows of a product, eight channels its
// columns, and the taps of a group, one behind the other in eights of channels, what is summed over. Two eights that are
// summed at once may be of two taps: each lane of ldmatrix names its own pixel, so that no group is too narrow. A group of
// fewer than eight channels is multiplied with its neighbours, whose weights are zeros.
//
// Compiled for DTYPE, CHANNELS, GROUP (channels of one, in and out), HEIGHT, WIDTH, KERNEL_Y, KERNEL_X, STRIDE, PAD_Y, PAD_X,
// OUT_HEIGHT, OUT_WIDTH; ROWS, COLUMNS of a tile; OF_WARP channels, WARPS, AT_ONCE (times 16 pixels), RESIDENT CTAs of an SM;
// SCALED, POOLED, ACTIVATION; behind DepthwiseParams (depthwise.py).
#pragma once
#include "channels.cuh"

constexpr int OF_CTA = OF_WARP * WARPS, PARTS = CHANNELS / OF_CTA, THREADS = 32 * WARPS, TAPS = KERNEL_Y * KERNEL_X;
constexpr int WIDE = GROUP < 8 ? 8 : GROUP, EIGHTS = TAPS * WIDE / 8, FOURS = (EIGHTS + 3) / 4;  // of channels, summed over
constexpr int DOWN = (OUT_HEIGHT + ROWS - 1) / ROWS, ACROSS = (OUT_WIDTH + COLUMNS - 1) / COLUMNS, MADE = ROWS * COLUMNS;
constexpr int IN_ROWS = (ROWS - 1) * STRIDE + KERNEL_Y, IN_COLUMNS = (COLUMNS - 1) * STRIDE + KERNEL_X;
constexpr int COLUMNS_OF_WARP = OF_WARP / 8, ALL = (MADE + 15) / 16;
// Odd numbers of 16 bytes: eight rows of ldmatrix meet no bank twice.
constexpr u32 PIXEL = (OF_CTA / 8 | 1) * 16, WEIGHT = FOURS * 64 + 16;
constexpr u32 PIXELS = OF_CTA * WEIGHT, ZEROS = PIXELS + IN_ROWS * IN_COLUMNS * PIXEL;
static_assert(CHANNELS % OF_CTA == 0 && OF_CTA % WIDE == 0 && WIDE % OF_WARP == 0);
static_assert(ZEROS + 16 == SHARED_BYTES && OF_WARP % 8 == 0);

using Element = ts::DTYPE;

// Weights [channel, tap, channel of its group], zeros behind.
TS_DEV void load_weights(u32 base, const char* from) {
  constexpr int PIECES = FOURS * 4;
  for (int item = lanes::thread(); item < OF_CTA * PIECES; item += THREADS) {
    const int channel = item / PIECES, piece = item % PIECES;
    const u32 to = base + channel * WEIGHT + piece * 16;
    if constexpr (GROUP >= 8) {
      const bool there = piece < EIGHTS;
      lanes::copy128(to, there ? from + ((long long)channel * EIGHTS + piece) * 16 : from, there ? 16 : 0);
    } else {
      u32 words[2] = {0, 0};
      if (piece < EIGHTS) lanes::load_words<2 * GROUP>(from + ((long long)channel * TAPS + piece) * 2 * GROUP, words);
#pragma unroll
      for (int k = 0; k < 4; ++k) lanes::put32(to + 4 * k, k / (GROUP / 2) == channel % 8 / GROUP ? words[k % (GROUP / 2)] : 0u);
    }
  }
}

TS_DEV void load_pixels(u32 base, const char* picture, int from_y, int from_x) {
  constexpr int PIECES = OF_CTA / 8;
  for (int item = lanes::thread(); item < IN_ROWS * IN_COLUMNS * PIECES; item += THREADS) {
    const int pixel = item / PIECES, y = from_y + pixel / IN_COLUMNS, x = from_x + pixel % IN_COLUMNS;
    const bool there = (u32)y < HEIGHT && (u32)x < WIDTH;
    const char* const from = picture + ((long long)y * WIDTH + x) * CHANNELS * 2 + item % PIECES * 16;
    lanes::copy128(base + PIXELS + pixel * PIXEL + item % PIECES * 16, there ? from : picture, there ? 16 : 0);
  }
}

// Where an eighth of what is summed over lies, from an output pixel's first input pixel on.
TS_DEV constexpr u32 place(int eighth) {
  const int tap = eighth / (WIDE / 8);
  return (tap / KERNEL_X * IN_COLUMNS + tap % KERNEL_X) * PIXEL + eighth % (WIDE / 8) * 16;
}

// Sums of AT_ONCE times 16 pixels from `first` on, by the channels of this warp.
TS_DEV void multiply(u32 base, int first, float (&sums)[AT_ONCE][COLUMNS_OF_WARP][4]) {
  const int lane = lanes::lane(), channel = lanes::warp() * OF_WARP;
  u32 pixels[AT_ONCE];
#pragma unroll
  for (int i = 0; i < AT_ONCE; ++i) {
    const int n = first + 16 * i + lane % 16, made = n < MADE ? n : MADE - 1;
    pixels[i] = base + PIXELS + (made / COLUMNS * IN_COLUMNS + made % COLUMNS) * STRIDE * PIXEL + channel / WIDE * WIDE * 2;
  }
  const u32 weights = base + (channel + lane % 8) * WEIGHT + lane / 8 * 16;
#pragma unroll
  for (int four = 0; four < FOURS; ++four) {
    u32 b[COLUMNS_OF_WARP][4];
#pragma unroll
    for (int j = 0; j < COLUMNS_OF_WARP; ++j) lanes::matrices(b[j], weights + j * 8 * WEIGHT + four * 64);
#pragma unroll
    for (int k = 4 * four; k < 4 * four + 4 && k < EIGHTS; k += 2) {
      const u32 by = lane < 16 ? place(k) : place(k + 1 < EIGHTS ? k + 1 : k);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        u32 a[4];
        lanes::matrices(a, k + 1 < EIGHTS || lane < 16 ? pixels[i] + by : base + ZEROS);
#pragma unroll
        for (int j = 0; j < COLUMNS_OF_WARP; ++j) lanes::product<Element>(sums[i][j], a, b[j][k % 4], b[j][k % 4 + 1]);
      }
    }
  }
}

TS_LANES_KERNEL(THREADS, RESIDENT) tilestream_grouped(const TS_PARAM DepthwiseParams p) {
  TS_LANES_SHARED(base);
  const int lane = lanes::lane(), start = lanes::block() % PARTS * OF_CTA;
  const int channel = start + lanes::warp() * OF_WARP + lane % 4 * 2;  // the first of this lane
  load_weights(base, p.weight + (long long)start * TAPS * GROUP * 2);
  if (lanes::thread() < 4) lanes::put32(base + ZEROS + 4 * lanes::thread(), 0);
  const int tiles = p.images * DOWN * ACROSS;
  for (int tile = lanes::block() / PARTS; tile < tiles; tile += lanes::blocks() / PARTS) {
    const int image = tile / (DOWN * ACROSS), y = tile % DOWN * ROWS, x = tile / DOWN % ACROSS * COLUMNS;
    const char* const picture = p.x + ((long long)image * HEIGHT * WIDTH * CHANNELS + start) * 2;
    load_pixels(base, picture, y * STRIDE - PAD_Y, x * STRIDE - PAD_X);
    lanes::copies_here();
    lanes::all_together();
    char* const to = p.out + ((((long long)image * OUT_HEIGHT + y) * OUT_WIDTH + x) * CHANNELS + channel) * 2;
    float total[COLUMNS_OF_WARP][2];
#pragma unroll
    for (int j = 0; j < COLUMNS_OF_WARP; ++j) total[j][0] = total[j][1] = 0;
#pragma unroll 1
    for (int first = 0; first < MADE; first += 16 * AT_ONCE) {
      float sums[AT_ONCE][COLUMNS_OF_WARP][4];
#pragma unroll
      for (int j = 0; j < COLUMNS_OF_WARP; ++j) {
        u32 given = 0;
        if (p.bias) lanes::load_words<4>(p.bias + (channel + 8 * j) * 2, &given);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[i][j][e] = e % 2 ? Element::high(given) : Element::low(given);
      }
      multiply(base, first, sums);
#pragma unroll
      for (int j = 0; j < COLUMNS_OF_WARP; ++j) {
        float scale[2] = {1, 1}, shift[2] = {0, 0};
        if constexpr (SCALED) two_floats(p.scale + channel + 8 * j, scale), two_floats(p.shift + channel + 8 * j, shift);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int n = first + 16 * i + 8 * half + lane / 4, r = n / COLUMNS, c = n % COLUMNS;
            if (n >= MADE || y + r >= OUT_HEIGHT || x + c >= OUT_WIDTH) continue;
            float v[2] = {sums[i][j][2 * half], sums[i][j][2 * half + 1]};
            if constexpr (SCALED) v[0] = ts::fma_(v[0], scale[0], shift[0]), v[1] = ts::fma_(v[1], scale[1], shift[1]);
            activate(v);
            lanes::store32(to + ((r * OUT_WIDTH + c) * CHANNELS + 8 * j) * 2, Element::pack(v[0], v[1]));
            if constexpr (POOLED) total[j][0] += v[0], total[j][1] += v[1];
          }
      }
    }
    if constexpr (POOLED) {
#pragma unroll
      for (int j = 0; j < COLUMNS_OF_WARP; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
          for (int far = 4; far < 32; far *= 2) total[j][e] += lanes::across(total[j][e], far);
        const u32 words[2] = {ts::bits_of(total[j][0]), ts::bits_of(total[j][1])};
        if (lane < 4) lanes::store_words<8>(p.pooled + (long long)tile * CHANNELS + channel + 8 * j, words);
      }
    }
    lanes::all_together();  // the next tile's pixels take the place of these
  }
}
