// The formats of a latent-cache row: see latent_layout.h. Contains only what kernels can include.
#pragma once

#include <cstdint>

namespace fathom {

inline constexpr int64_t kPageSize = 64;           // tokens a page
inline constexpr int64_t kLatentScaleBlock = 128;  // latent values that share an fp32 scale

enum class CacheFormat { kF32, kBF16, kFp8Scaled, kE4M3, kE5M2 };

}  // namespace fathom
