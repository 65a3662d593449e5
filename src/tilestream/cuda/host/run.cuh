// The host program around one generated kernel. build.py appends TS_MAIN(name) to the kernel's text.
//
// Its file starts with the kernel's argument, byte for byte as the device gets it. Addresses in it that have 1 in their top
// byte are offsets into the file.
#pragma once

namespace ts_host {

template <class P>
void fill(P& p, char* base) {
  __builtin_memcpy((void*)&p, base, sizeof p);
  for (u64* word = (u64*)&p; word < (u64*)(&p + 1); ++word)
    if (*word >> 56 == 1) *word += (u64)base - (1ull << 56);
}

// Room for the argument of a kernel.
template <class P>
P& argument_of(void (*)(P)) {
  static P made;
  return made;
}

}  // namespace ts_host

extern "C" double atof(const char*);
extern "C" long atol(const char*);

// Arguments: file, CTAs, CTAs a cluster, bytes of shared memory, launches, limit in seconds, seed of the engine's order,
// consumer warpgroups.
#define TS_MAIN(name)                                                                         \
  static void ts_body(const void* params) { name(*(decltype(&ts_host::argument_of(name)))params); } \
  int main(int, char** argv) {                                                                \
    u64 bytes = 0;                                                                            \
    char* base = (char*)ts_host::map_file(argv[1], bytes);                                    \
    auto& params = ts_host::argument_of(name);                                                \
    ts_host::fill(params, base);                                                              \
    const int ctas = (int)atol(argv[2]), cluster = (int)atol(argv[3]);                        \
    const ts_host::Launch launch = {ts_body, &params, ctas, cluster, (u32)atol(argv[4]),      \
                                    atof(argv[6]), (u64)atol(argv[7]), (int)atol(argv[8])};   \
    for (long k = 0; k < atol(argv[5]); ++k) ts_host::run(launch);                            \
    return 0;                                                                                 \
  }
