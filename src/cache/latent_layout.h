// The latent cache's memory: one row a token and layer, in pages of 64 tokens.
//
// A row is the normed latent (kv_lora_rank values, 512 in every published model) followed by the
// rotated key (qk_rope_dim values, 64). Formats:
//   f32            the reference's (--dtype float32)
//   bf16           1,152 B: all values bf16
//   fp8 (scaled)   656 B: latent in e4m3, one fp32 scale for each 128 of it, rotated key in bf16
//   e4m3, e5m2     576 B: all values FP8 without scales
// Layout of a page of one layer: 64 rows, each row contiguous. All layers of a page belong to one
// page id. A page is one piece of memory: the latent rows of all layers, then, for a model with
// sparse attention, the index keys of the layers that have some (cache/index_key_layout.h), then
// other state of its tokens. Whoever moves a page moves all of it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "cache/cache_format.h"
#include "cache/index_key_layout.h"
#include "tensor/buffer.h"
#include "tensor/dtype.h"

namespace fathom {

std::string_view name_of(CacheFormat format);

// auto|bf16|fp8|fp8_e4m3|fp8_e5m2|f32 as --kv-cache-dtype takes them ("auto" is not a format: the
// caller resolves it).
Result<CacheFormat> parse_cache_format(std::string_view name);

struct LatentLayout {
  CacheFormat format = CacheFormat::kBF16;
  int64_t latent_dim = 512;  // kv_lora_rank
  int64_t rope_dim = 64;

  int64_t row_bytes() const;
  int64_t page_bytes() const { return kPageSize * row_bytes(); }
};

// One layer's pages, read by attention and written by the cache write. Views only.
struct LatentPages {
  LatentLayout layout;
  std::byte* data = nullptr;  // the layer's part of page 0, [kPageSize, row_bytes]
  int64_t num_pages = 0;
  int64_t num_layers = 1;  // whose parts of a page are contiguous
  int64_t tail_bytes = 0;  // of a page, behind its layers' latent rows

  std::byte* row(int64_t page, int64_t slot) const {
    return data + page * (num_layers * layout.page_bytes() + tail_bytes) +
           slot * layout.row_bytes();
  }
};

// The memory of all pages: one allocation, made once. A growing sequence touches new memory for one
// page at a time, not for every layer at once: Linux takes milliseconds for the first touch of a
// huge page.
class LatentCache {
 public:
  // `has_index_keys` [num_layers]: which layers have index keys, if there are any; empty: all.
  static Result<LatentCache> allocate(const LatentLayout& layout, int64_t num_layers,
                                      int64_t num_pages, int64_t state_bytes = 0,
                                      const std::optional<IndexKeyLayout>& index_keys = {},
                                      const std::vector<bool>& has_index_keys = {});

  const LatentLayout& layout() const { return layout_; }
  int64_t num_layers() const { return num_layers_; }
  int64_t num_pages() const { return num_pages_; }
  LatentPages layer(int64_t layer) const;
  // None: a model without sparse attention, whose pages have no index keys.
  const std::optional<IndexKeyLayout>& index_key_layout() const { return index_key_layout_; }
  bool has_index_keys(int64_t layer) const;
  IndexKeyPages index_keys(int64_t layer) const;  // only where there are some
  int64_t page_bytes() const { return latent_bytes() + tail_bytes(); }
  std::byte* page(int64_t page) const { return layer(0).row(page, 0); }  // page_bytes()
  // The page's state_bytes.
  std::byte* state(int64_t page) const { return this->page(page) + page_bytes() - state_bytes_; }

 private:
  // Bytes per page.
  int64_t latent_bytes() const { return num_layers_ * layout_.page_bytes(); }
  int64_t index_key_bytes() const;
  int64_t tail_bytes() const { return index_key_bytes() + state_bytes_; }

  LatentLayout layout_;
  std::optional<IndexKeyLayout> index_key_layout_;
  std::vector<int64_t> index_places_;  // [num_layers]: a layer's index keys among them; -1: none
  int64_t num_index_layers_ = 0;
  int64_t num_layers_ = 0;
  int64_t num_pages_ = 0;
  int64_t state_bytes_ = 0;
  Buffer memory_;
};

}  // namespace fathom
