// A runner whose logits are in host memory and are sampled on the host. A step is complete when
// begin() returns.
#pragma once

#include <vector>

#include "engine/draft_steps.h"
#include "engine/runner.h"
#include "tensor/tensor_view.h"

namespace fathom {

class LogitsRunner : public Runner {
 public:
  // More than one step in flight is for tests that imitate a device.
  explicit LogitsRunner(int max_steps_in_flight = 1);

  int max_steps_in_flight() const override { return static_cast<int>(results_.size()); }
  Result<> begin(std::span<const ForwardBatch> lanes, std::span<const SampleRow> rows) override;
  Result<std::span<const int32_t>> draft(std::span<const ForwardBatch> lanes,
                                         std::span<const SampleRow> rows) override;
  // Samples from draft_logits().
  Result<std::span<const SampledToken>> draft_step(std::span<const ForwardBatch> lanes,
                                                   std::span<const std::vector<int32_t>> states,
                                                   std::span<const SampleRow> rows) override;
  Result<std::span<const SampledToken>> finish() override;

  // Returns logits [logit_rows, vocab] f32 of all lanes in order, row i for the i-th logit row,
  // valid until the next call. All token ids of the batches are known.
  virtual Result<ConstTensorView> forward(std::span<const ForwardBatch> lanes) = 0;
  // The same of the MTP layer, for the tokens that follow the batches' logit rows. states[lane]:
  // where not empty, each row's predecessor among the lane's logit rows of the last call, whose own
  // state it continues.
  virtual Result<ConstTensorView> draft_logits(std::span<const ForwardBatch> /*lanes*/,
                                               std::span<const std::vector<int32_t>> /*states*/) {
    return error(Code::kInternal, "this runner does not draft");
  }
  // The tokens of the last forward() or draft_logits() that it found itself, of rows that are
  // largest_only in their batch and have no logits then: an id, or -1 for none, and kFromLogits for
  // all other rows. Empty: all rows have logits.
  virtual std::span<const int32_t> found_tokens() const { return {}; }
  static constexpr int32_t kFromLogits = -2;

 private:
  struct Results {
    std::vector<SampledToken> tokens;  // never shrinks, to keep its vectors' memory
    size_t count = 0;
  };
  Results& results(int64_t step) { return results_[static_cast<size_t>(step) % results_.size()]; }
  std::span<const ForwardBatch> with_known_tokens(std::span<const ForwardBatch> lanes);
  // Samples all rows, except those with a found token.
  void sample(ConstTensorView logits, std::span<const SampleRow> rows,
              std::span<SampledToken> tokens);
  void sample_rest(ConstTensorView logits, std::span<const SampleRow> rows,
                   std::span<SampledToken> tokens);

  std::vector<Results> results_;
  int64_t begun_ = 0, finished_ = 0;  // steps
  std::vector<SampleScratch> scratch_;
  std::vector<ForwardBatch> known_;
  std::vector<SampleRow> rest_;
  std::vector<SampledToken> rest_tokens_;  // never shrinks
  DraftSteps draft_steps_;
  std::vector<SampledToken> draft_tokens_;  // never shrinks
};

}  // namespace fathom
