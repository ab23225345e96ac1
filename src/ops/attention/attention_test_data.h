// Shared by the attention tests: random tensors of either type.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "base/random.h"
#include "device/cpu/isa.h"
#include "tensor/tensor_view.h"

namespace fathom {

// A dense random tensor kept in both types: `wide` holds exactly the values of `narrow` when it is
// made for bf16.
struct TestTensor {
  std::vector<float> wide;
  std::vector<bf16> narrow;

  TestTensor(int64_t count, DType dtype, uint64_t seed, double scale = 1) {
    for (int64_t i = 0; i < count; ++i) {
      auto value = static_cast<float>(scale * (2 * random_uniform(seed, 0, i) - 1));
      if (dtype == DType::kBF16) {
        narrow.push_back(to_bf16(value));
        value = to_float(narrow.back());
      }
      wide.push_back(value);
    }
  }

  ConstTensorView view(std::initializer_list<int64_t> shape) const {
    return narrow.empty() ? ConstTensorView(wide.data(), shape)
                          : ConstTensorView(narrow.data(), shape);
  }
};

}  // namespace fathom
