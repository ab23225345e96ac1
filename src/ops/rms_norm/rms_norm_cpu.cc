#include "ops/rms_norm/rms_norm_cpu.h"

#include <algorithm>

#include "device/cpu/isa.h"

namespace fathom::cpu {
namespace {

// Below this many values a parallel region (0.5 to 1 us) costs more than it saves.
constexpr int64_t kParallelValues = 16 * 1024;

[[gnu::always_inline]] inline void store(float value, float& out) { out = value; }
[[gnu::always_inline]] inline void store(float value, bf16& out) { out = to_bf16(value); }

template <typename In, typename Out>
using NormRow = void (*)(const In* x, const float* weight, int64_t n, float eps, Out* out);

template <typename In, typename Out>
[[gnu::always_inline]] inline void norm_row(const In* x, const float* weight, int64_t n, float eps,
                                            Out* out) {
  const float scale = inverse_rms(x, n, eps);
  for (int64_t i = 0; i < n; ++i) store(weight[i] * (to_float(x[i]) * scale), out[i]);
}

template <typename In, typename Out>
void norm_row_portable(const In* x, const float* weight, int64_t n, float eps, Out* out) {
  norm_row(x, weight, n, eps, out);
}

template <typename In, typename Out>
FATHOM_FOR_AVX512 void norm_row_avx512(const In* x, const float* weight, int64_t n, float eps,
                                       Out* out) {
  norm_row(x, weight, n, eps, out);
}

template <typename In, typename Out>
void norm_rows(ThreadPool& pool, ConstTensorView x, ConstTensorView weight, float eps,
               TensorView out) {
  const int64_t n = x.size(1);
  const float* w = weight.data<float>();
  const int64_t grain = std::max<int64_t>(1, kParallelValues / n);
  const NormRow<In, Out> row_kernel =
      cpu_isa() >= CpuIsa::kAvx512 ? norm_row_avx512<In, Out> : norm_row_portable<In, Out>;
  pool.parallel_for(x.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      row_kernel(x.row<In>(row), w, n, eps, out.row<Out>(row));
    }
  });
}

}  // namespace

void rms_norm(ThreadPool& pool, ConstTensorView x, ConstTensorView weight, float eps,
              TensorView out) {
  const bool wide_in = x.dtype() == DType::kF32;
  const bool wide_out = out.dtype() == DType::kF32;
  if (wide_in && wide_out) return norm_rows<float, float>(pool, x, weight, eps, out);
  if (wide_in) return norm_rows<float, bf16>(pool, x, weight, eps, out);
  if (wide_out) return norm_rows<bf16, float>(pool, x, weight, eps, out);
  norm_rows<bf16, bf16>(pool, x, weight, eps, out);
}

}  // namespace fathom::cpu
