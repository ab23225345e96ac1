// A model for tests: its logits are a hash of the sequence's own tokens, read back through a paged
// cache of tokens, so that a wrong page, position, chunk border or block table changes the answer.
// It also checks that a batch is well formed. Test code only.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "cache/page_transfer.h"
#include "engine/fake_tokenizer.h"
#include "engine/logits_runner.h"

namespace fathom {

struct FakeModel {
  int64_t vocab_size = 300;
  int64_t max_model_len = 2048;
  int64_t num_pages = 64;

  // The logits after these tokens: a few dozen ids are likely, those that the tests' tokenizer
  // gives short and recurring texts; the others are not.
  void logits_after(uint64_t prefix_hash, std::vector<float>& logits) const;
  static uint64_t extend(uint64_t prefix_hash, int32_t token);
};

// How copies of pages end.
struct FakeCopies {
  bool late = false;       // some time later and in any order; otherwise at the next look
  int64_t fail_at = 0;     // the n-th fails; 0: none does
  int64_t fail_every = 0;  // and each of these
  std::atomic<int64_t>* count = nullptr;  // of those begun, if anybody wants to know
};

class FakeRunner : public LogitsRunner {
 public:
  explicit FakeRunner(const FakeModel& model, int max_steps_in_flight = 1);

  int64_t vocab_size() const override { return model_.vocab_size; }
  int64_t max_model_len() const override { return model_.max_model_len; }
  int64_t num_pages() const override { return model_.num_pages; }
  Result<ConstTensorView> forward(const ForwardBatch& batch) override;
  Result<std::span<const SampledToken>> finish() override;
  PageTransfer* page_transfer() override { return &transfer_; }
  bool is_lost() override { return lost; }

  // Called before each step; an error it returns is the step's.
  std::function<Result<>(const ForwardBatch&)> before_step;
  // Called when a step is finished; likewise.
  std::function<Result<>()> before_finish;
  bool lost = false;  // set by one of them, with an error: the device is gone
  FakeCopies copies;  // set before the first
  int64_t max_rows = 1 << 20, max_logit_rows = 1 << 20;  // what a batch may have

 private:
  void check(const ForwardBatch& batch);
  void write_rows(const ForwardBatch& batch);
  void spoil(int64_t step);
  uint64_t read_prefix(const ForwardBatch& batch, int64_t sequence, int32_t position) const;

  struct Cell {
    int32_t token = -1, position = -1;
    int64_t step = 0;  // when it was written
  };
  // Copies a page when it says that the copy has ended, as a device that works on would; until then
  // what is to be written holds nothing of use. A copy that fails writes nothing.
  class Transfer : public PageTransfer {
   public:
    Transfer(std::vector<Cell>& cache, const FakeCopies& copies)
        : cache_(&cache), copies_(&copies) {}
    int64_t page_bytes() const override { return kPageSize * sizeof(Cell); }
    void save(int32_t page, std::byte* host, int32_t id) override;
    void load(const std::byte* host, int32_t page, int32_t id) override;
    void take_ended(std::vector<EndedCopy>& ended, bool wait) override;

   private:
    struct Copy {
      int32_t id = 0;
      Cell* page = nullptr;
      std::byte* host = nullptr;
      bool is_save = false, fails = false;
    };
    void begin(Copy copy);
    std::vector<Cell>* cache_;
    const FakeCopies* copies_;
    std::vector<Copy> begun_;
    int64_t num_begun_ = 0;
    std::mt19937 random_{1};
  };
  Cell& cell(const ForwardBatch& batch, int64_t sequence, int32_t position);

  FakeModel model_;
  std::vector<Cell> cache_;  // [num_pages, kPageSize]
  Transfer transfer_{cache_, copies};
  int64_t step_ = 0;
  std::deque<int64_t> begun_steps_;  // and not finished
  std::vector<float> row_, logits_;
};

}  // namespace fathom
