// Random weights for --load-format dummy: speed without a download. Reproducible: a value is a
// function of the seed, the tensor's name and its place, whatever the threads do. Magnitudes keep
// activations near 1, so that arithmetic on denormals or infinities does not falsify a timing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "tensor/dtype.h"

namespace fathom {

// Values of type `dtype` (a float type or e4m3) for a tensor whose rows have `cols` elements: norms
// about 1, biases about 0, matrices with variance 1 / cols; e4m3 as random bytes without NaN, which
// dummy_scales() brings to that variance.
void fill_dummy(std::string_view name, DType dtype, int64_t cols, uint64_t seed,
                std::span<std::byte> out);

// The scales of a dummy FP8 matrix; powers of two if the format says so.
void fill_dummy_scales(std::string_view name, int64_t cols, bool powers_of_two, uint64_t seed,
                       std::span<float> out);

}  // namespace fathom
