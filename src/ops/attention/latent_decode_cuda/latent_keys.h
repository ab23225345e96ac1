// Where the keys of a latent attention kernel's tile come from.
#pragma once

namespace fathom::cuda {

enum class LatentKeys {
  // A page of a sequence, which beyond the sequence's end may hold anything. Splits are combined
  // within the launch, by the CTAs that computed them.
  kPages,
  // 64 rows of a list, each from anywhere in the cache. Splits are combined by a second launch.
  kListed,
};

}  // namespace fathom::cuda
