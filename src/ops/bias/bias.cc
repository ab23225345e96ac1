#include "ops/bias/bias.h"

#include <algorithm>

namespace fathom {
namespace {

// Below this many values a parallel region (0.5 to 1 us) costs more than it saves.
constexpr int64_t kParallelValues = 32 * 1024;

void add_bias_on_cpu(ThreadPool& pool, ConstTensorView bias, TensorView x) {
  const int64_t n = x.size(1);
  const float* add = bias.data<float>();
  const int64_t grain = std::max<int64_t>(1, kParallelValues / std::max<int64_t>(1, n));
  pool.parallel_for(x.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* values = x.row<float>(row);
      for (int64_t i = 0; i < n; ++i) values[i] += add[i];
    }
  });
}

}  // namespace

void add_bias(const Stream& stream, ConstTensorView bias, TensorView x) {
  FATHOM_CHECK(x.rank() == 2 && bias.rank() == 1 && bias.size(0) == x.size(1), "x {}, bias {}",
               x.shape_string(), bias.shape_string());
  switch (stream.device()) {
    case DeviceKind::kCpu:
      add_bias_on_cpu(stream.pool(), bias, x);
  }
}

}  // namespace fathom
