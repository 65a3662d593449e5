// The host program around one generated kernel. build.py appends TS_MAIN(name) to the kernel's text.
//
// Its file starts with words of 64 bits: count of maps, MAP_WORDS for each; count of pointers, address and
// stride for each; flags, epoch, exits, dump, limit in nanoseconds, rows; of a kernel
// with stamps, their address and room; of stationary sums, the address of partial sums. Addresses are offsets into the file.
// Kernels whose Params have no `maps` find them there as bytes.
#pragma once

namespace ts_host {

template <class P>
void fill_words(P& p, const u64* words, char* base) {
  int maps = (int)*words++;
  for (int k = 0; k < maps; ++k, words += MAP_WORDS) {
    for (int j = 0; j < MAP_WORDS; ++j) p.maps[k].opaque[j] = words[j];
    p.maps[k].opaque[0] += (u64)base;
  }
  int pointers = (int)*words++;
  for (int k = 0; k < pointers; ++k, words += 2) {
    p.pointers[k] = base + words[0];
    p.strides[k] = (long long)words[1];
  }
  p.flags = (u64*)(base + words[0]);
  if constexpr (requires { p.epoch; }) {
    p.epoch = (u64*)(base + words[1]);
    p.exits = (u32*)(base + words[2]);
  }
  p.dump = (decltype(p.dump))(base + words[3]);
  p.limit_ns = words[4];
  p.rows = (int)words[5];
  if constexpr (requires { p.partials; }) p.partials = (float*)(base + words[6]);
#ifdef TS_STAMPS
  p.stamps = base + words[6];
  p.stamp_capacity = (int)words[7];
#endif
}

template <class P>
void fill(P& p, const u64* words, char* base) {
  if constexpr (!requires { p.maps; }) {  // as the device gets it; 1 in an address's top byte says that it is one of the file
    __builtin_memcpy((void*)&p, words, sizeof p);
    for (u64* word = (u64*)&p; word != (u64*)(&p + 1); ++word)
      if (*word >> 56 == 1) *word += (u64)base - (1ull << 56);
  } else {
    fill_words(p, words, base);
  }
}

}  // namespace ts_host

extern "C" double atof(const char*);
extern "C" long atol(const char*);

// Arguments: file, CTAs, CTAs a cluster, bytes of shared memory, launches, limit in seconds, seed of the engine's order,
// consumer warpgroups.
#define TS_MAIN(name)                                                                         \
  static void ts_body(const void* params) { name(*(const ts::Params*)params); }               \
  int main(int, char** argv) {                                                                \
    u64 bytes = 0;                                                                            \
    char* base = (char*)ts_host::map_file(argv[1], bytes);                                    \
    static ts::Params params;                                                                 \
    ts_host::fill(params, (const u64*)base, base);                                            \
    const int ctas = (int)atol(argv[2]), cluster = (int)atol(argv[3]);                        \
    const ts_host::Launch launch = {ts_body, &params, ctas, cluster, (u32)atol(argv[4]),      \
                                    atof(argv[6]), (u64)atol(argv[7]), (int)atol(argv[8])};   \
    for (long k = 0; k < atol(argv[5]); ++k) ts_host::run(launch);                            \
    return 0;                                                                                 \
  }
