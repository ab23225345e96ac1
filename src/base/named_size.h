// A size with the name by which the user knows it (a field of config.json or a flag), and the
// errors for sizes that an operation does not support. Used by the functions in *_support.h.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/status.h"

namespace fathom {

struct NamedSize {
  std::string_view name;
  int64_t value = 0;
};

inline Result<> require_equal(const NamedSize& size, int64_t only) {
  if (size.value == only) return {};
  return invalid("{} is {}; kernels for GPUs take {} only", size.name, size.value, only);
}

inline Result<> require_multiple(const NamedSize& size, int64_t unit) {
  if (size.value > 0 && size.value % unit == 0) return {};
  return invalid("{} is {}; kernels for GPUs take multiples of {}", size.name, size.value, unit);
}

inline Result<> require_at_most(const NamedSize& size, int64_t most) {
  if (size.value <= most) return {};
  return invalid("{} is {}; kernels for GPUs take up to {}", size.name, size.value, most);
}

}  // namespace fathom
