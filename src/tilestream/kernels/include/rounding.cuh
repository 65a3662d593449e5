// The dtypes of tiles: rounding to them and back. A pair is two neighbouring columns, the left one in the low half.
#pragma once

namespace ts {

struct bf16 {
  static constexpr int BYTES = 2;
  static TS_DEV u32 pack(float a, float b) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
  }
  static TS_DEV float low(u32 v) { return __uint_as_float(v << 16); }
  static TS_DEV float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
  static TS_DEV u32 larger(u32 a, u32 b) {  // of each half; NaN where either is
    u32 r;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
};
struct f16 {
  static constexpr int BYTES = 2;
  static TS_DEV u32 pack(float a, float b) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
  }
  static TS_DEV float low(u32 v) {
    float f;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(f) : "r"(v));
    return f;
  }
  static TS_DEV float high(u32 v) {
    float f;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, h;\n}" : "=f"(f) : "r"(v));
    return f;
  }
  static TS_DEV u32 larger(u32 a, u32 b) {
    u32 r;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
};
struct f32 {
  static constexpr int BYTES = 4;
  // What a tf32 product keeps of it; the products truncate, so rounding here halves their error.
  static TS_DEV float to_tf32(float x) {
    u32 r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return __uint_as_float(r);
  }
  // As bulk copies round it on their way: ties to even.
  static TS_DEV float to_tf32_as_copied(float x) {
    u32 r;
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return __uint_as_float(r);
  }
};

}  // namespace ts
