// Sends the pages of prompts that are computed for another engine, as their steps end.
//
// A page goes when the step that computed its last row has ended well, so what is sent is never the
// work of a step that failed. A prompt's last page goes when all of its rows are there. Pages wait
// in the pool while the receiver's window is full. Where the host can read them there they are sent
// from there, and their sequence holds them until they are; from a device they are copied first.
//
// Owns no sequences and no pages. Engine thread only.
#pragma once

#include <memory>
#include <vector>

#include "engine/engine.h"
#include "engine/prefill_orders.h"
#include "engine/step_plan.h"
#include "transfer/lent_rows.h"

namespace fathom {

class PageExports {
 public:
  explicit PageExports(Runner& runner);

  // The entry's step has ended, of a sequence that is_prompt_only.
  void add(const StepEntry& entry);
  // The sequence ends.
  void remove(const Sequence& sequence) { std::erase(waiting_, &sequence); }

  struct Done {
    Sequence* sequence = nullptr;
    bool ok = false;  // otherwise a page could not be copied
  };
  // Sends what receivers take. Returns the sequences that are done, which the caller removes. Valid
  // until the next call.
  const std::vector<Done>& send();

  // Whether pages wait to be sent.
  bool empty() const { return waiting_.empty(); }
  int64_t pages_sent() const { return pages_sent_; }

 private:
  enum class State { kWaits, kSentAll, kFailed };
  State send_pages(Sequence& sequence);
  std::shared_ptr<LentRows> rows_of(HostCopies& copies, int32_t page);
  std::shared_ptr<LentRows> spare(size_t bytes);

  std::vector<HostCopies> copies_;  // [lanes]; none: the device cannot
  std::vector<Sequence*> waiting_;
  std::vector<std::shared_ptr<LentRows>> buffers_;  // of pages that were copied
  std::vector<Done> done_;
  int64_t pages_sent_ = 0;
};

}  // namespace fathom
