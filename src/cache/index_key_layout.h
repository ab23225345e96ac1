// The index keys' memory: what DeepSeek-V3.2's indexer keeps of a token, one row a token and layer,
// in the same pages of 64 tokens as the latent rows.
//
// A row is the normed, rotated and Hadamard-rotated key. Formats:
//   e4m3   132 B: 128 values in e4m3, then one fp32 scale, a power of two. Rows need no alignment
//   bf16   256 B: all values bf16
//   f32    512 B: the reference's (--dtype float32)
// Layout of a page of one layer: 64 rows, each row contiguous. Where a layer's part stands in a
// page of the cache is the owner's: a view has its place in page 0 and the bytes from page to page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "cache/cache_format.h"

namespace fathom {

enum class IndexKeyFormat { kE4M3, kBF16, kF32 };

std::string_view name_of(IndexKeyFormat format);

struct IndexKeyLayout {
  IndexKeyFormat format = IndexKeyFormat::kE4M3;
  int64_t dim = 128;  // index_head_dim

  int64_t row_bytes() const;
  int64_t page_bytes() const { return kPageSize * row_bytes(); }
};

// One layer's index keys, written by write_index_keys() and read by index_scores(). Views only.
struct IndexKeyPages {
  IndexKeyLayout layout;
  std::byte* data = nullptr;  // the layer's part of page 0, [kPageSize, row_bytes]
  int64_t num_pages = 0;
  int64_t page_stride = 0;  // bytes from a page's part to the next page's

  std::byte* row(int64_t page, int64_t slot) const {
    return data + page * page_stride + slot * layout.row_bytes();
  }
};

}  // namespace fathom
