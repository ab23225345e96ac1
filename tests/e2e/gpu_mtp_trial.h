// Measures a model's MTP layer on the GPU against one on the CPU: the same prompts, windows and
// drafts through both, without an engine.
#pragma once

#include <memory>
#include <random>
#include <span>
#include <vector>

#include "cache/cache_format.h"
#include "checkpoint/checkpoint.h"
#include "model/forward_batch.h"
#include "model/weight_forms.h"
#include "ops/sampling/sample.h"

namespace fathom {

// A model with its MTP layer and a cache, on either device. Logits are [logit rows, vocab].
class MtpModel {
 public:
  virtual ~MtpModel() = default;
  virtual std::vector<float> forward(const ForwardBatch& batch) = 0;
  virtual std::vector<float> draft(const ForwardBatch& batch, std::span<const int32_t> states) = 0;
};

std::unique_ptr<MtpModel> mtp_on_cpu(const Checkpoint& checkpoint, DType compute,
                                     CacheFormat format);
// Its cache begins poisoned.
std::unique_ptr<MtpModel> mtp_on_gpu(const Checkpoint& checkpoint, StoredFp8 stored,
                                     CacheFormat format);

// Tokens of a text that run_mtp() takes.
inline constexpr int64_t kMtpTextTokens = 384;

// The distributions of all rows with logits, in one list each, as deviation() reads them.
struct MtpTrace {
  std::vector<std::vector<SampledToken>> main, first_drafts, later_drafts;
};

// Prompts in chunks, then windows of four rows of which 0 to 3 drafts turn out right (the text
// decides), each followed by a draft of the next token and one more from the layer's own state.
// `longer`: tokens of a prompt more than of the one before; the first two have 1 and 2.
MtpTrace run_mtp(MtpModel& model, const std::vector<std::vector<int32_t>>& texts, int64_t vocab,
                 int32_t longer = 65);

}  // namespace fathom
