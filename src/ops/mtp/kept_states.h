// States of the main model that pages keep for the MTP layer, as device code and plans number them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace fathom::cuda {

// States in pages: number i lies at data + i / a_page * page_bytes + i % a_page * (bytes of one).
struct KeptStates {
  std::byte* data = nullptr;
  int64_t page_bytes = 0;
  int64_t a_page = 1;
};

// In MtpInputArguments::previous: no state; zeros are read.
inline constexpr int64_t kNoState = std::numeric_limits<int64_t>::min();

}  // namespace fathom::cuda
