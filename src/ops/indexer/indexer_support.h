// Sizes that the indexer's operations support on a GPU: write_index_keys(), make_index_queries(),
// index_scores() and select_top_keys(). Host code.
#pragma once

#include "base/named_size.h"
#include "ops/indexer/top_keys_limit.h"

namespace fathom::cuda {

struct IndexerSizes {
  NamedSize heads, dim;
  NamedSize length;  // the most keys of a row
};

inline Result<> indexer_supports(const IndexerSizes& sizes) {
  FATHOM_RETURN_IF_ERROR(require_equal(sizes.dim, 128));
  if (sizes.heads.value != 16 && sizes.heads.value != 32 && sizes.heads.value != 64) {
    return invalid("{} is {}; kernels for GPUs take 16, 32 or 64", sizes.heads.name,
                   sizes.heads.value);
  }
  return require_at_most(sizes.length, kMostScoreColumns);
}

}  // namespace fathom::cuda
