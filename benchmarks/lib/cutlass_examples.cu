// CUTLASS's examples 13 (two products behind each other in one kernel) and 45 (two products of one input) at the shapes
// of FlashFuser's workloads, for benchmarks/lib/cutlass_examples.py. Their templates, of sm_80, are in the examples' own
// folders, which the wheel nvidia-cutlass has; here are tiles and operands alone.
#include <cuda_runtime.h>

#include "13_two_tensor_op_fusion/device/b2b_gemm.h"
#include "45_dual_gemm/device/dual_gemm.h"
#include "45_dual_gemm/thread/left_silu_and_mul.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/epilogue/thread/linear_combination_relu.h"

using Half = cutlass::bfloat16_t;
using Rows = cutlass::layout::RowMajor;
using Columns = cutlass::layout::ColumnMajor;
using cutlass::gemm::GemmShape;
using cutlass::epilogue::thread::ScaleType;
using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<1>;
using Instruction = GemmShape<16, 8, 16>;

// y = relu(x W1^T) W2^T, a block of M rows with all of the middle's N = 512 columns and all of the result's 256.
template <int M, int WARP_M>
int back_to_back(int rows, int k, const void* x, const void* w1, const void* zeros, const void* w2, void* y, cudaStream_t stream) {
  using Relu = cutlass::epilogue::thread::LinearCombinationRelu<Half, Instruction::kM * Instruction::kN / 32, float, float, ScaleType::OnlyAlphaScaling>;
  using Store = cutlass::epilogue::thread::LinearCombination<Half, 8, float, float, ScaleType::OnlyAlphaScaling>;
  using Gemm = cutlass::gemm::device::B2bGemm<Half, Rows, Half, Columns, Half, Rows, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
                                              GemmShape<M, 512, 32>, GemmShape<M, 256, 32>, GemmShape<WARP_M, 64, 32>, GemmShape<WARP_M, 32, 32>,
                                              Instruction, Relu, Store, Swizzle, 3, true>;
  typename Gemm::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGemm,
                                     {rows, 512, k},
                                     {rows, 256, 512},
                                     {(Half*)x, k},
                                     {(Half*)w1, k},
                                     {(Half*)zeros, 0},
                                     {nullptr, 0},
                                     {(float*)zeros, 0},
                                     {(Half*)w2, 512},
                                     {(Half*)zeros, 0},
                                     {(Half*)y, 256},
                                     0, 0, 0, 0, 0, 0, 0,
                                     {1.0f},
                                     {1.0f}};
  if (Gemm::can_implement(arguments) != cutlass::Status::kSuccess) return 1;
  Gemm gemm;
  return gemm(arguments, nullptr, stream) != cutlass::Status::kSuccess;
}

// h = silu(x Wg^T) * (x Wu^T).
template <int M, int N, int WARP_M, int WARP_N>
int gated(int rows, int hid, int k, const void* x, const void* gate, const void* up, void* h, cudaStream_t stream) {
  using Store = cutlass::epilogue::thread::LinearCombination<Half, 8, float, float, ScaleType::Nothing>;
  using Gate = cutlass::epilogue::thread::LeftSiLUAndMul<Half, 8, Half, float>;
  using Gemm = cutlass::gemm::device::DualGemm<Half, Rows, Half, Columns, Columns, Half, Rows, float, cutlass::arch::OpClassTensorOp,
                                               cutlass::arch::Sm80, GemmShape<M, N, 32>, GemmShape<WARP_M, WARP_N, 32>, Instruction, Store, Store,
                                               Gate, Swizzle, 4, false, false, false>;
  using Ref = typename Gemm::TensorRefD;
  typename Gemm::Arguments arguments{cutlass::gemm::DualGemmMode::kGemm,
                                     {rows, hid, k},
                                     {(Half*)x, k},
                                     {(Half*)gate, k},
                                     Ref{nullptr, 0},
                                     Ref{nullptr, 0},
                                     {(Half*)up, k},
                                     Ref{nullptr, 0},
                                     Ref{nullptr, 0},
                                     {(Half*)h, hid},
                                     {},
                                     {},
                                     {},
                                     1};
  if (Gemm::can_implement(arguments) != cutlass::Status::kSuccess) return 1;
  Gemm gemm;
  if (gemm.initialize(arguments, nullptr, stream) != cutlass::Status::kSuccess) return 2;
  return gemm(stream) != cutlass::Status::kSuccess;
}

extern "C" int example_13(int rows, int k, const void* x, const void* w1, const void* zeros, const void* w2, void* y, void* stream) {
  return back_to_back<64, 64>(rows, k, x, w1, zeros, w2, y, (cudaStream_t)stream);  // fewer rows have too few copies for its threads
}

extern "C" int example_45(int tile, int rows, int hid, int k, const void* x, const void* gate, const void* up, void* h, void* stream) {
  return tile == 128 ? gated<128, 64, 64, 32>(rows, hid, k, x, gate, up, h, (cudaStream_t)stream)
                     : gated<64, 64, 32, 32>(rows, hid, k, x, gate, up, h, (cudaStream_t)stream);
}
