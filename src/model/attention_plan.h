// The form of attention that each sequence of a step takes, decided on the host once a step.
//
// Absorbed attention costs more for each (query, key) pair, the multi-head form costs an expansion
// of every key: a few new tokens after a long prefix are cheaper absorbed, many new tokens are
// cheaper expanded. The thresholds are private to this file.
//
// In a model with sparse attention (DeepSeek-V3.2) a row that sees more keys than the dense
// threshold is taken out of this choice: it attends, absorbed, to the keys that its indexer chooses
// (ops/indexer/sparse_plan.h). That is decided by each row's own length, so a prompt's chunk may
// begin in one of the two forms and end sparse.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "model/forward_batch.h"
#include "ops/attention/paged_batch.h"
#include "ops/indexer/sparse_plan.h"
#include "tensor/slice.h"

namespace fathom {

// Inputs of the choice besides the sequence: the model's shape and the measured crossover.
struct AttentionShape {
  int64_t latent_dim = 512;
  int64_t rope_dim = 64;
  int64_t nope_dim = 128;
  int64_t v_dim = 128;
  // Grouped queries: the multi-head form's keys are nope_dim wide in all, and neither form has a
  // product that takes into the latent or out of it.
  bool grouped = false;
  std::optional<SparseLimits> sparse = {};  // none: every row attends to all keys that it sees
};

enum class AttentionForm { kAuto, kAbsorbed, kMha };

struct AttentionPolicy {
  // kAuto chooses by cost; the others force one form (tests, measurements).
  AttentionForm form = AttentionForm::kAuto;
  // Sequences with fewer new tokens are always absorbed: decode and short drafts have one form,
  // whatever the context. Without any context that costs up to 6 % of a step of 2 to 4 tokens.
  int64_t min_mha_queries = 8;
  // Time of one absorbed multiply-add relative to one of the multi-head form.
  double absorbed_cost = 1.0;
  // Keys of a sequence whose expansion is free: with few keys, reading the expansion's weights
  // takes as long as the GEMMs, and the absorbed form reads the same weights.
  int64_t free_keys = 0;
  // Most rows of an absorbed group: it bounds the workspace.
  int64_t max_absorbed_rows = 256;
  // Keys per chunk of the multi-head form; chunks are combined by log-sum-exp.
  int64_t mha_key_chunk = 1024;
  // --dsa-dense-threshold: most keys of a row that attends to all of them in a model with sparse
  // attention, 0 to its index_topk; none: index_topk.
  std::optional<int64_t> dense_keys = {};
};

// The policy with the crossovers measured at this CPU's ISA level (docs/performance.md, "The two
// forms of attention").
AttentionPolicy cpu_attention_policy();

// The same for an H200.
AttentionPolicy gpu_attention_policy();

// A run of consecutive sequences that go through absorbed attention together. Its arrays are those
// of a batch of its own: query_start begins at 0, for the rows [first_row, first_row + rows). A
// sequence with more rows than a group holds continues in the next one, where its earlier rows are
// context; so does one whose rows begin to choose their keys.
struct AbsorbedGroup {
  int64_t first_row = 0;
  int64_t rows = 0;
  std::vector<int32_t> query_start;
  std::vector<int32_t> context_lens;
  std::vector<int32_t> sequences;  // indices into these arrays: those whose rows see all keys
  int64_t first_sequence = 0;      // in the step's batch
  Slice scored;                    // the rows that choose their keys, in AttentionPlan::scored

  // The group as a batch for the attention operation; views into the group and the batch.
  PagedBatch view(const ForwardBatch& batch) const;
};

// The first rows of a sequence of the batch, in the multi-head form: all of them, or those before
// the first that chooses its keys.
struct MhaRows {
  int32_t sequence = 0;
  int32_t rows = 0;
};

struct AttentionPlan {
  std::vector<AbsorbedGroup> absorbed;
  std::vector<MhaRows> mha;
  // Rows that choose their keys, in the batch's order, and the passes in which they are scored.
  std::vector<SparseRow> scored;
  std::vector<ScorePass> passes;
};

// True if `queries` new tokens after `context` cached ones are cheaper in the multi-head form.
bool prefers_mha(int64_t queries, int64_t context, const AttentionShape& shape,
                 const AttentionPolicy& policy);

// `first_key`: PagedBatch's.
AttentionPlan plan_attention(const ForwardBatch& batch, const AttentionShape& shape,
                             const AttentionPolicy& policy, int32_t first_key = 0);

// The batch's arrays for the operations; a view.
PagedBatch paged_view(const ForwardBatch& batch, int32_t first_key);

// Runs of rows for which index queries are made: those of `scored`, which lie in ascending order,
// and the few between two of them, because reading the weights again would cost as much.
std::vector<Slice> query_runs(std::span<const SparseRow> scored);

}  // namespace fathom
