// Philox4x32-10: four random words of a counter and a key, by integer operations alone, so that
// every compiler and device computes the same bits.
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011),
// whose constants these are. Words of different counters or keys pass as independent (BigCrush).
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace fathom {

struct PhiloxWords {
  uint32_t words[4];
};

inline constexpr int kPhiloxRounds = 10;
inline constexpr uint32_t kPhiloxFactor0 = 0xD2511F53, kPhiloxFactor2 = 0xCD9E8D57;
inline constexpr uint32_t kPhiloxStep0 = 0x9E3779B9, kPhiloxStep1 = 0xBB67AE85;

// The low half of `key` is the first key word.
FATHOM_HOST_DEVICE constexpr PhiloxWords philox(PhiloxWords counter, uint64_t key) {
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxFactor0} * counter.words[0];
    const uint64_t product2 = uint64_t{kPhiloxFactor2} * counter.words[2];
    counter = {{static_cast<uint32_t>(product2 >> 32) ^ counter.words[1] ^ key0,
                static_cast<uint32_t>(product2),
                static_cast<uint32_t>(product0 >> 32) ^ counter.words[3] ^ key1,
                static_cast<uint32_t>(product0)}};
    key0 += kPhiloxStep0;
    key1 += kPhiloxStep1;
  }
  return counter;
}

}  // namespace fathom
