// A model for tests. Its logits are a hash of the sequence's own tokens, read back through a paged
// cache of tokens, one a lane, so a wrong page, position, chunk border or block table changes the
// output. It also checks that each batch is well formed. Test code only.
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
  int64_t num_pages = 64;  // of each lane
  int num_lanes = 1;

  // The logits after these tokens. A few dozen ids are likely, for which the fake tokenizer has
  // short and recurring texts.
  void logits_after(uint64_t prefix_hash, std::vector<float>& logits) const;
  static uint64_t extend(uint64_t prefix_hash, int32_t token);
};

// How and when page copies end.
struct FakeCopies {
  bool late = false;       // they end later and in any order; otherwise when they are next polled
  int64_t fail_at = 0;     // the n-th copy fails; 0: none
  int64_t fail_every = 0;  // every n-th copy fails; 0: none
  std::atomic<int64_t>* count = nullptr;  // counts the copies begun; may be null
  bool lets_rows_land = false;            // memory_of() is the page's memory
};

// How the runner drafts.
struct FakeDrafts {
  enum class Kind {
    kRight,        // the model's own logits
    kWrong,        // other ones
    kInTurns,      // the model's own at every other position
    kAdversarial,  // ends of sequence, stop ids and parts of stop strings, the vocabulary's last id
    kRepeating,    // 'a', again and again
  };
  int64_t most = 0;  // of a sequence in a step
  Kind kind = Kind::kRight;
};

class FakeRunner : public LogitsRunner {
 public:
  explicit FakeRunner(const FakeModel& model, int max_steps_in_flight = 1);

  int64_t vocab_size() const override { return model_.vocab_size; }
  int64_t max_model_len() const override { return model_.max_model_len; }
  int64_t num_pages() const override { return model_.num_pages; }
  int num_lanes() const override { return model_.num_lanes; }
  Result<ConstTensorView> forward(std::span<const ForwardBatch> lanes) override;
  int64_t max_drafts() const override { return drafts.most; }
  Result<ConstTensorView> draft_logits(std::span<const ForwardBatch> lanes,
                                       std::span<const std::vector<int32_t>> states) override;
  Result<std::span<const SampledToken>> finish() override;
  PageTransfer* page_transfer(int lane) override {
    return &lanes_[static_cast<size_t>(lane)].transfer;
  }
  bool can_copy_pages(int, int) const override { return can_copy; }
  void copy_page(int from_lane, int32_t from, int to_lane, int32_t to) override;
  bool is_lost() override { return lost; }

  // Called before each step with the batch of each lane that has rows; an error it returns fails
  // the step.
  std::function<Result<>(const ForwardBatch&)> before_step;
  // Called in finish(); an error it returns fails the step.
  std::function<Result<>()> before_finish;
  bool can_copy = true;  // pages between lanes
  bool lost = false;     // what is_lost() returns; set by a hook that also returns an error
  FakeCopies copies;     // set before the first copy
  FakeDrafts drafts;     // set before the first step
  int64_t max_rows = 1 << 20, max_logit_rows = 1 << 20;  // limits that check() enforces on a batch

 private:
  struct Cell {
    int32_t token = -1, position = -1;
    int64_t step = 0;  // the step that wrote it
    // The MTP layer's row: the token that it was made from.
    int32_t mtp_token = -1, mtp_position = -1;
  };
  using Cache = std::vector<Cell>;  // [num_pages, kPageSize]

  // Copies a page only when it reports the copy as ended, like a device that works asynchronously.
  // Until then the destination holds garbage. A failed copy writes nothing.
  class Transfer : public PageTransfer {
   public:
    Transfer(Cache& cache, const FakeCopies& copies) : cache_(&cache), copies_(&copies) {}
    int64_t page_bytes() const override { return kPageSize * sizeof(Cell); }
    void save(int32_t page, std::byte* host, int32_t id) override;
    void load(const std::byte* host, int32_t page, int32_t id) override;
    void take_ended(std::vector<EndedCopy>& ended, bool wait) override;
    // Only where copies neither are late nor fail.
    std::span<const std::byte> rows_in_place(int32_t page) const override;
    std::span<std::byte> memory_of(int32_t page) const override;

   private:
    struct Copy {
      int32_t id = 0;
      Cell* page = nullptr;
      std::byte* host = nullptr;
      bool is_save = false, fails = false;
    };
    void begin(Copy copy);
    static void forget_steps(Cell* page);
    Cache* cache_;
    const FakeCopies* copies_;
    std::vector<Copy> begun_;
    int64_t num_begun_ = 0;
    std::mt19937 random_{1};
  };
  struct Lane {
    Lane(int64_t num_pages, const FakeCopies& copies)
        : cache(static_cast<size_t>(num_pages * kPageSize)), transfer(cache, copies) {}
    Cache cache;
    Transfer transfer;
  };

  void check(const ForwardBatch& batch);
  void write_rows(const ForwardBatch& batch, Cache& cache);
  void write_mtp_rows(const ForwardBatch& batch, Cache& cache);
  void write_draft_rows(const ForwardBatch& batch, bool from_states, Cache& cache);
  void add_draft_logits(const ForwardBatch& batch, const Cache& cache);
  uint64_t read_mtp_prefix(const ForwardBatch& batch, const Cache& cache, int64_t sequence,
                           int32_t position);
  void add_logits(const ForwardBatch& batch, const Cache& cache);
  void spoil(int64_t step);
  static size_t cell_of(const ForwardBatch& batch, int64_t sequence, int32_t position);
  static uint64_t read_prefix(const ForwardBatch& batch, const Cache& cache, int64_t sequence,
                              int32_t position);

  FakeModel model_;
  std::deque<Lane> lanes_;
  int64_t step_ = 0;
  std::deque<int64_t> begun_steps_;  // begun and not finished
  std::vector<float> row_, logits_;
};

}  // namespace fathom
