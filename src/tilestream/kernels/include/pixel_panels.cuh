// Left operands of a shared tile that are pixels at the taps of a convolution: copied in the im2col mode, which walks over
// output pixels by itself. K has the window of TAPS: TAPS_ACROSS in a row of it, TAP_Y and TAP_X pixels apart, and where the first
// output pixel reads, LOWEST_Y and LOWEST_X.
#pragma once

namespace ts {

// Where the box of a tile's pixels begins.
struct FirstPixel {
  int x, y, image;
};
template <class K>
TS_DEV FirstPixel first_pixel(int row) {
  const int line = row / K::OUT_WIDTH, image = line / K::OUT_HEIGHT;
  return {(row - line * K::OUT_WIDTH) * K::STRIDE_X + K::LOWEST_X, (line - image * K::OUT_HEIGHT) * K::STRIDE_Y + K::LOWEST_Y, image};
}

// Panels of 64 columns from column x on, each of one tap; as many rows as a tile has, whatever of them exists.
template <class K>
TS_DEV void load_pixel_panels(u32 dst, const TensorMap* map, const FirstPixel& at, int x, u32 bar) {
#pragma unroll
  for (int h = 0; h < K::DEPTH / 64; ++h, x += 64) {
    const int tap = x / K::CHANNELS, down = tap / K::TAPS_ACROSS;
    tma_load_pixels(dst + h * K::ROWS * 128, map, x - tap * K::CHANNELS, at.x, at.y, at.image, (u16)((tap - down * K::TAPS_ACROSS) * K::TAP_X),
                    (u16)(down * K::TAP_Y), bar, EVICT_NORMAL);
  }
}

}  // namespace ts
