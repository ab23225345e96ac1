#include "server/http/request_id.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <random>

#include "base/random.h"

namespace fathom::http {

bool is_valid_request_id(std::string_view id) {
  constexpr size_t kLongest = 128;
  const auto allowed = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' ||
           c == '_' || c == '-' || c == ':';
  };
  return !id.empty() && id.size() <= kLongest && std::all_of(id.begin(), id.end(), allowed);
}

std::string make_request_id() {
  static const uint64_t seed = [] {
    std::random_device device;
    return static_cast<uint64_t>(device()) << 32 | device();
  }();
  static std::atomic<uint64_t> next{0};
  const uint64_t index = next.fetch_add(1, std::memory_order_relaxed);
  return fmt::format("req-{:016x}{:016x}", random_bits(seed, 0, index),
                     random_bits(seed, 1, index));
}

}  // namespace fathom::http
