#include "ops/convert/convert_cpu.h"

#include <algorithm>

#include "device/cpu/isa.h"

namespace fathom::cpu {
namespace {

// Below this many values a parallel region (0.5 to 1 us) costs more than it saves.
constexpr int64_t kParallelValues = 32 * 1024;

[[gnu::always_inline]] inline void store(float value, float& out) { out = value; }
[[gnu::always_inline]] inline void store(float value, bf16& out) { out = to_bf16(value); }

template <typename In, typename Out>
void convert_row_portable(const In* in, int64_t n, Out* out) {
  for (int64_t i = 0; i < n; ++i) store(to_float(in[i]), out[i]);
}

template <typename In, typename Out>
FATHOM_FOR_AVX512 void convert_row_avx512(const In* in, int64_t n, Out* out) {
  for (int64_t i = 0; i < n; ++i) store(to_float(in[i]), out[i]);
}

template <typename In, typename Out>
void convert_rows(ThreadPool& pool, ConstTensorView x, TensorView out) {
  const int last = x.rank() - 1;
  const int64_t n = x.size(last);
  const int64_t inner = last == 2 ? x.size(1) : 1;
  const int64_t x_stride = last == 2 ? x.stride(1) : 0;
  const int64_t out_stride = last == 2 ? out.stride(1) : 0;
  const int64_t values = std::max<int64_t>(1, inner * n);
  const int64_t grain = std::max<int64_t>(1, kParallelValues / values);
  const auto row_kernel =
      cpu_isa() >= CpuIsa::kAvx512 ? convert_row_avx512<In, Out> : convert_row_portable<In, Out>;
  pool.parallel_for(x.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t j = 0; j < inner; ++j) {
        const In* in = x.row<In>(row) + j * x_stride;
        Out* result = out.row<Out>(row) + j * out_stride;
        row_kernel(in, n, result);
      }
    }
  });
}

}  // namespace

void convert(ThreadPool& pool, ConstTensorView x, TensorView out) {
  const bool wide_in = x.dtype() == DType::kF32;
  const bool wide_out = out.dtype() == DType::kF32;
  if (wide_in && wide_out) return convert_rows<float, float>(pool, x, out);
  if (wide_in) return convert_rows<float, bf16>(pool, x, out);
  if (wide_out) return convert_rows<bf16, float>(pool, x, out);
  convert_rows<bf16, bf16>(pool, x, out);
}

}  // namespace fathom::cpu
