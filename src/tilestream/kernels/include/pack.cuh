// Weights that TMA cannot address (rows of no multiple of 16 bytes) or whose segments need padding,
// copied into an arena before the main kernel: one launch for all, the same stream, every call, so
// that a replayed graph sees the weights of that moment.
#pragma once

// PackEntry and PackParams stand in front of this (pack.py).

template <class E>
__device__ void pack_segment(const PackEntry& e) {
  const E* source = (const E*)e.source;
  E* target = (E*)e.target;
  for (int k = blockIdx.x * blockDim.x + threadIdx.x; k < e.rows * e.padded; k += gridDim.x * blockDim.x) {
    int r = k / e.padded, c = k % e.padded;
    target[(long long)r * e.target_stride + e.target_column + c] =
        c < e.columns ? source[(long long)r * e.source_stride + e.source_column + c] : (E)0;
  }
}

extern "C" __global__ void __launch_bounds__(256) tilestream_pack(const __grid_constant__ PackParams p) {
  const PackEntry& e = p.entries[blockIdx.y];
  if (e.element_bytes == 2)
    pack_segment<unsigned short>(e);
  else
    pack_segment<unsigned int>(e);
}
