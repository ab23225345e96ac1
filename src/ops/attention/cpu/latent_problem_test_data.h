// Shared by the tests of attention over latent rows: a cache of random rows for a batch, pages in
// scattered order. Bytes that no sequence owns, and rows of hidden keys, are 0xFF, NaN in every
// format.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cache/latent_row.h"
#include "ops/attention/attention_test_data.h"
#include "ops/attention/paged_batch.h"

namespace fathom {

struct LatentShape {
  int64_t heads, latent, rope;
  CacheFormat format;
  DType q_dtype;
  DType out_dtype;
  std::vector<int32_t> queries;
  std::vector<int32_t> contexts;
  int32_t first_key = 0;  // earlier keys are hidden
};

struct LatentProblem {
  explicit LatentProblem(const LatentShape& s)
      : shape(s),
        rows(total_rows(s)),
        first_key(s.first_key),
        q_latent(rows * s.heads * s.latent, s.q_dtype, 11, 1),
        q_rope(rows * s.heads * s.rope, s.q_dtype, 12, 1) {
    int32_t num_pages = 1;
    for (size_t i = 0; i < s.queries.size(); ++i) {
      query_start.push_back(query_start.back() + s.queries[i]);
      const int32_t pages = (s.queries[i] + s.contexts[i] + 63) / 64;
      max_pages = std::max(max_pages, pages);
      num_pages += pages;
    }
    cache = *LatentCache::allocate({s.format, s.latent, s.rope}, 1, num_pages);
    const LatentPages pages = cache.layer(0);
    std::memset(pages.data, 0xFF, static_cast<size_t>(num_pages * pages.layout.page_bytes()));
    int32_t next = num_pages - 1;  // page 0 stays unused
    for (size_t i = 0; i < s.queries.size(); ++i) {
      const int32_t tokens = s.queries[i] + s.contexts[i];
      for (int32_t page = 0; page < max_pages; ++page) {
        block_tables.push_back(page * 64 < tokens ? next-- : -1);
      }
      for (int32_t token = s.first_key; token < tokens; ++token) {
        const TestTensor row(s.latent + s.rope, DType::kF32, 100 + i * 100000 + token, 1.5);
        encode_row(pages.layout, row.wide.data(), row.wide.data() + s.latent, row_of(i, token));
      }
    }
  }

  std::byte* row_of(size_t sequence, int64_t token) const {
    return cache.layer(0).row(block_tables[sequence * max_pages + token / 64], token % 64);
  }
  PagedBatch batch() const {
    return {query_start, shape.contexts, block_tables, max_pages, {}, first_key};
  }
  std::vector<int32_t> all_sequences() const {
    std::vector<int32_t> all;
    for (size_t i = 0; i < shape.queries.size(); ++i) all.push_back(static_cast<int32_t>(i));
    return all;
  }
  float scale() const { return 0.7f / std::sqrt(static_cast<float>(shape.latent) / 4); }

  LatentShape shape;
  int64_t rows = 0;
  int32_t first_key = 0;
  LatentCache cache;
  std::vector<int32_t> query_start = {0};
  std::vector<int32_t> block_tables;
  int32_t max_pages = 0;
  TestTensor q_latent, q_rope;

 private:
  static int64_t total_rows(const LatentShape& s) {
    int64_t rows = 0;
    for (const int32_t queries : s.queries) rows += queries;
    return rows;
  }
};

}  // namespace fathom
