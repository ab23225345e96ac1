#include "cache/latent_row.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/math.h"
#include "device/cpu/isa.h"

namespace fathom {
namespace {

// The amax below which a block counts as zero (deepseek-ai/DeepSeek-V3.2, kernel.py): it keeps the
// scale from being 0.
constexpr float kAmaxFloor = 1e-4f;
constexpr float kE4M3Max = 448;

void narrow(float value, float& out) { out = value; }
void narrow(float value, bf16& out) { out = to_bf16(value); }
void narrow(float value, e4m3& out) { out = to_e4m3(value); }
void narrow(float value, e5m2& out) { out = to_e5m2(value); }

// memcpy because a row's parts are aligned only for even shapes.
template <typename T>
std::byte* put(const float* values, int64_t count, std::byte* out) {
  for (int64_t i = 0; i < count; ++i) {
    T stored{};
    narrow(values[i], stored);
    std::memcpy(out + i * sizeof(T), &stored, sizeof(T));
  }
  return out + count * sizeof(T);
}

template <typename T>
const std::byte* get(const std::byte* in, int64_t count, float* values) {
  for (int64_t i = 0; i < count; ++i) {
    T stored{};
    std::memcpy(&stored, in + i * sizeof(T), sizeof(T));
    values[i] = to_float(stored);
  }
  return in + count * sizeof(T);
}

FATHOM_FOR_AVX512 void put_bf16_avx512(const float* values, int64_t count, std::byte* out) {
  for (int64_t i = 0; i < count; ++i) {
    const bf16 stored = to_bf16(values[i]);
    std::memcpy(out + i * sizeof(bf16), &stored, sizeof(bf16));
  }
}

// bf16 is the format that a decode step writes in every layer.
std::byte* put_bf16(const float* values, int64_t count, std::byte* out) {
  if (cpu_isa() < CpuIsa::kAvx512) return put<bf16>(values, count, out);
  put_bf16_avx512(values, count, out);
  return out + count * sizeof(bf16);
}

void encode_scaled(const LatentLayout& layout, const float* latent, const float* rope,
                   std::byte* row) {
  const int64_t blocks = ceil_div(layout.latent_dim, kLatentScaleBlock);
  std::byte* scales = row + layout.latent_dim;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block * kLatentScaleBlock;
    const int64_t count = std::min(kLatentScaleBlock, layout.latent_dim - first);
    float amax = kAmaxFloor;
    for (int64_t i = 0; i < count; ++i) amax = std::max(amax, std::abs(latent[first + i]));
    const float scale = amax / kE4M3Max;
    for (int64_t i = 0; i < count; ++i) {
      row[first + i] = std::byte{to_e4m3(latent[first + i] / scale).bits};
    }
    std::memcpy(scales + block * 4, &scale, 4);
  }
  put<bf16>(rope, layout.rope_dim, scales + blocks * 4);
}

void decode_scaled(const LatentLayout& layout, const std::byte* row, float* latent, float* rope) {
  const int64_t blocks = ceil_div(layout.latent_dim, kLatentScaleBlock);
  const std::byte* scales = row + layout.latent_dim;
  get<e4m3>(row, layout.latent_dim, latent);
  for (int64_t i = 0; i < layout.latent_dim; ++i) {
    float scale = 0;
    std::memcpy(&scale, scales + i / kLatentScaleBlock * 4, 4);
    latent[i] *= scale;
  }
  get<bf16>(scales + blocks * 4, layout.rope_dim, rope);
}

}  // namespace

void encode_row(const LatentLayout& layout, const float* latent, const float* rope,
                std::byte* row) {
  switch (layout.format) {
    case CacheFormat::kF32:
      put<float>(rope, layout.rope_dim, put<float>(latent, layout.latent_dim, row));
      return;
    case CacheFormat::kBF16:
      put_bf16(rope, layout.rope_dim, put_bf16(latent, layout.latent_dim, row));
      return;
    case CacheFormat::kFp8Scaled:
      encode_scaled(layout, latent, rope, row);
      return;
    case CacheFormat::kE4M3:
      put<e4m3>(rope, layout.rope_dim, put<e4m3>(latent, layout.latent_dim, row));
      return;
    case CacheFormat::kE5M2:
      put<e5m2>(rope, layout.rope_dim, put<e5m2>(latent, layout.latent_dim, row));
      return;
  }
}

void decode_row(const LatentLayout& layout, const std::byte* row, float* latent, float* rope) {
  switch (layout.format) {
    case CacheFormat::kF32:
      get<float>(get<float>(row, layout.latent_dim, latent), layout.rope_dim, rope);
      return;
    case CacheFormat::kBF16:
      get<bf16>(get<bf16>(row, layout.latent_dim, latent), layout.rope_dim, rope);
      return;
    case CacheFormat::kFp8Scaled:
      decode_scaled(layout, row, latent, rope);
      return;
    case CacheFormat::kE4M3:
      get<e4m3>(get<e4m3>(row, layout.latent_dim, latent), layout.rope_dim, rope);
      return;
    case CacheFormat::kE5M2:
      get<e5m2>(get<e5m2>(row, layout.latent_dim, latent), layout.rope_dim, rope);
      return;
  }
}

}  // namespace fathom
