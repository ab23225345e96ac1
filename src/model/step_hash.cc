#include "model/step_hash.h"

#define XXH_INLINE_ALL  // header only: nothing to link
#include <xxhash.h>

namespace fathom {
namespace {

uint64_t hash_array(const std::vector<int32_t>& array, uint64_t seed) {
  // The length too: the same numbers may be cut into other arrays.
  return XXH3_64bits_withSeed(array.data(), array.size() * sizeof(int32_t),
                              seed ^ (array.size() << 1));
}

uint64_t hash_number(int64_t number, uint64_t seed) {
  return XXH3_64bits_withSeed(&number, sizeof number, seed);
}

}  // namespace

uint64_t hash_batch(const ForwardBatch& batch, uint64_t seed) {
  uint64_t hash = hash_number(batch.max_pages, seed);
  for (const auto* array :
       {&batch.token_ids, &batch.positions, &batch.query_start, &batch.context_lens,
        &batch.prompt_lens, &batch.block_tables, &batch.num_drafts, &batch.mtp_lens,
        &batch.logit_rows, &batch.largest_only}) {
    hash = hash_array(*array, hash);
  }
  return hash;
}

uint64_t hash_attention(const AttentionPlan& plan, uint64_t seed) {
  uint64_t hash = seed;
  for (const MhaRows& rows : plan.mha) {
    hash = hash_number(rows.rows, hash_number(rows.sequence, hash));
  }
  for (const SparseRow& row : plan.scored) {
    hash = hash_number(row.length, hash_number(row.row, hash));
  }
  for (const AbsorbedGroup& group : plan.absorbed) {
    hash = hash_number(group.first_row, hash);
    hash = hash_number(group.first_sequence, hash);
    hash = hash_array(group.query_start, hash);
    hash = hash_array(group.context_lens, hash);
  }
  return hash;
}

uint64_t hash_key_lists(ConstTensorView lists, uint64_t seed) {
  return XXH3_64bits_withSeed(lists.raw(),
                              static_cast<size_t>(lists.num_elements()) * sizeof(int32_t), seed);
}

}  // namespace fathom
