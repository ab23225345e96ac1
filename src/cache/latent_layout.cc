#include "cache/latent_layout.h"

#include <array>

#include "base/check.h"
#include "base/math.h"

namespace fathom {
namespace {

struct NamedFormat {
  std::string_view name;
  CacheFormat format;
};

// The names that --kv-cache-dtype takes; "fp8" is the scaled form, the only FP8 form accurate
// enough to be recommended.
constexpr std::array<NamedFormat, 5> kFormats = {{
    {"f32", CacheFormat::kF32},
    {"bf16", CacheFormat::kBF16},
    {"fp8", CacheFormat::kFp8Scaled},
    {"fp8_e4m3", CacheFormat::kE4M3},
    {"fp8_e5m2", CacheFormat::kE5M2},
}};

}  // namespace

std::string_view name_of(CacheFormat format) {
  for (const NamedFormat& named : kFormats) {
    if (named.format == format) return named.name;
  }
  return "?";
}

Result<CacheFormat> parse_cache_format(std::string_view name) {
  for (const NamedFormat& named : kFormats) {
    if (named.name == name) return named.format;
  }
  return invalid("cache format \"{}\" is not one of bf16, fp8, fp8_e4m3, fp8_e5m2, f32",
                 name.substr(0, 64));
}

int64_t LatentLayout::row_bytes() const {
  switch (format) {
    case CacheFormat::kF32:
      return (latent_dim + rope_dim) * 4;
    case CacheFormat::kBF16:
      return (latent_dim + rope_dim) * 2;
    case CacheFormat::kFp8Scaled:
      return latent_dim + ceil_div(latent_dim, kLatentScaleBlock) * 4 + rope_dim * 2;
    case CacheFormat::kE4M3:
    case CacheFormat::kE5M2:
      return latent_dim + rope_dim;
  }
  return 0;
}

Result<LatentCache> LatentCache::allocate(const LatentLayout& layout, int64_t num_layers,
                                          int64_t num_pages, int64_t state_bytes,
                                          const std::optional<IndexKeyLayout>& index_keys,
                                          const std::vector<bool>& has_index_keys) {
  FATHOM_CHECK(layout.latent_dim > 0 && layout.rope_dim >= 0 && num_layers > 0,
               "latent {}, rope {}, {} layers", layout.latent_dim, layout.rope_dim, num_layers);
  if (num_pages <= 0) return invalid("the latent cache needs at least 1 page, not {}", num_pages);
  FATHOM_CHECK(state_bytes >= 0, "{} bytes of state", state_bytes);
  FATHOM_CHECK(has_index_keys.empty() || std::ssize(has_index_keys) == num_layers,
               "index keys of {} layers, {} layers", has_index_keys.size(), num_layers);
  LatentCache cache;
  for (int64_t layer = 0; index_keys && layer < num_layers; ++layer) {
    const bool has = has_index_keys.empty() || has_index_keys[static_cast<size_t>(layer)];
    cache.index_places_.push_back(has ? cache.num_index_layers_++ : -1);
  }
  const auto latent_bytes = checked_mul(num_layers, layout.page_bytes());
  const auto layer_bytes =
      latent_bytes
          ? checked_add(*latent_bytes,
                        index_keys ? cache.num_index_layers_ * index_keys->page_bytes() : 0)
          : std::nullopt;
  const auto page_bytes = layer_bytes ? checked_add(*layer_bytes, state_bytes) : std::nullopt;
  const auto bytes = page_bytes ? checked_mul(*page_bytes, num_pages) : std::nullopt;
  if (!bytes) {
    return error(Code::kResourceExhausted,
                 "the latent cache of {} pages of {} tokens in {} layers is larger than memory",
                 num_pages, kPageSize, num_layers);
  }
  FATHOM_TRY(cache.memory_, Buffer::allocate(*bytes, "the latent cache"));
  cache.layout_ = layout;
  cache.index_key_layout_ = index_keys;
  cache.num_layers_ = num_layers;
  cache.num_pages_ = num_pages;
  cache.state_bytes_ = state_bytes;
  return cache;
}

LatentPages LatentCache::layer(int64_t layer) const {
  FATHOM_CHECK(layer >= 0 && layer < num_layers_, "layer {} of {}", layer, num_layers_);
  return {layout_, memory_.data() + layer * layout_.page_bytes(), num_pages_, num_layers_,
          tail_bytes()};
}

int64_t LatentCache::index_key_bytes() const {
  return index_key_layout_ ? num_index_layers_ * index_key_layout_->page_bytes() : 0;
}

bool LatentCache::has_index_keys(int64_t layer) const {
  FATHOM_CHECK(layer >= 0 && layer < num_layers_, "layer {} of {}", layer, num_layers_);
  return index_key_layout_ && index_places_[static_cast<size_t>(layer)] >= 0;
}

IndexKeyPages LatentCache::index_keys(int64_t layer) const {
  FATHOM_CHECK(has_index_keys(layer), "index keys of layer {} of {}", layer, num_layers_);
  const int64_t place = index_places_[static_cast<size_t>(layer)];
  return {*index_key_layout_,
          memory_.data() + latent_bytes() + place * index_key_layout_->page_bytes(), num_pages_,
          page_bytes()};
}

}  // namespace fathom
