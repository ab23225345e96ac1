// The hash function of the vocabulary's tables. Each table has a random seed, so that no file can
// be crafted whose entries all collide; lookup results do not depend on the seed. Method: multiply
// and fold, as in wyhash (Wang Yi, public domain).
#pragma once

#include <cstdint>
#include <random>

namespace fathom {

class TableHash {
 public:
  TableHash() {
    std::random_device device;
    const auto word = [&] { return static_cast<uint64_t>(device()) << 32 | device(); };
    seed_a_ = word();
    seed_b_ = word() | 1;
  }

  uint64_t operator()(uint64_t a, uint64_t b) const {
    const auto product = static_cast<unsigned __int128>(a ^ seed_a_) * (b ^ seed_b_);
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }

  uint64_t seed() const { return seed_a_; }

 private:
  uint64_t seed_a_, seed_b_;
};

}  // namespace fathom
