// What has to be equal on both sides of a transfer, and what they say when it is not.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fathom {

// Names (flags where there is one) and values, in the order in which differences are told.
using Facts = std::vector<std::pair<std::string, std::string>>;

// One sentence with both values of the first fact that differs; none: all are equal.
std::optional<std::string> first_difference(const Facts& decode, const Facts& prefill);

// An engine's id as texts have it: 16 hexadecimal digits.
std::string engine_id_text(uint64_t engine);

}  // namespace fathom
