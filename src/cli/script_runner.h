// A model for tests that maps each token to its successor. Test code only.
#pragma once

#include <cmath>
#include <map>
#include <vector>

#include "engine/logits_runner.h"

namespace fathom {

class ScriptRunner : public LogitsRunner {
 public:
  static constexpr float kLogit = 9;  // of the successor; all other logits are 0

  // The successor of tokens that are not in `next` is `otherwise`.
  ScriptRunner(int64_t vocab_size, std::map<int32_t, int32_t> next, int32_t otherwise)
      : vocab_size_(vocab_size), next_(std::move(next)), otherwise_(otherwise) {}

  int64_t vocab_size() const override { return vocab_size_; }
  int64_t max_model_len() const override { return 256; }
  int64_t num_pages() const override { return 64; }

  Result<ConstTensorView> forward(std::span<const ForwardBatch> lanes) override {
    const ForwardBatch& batch = lanes.front();
    logits_.assign(batch.logit_rows.size() * static_cast<size_t>(vocab_size_), 0);
    for (size_t i = 0; i < batch.logit_rows.size(); ++i) {
      const auto found = next_.find(batch.token_ids[static_cast<size_t>(batch.logit_rows[i])]);
      const int32_t next = found == next_.end() ? otherwise_ : found->second;
      logits_[i * static_cast<size_t>(vocab_size_) + static_cast<size_t>(next)] = kLogit;
    }
    return ConstTensorView(logits_.data(),
                           {static_cast<int64_t>(batch.logit_rows.size()), vocab_size_});
  }

  // The log-probability of the successor, and of any other token.
  double likely() const { return kLogit - std::log(std::exp(kLogit) + double(vocab_size_ - 1)); }
  double unlikely() const { return likely() - kLogit; }

 private:
  const int64_t vocab_size_;
  const std::map<int32_t, int32_t> next_;
  const int32_t otherwise_;
  std::vector<float> logits_;
};

}  // namespace fathom
