// No pass here computes the noise of every token. A token whose word has `b` leading zeros has
// g <= (b + 1) ln 2. The token with the largest logit runs first; from then on a block can only
// hold a winner if one of its words has as many leading zeros as its largest logit lacks, and few
// blocks have: vector code compares 64 words at once, and only what it finds is computed in full.
#include "ops/sampling/race.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "ops/sampling/noise_block.h"

namespace fathom {
namespace {

constexpr double kBitsPerNat = 1.4426950408889;  // 1 / ln 2, rounded down
constexpr int kWordBits = 32, kNoiseBits = 64;   // no n has more leading zeros

class Race {
 public:
  Race(float inverse_temperature, const NoiseKey& key)
      : inverse_temperature_(inverse_temperature), key_(key) {}

  void run(float logit, int32_t id, uint32_t upper) {
    const double score = race_score(logit, inverse_temperature_, token_noise(key_, id, upper));
    if (id_ >= 0 && (score < score_ || (score == score_ && id > id_))) return;
    score_ = score;
    id_ = id;
    // What stays below after the rounding of a score, and of gumbel().
    to_reach_ = score - 1e-6 - std::abs(score) * 0x1p-50;
  }

  // Bits that must be leading zeros of n for a token with this logit to win.
  double needed_bits(float logit) const {
    return (to_reach_ - race_score(logit, inverse_temperature_, 0)) * kBitsPerNat;
  }

  int32_t winner() const { return id_; }

 private:
  float inverse_temperature_;
  NoiseKey key_;
  double score_ = 0, to_reach_ = 0;
  int32_t id_ = -1;
};

uint32_t leading_mask(double bits) {
  if (bits < 1) return 0;
  if (bits >= kWordBits) return ~uint32_t{0};
  return ~uint32_t{0} << (kWordBits - static_cast<int>(bits));
}

}  // namespace

int32_t race(std::span<const float> logits, std::span<const float> maxima, int32_t largest,
             const Cutoff& cutoff, float inverse_temperature, const NoiseKey& key, CpuIsa isa) {
  const FillNoiseBlock fill = fill_noise_block(isa);
  NoiseBlock noise;
  Race race(inverse_temperature, key);
  const auto group = static_cast<uint32_t>(largest / kNoiseGroup);
  race.run(logits[largest], largest, noise_words(key, group).words[largest % kNoiseGroup]);
  for (int64_t block = 0; block < std::ssize(maxima); ++block) {
    if (!(maxima[block] >= cutoff.logit)) continue;
    const double bits = race.needed_bits(maxima[block]);
    if (bits > kNoiseBits) continue;
    uint64_t found = fill(key, block, leading_mask(bits), noise);
    for (; found != 0; found &= found - 1) {
      const int lane = std::countr_zero(found);
      const int64_t id = block * kLogitBlock + NoiseBlock::token(lane);
      if (id >= std::ssize(logits)) continue;
      const uint32_t upper = noise.upper(lane);
      const int most_bits = upper != 0 ? std::countl_zero(upper) + 1 : kNoiseBits;
      if (cutoff.keeps(logits[id], static_cast<int32_t>(id)) &&
          race.needed_bits(logits[id]) <= most_bits) {
        race.run(logits[id], static_cast<int32_t>(id), upper);
      }
    }
  }
  return race.winner();
}

}  // namespace fathom
