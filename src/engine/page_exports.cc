#include "engine/page_exports.h"

#include <algorithm>
#include <new>

#include "base/math.h"
#include "cache/latent_layout.h"

namespace fathom {

PageExports::PageExports(Runner& runner) {
  for (int lane = 0; lane < runner.num_lanes(); ++lane) {
    PageTransfer* const transfer = runner.page_transfer(lane);
    if (transfer != nullptr) copies_.emplace_back(*transfer);
  }
}

// An entry of an earlier run says nothing about this one's pages.
void PageExports::add(const StepEntry& entry) {
  Sequence& sequence = *entry.sequence;
  if (sequence.phase != Sequence::Phase::kRunning ||
      entry.preemptions != sequence.usage.preemptions) {
    return;
  }
  sequence.final_rows = entry.end;
  if (std::find(waiting_.begin(), waiting_.end(), &sequence) == waiting_.end()) {
    waiting_.push_back(&sequence);
  }
}

const std::vector<PageExports::Done>& PageExports::send() {
  done_.clear();
  done_.reserve(waiting_.size());  // nothing below throws
  std::erase_if(waiting_, [&](Sequence* sequence) {
    State state = State::kFailed;
    try {
      state = send_pages(*sequence);
    } catch (const std::bad_alloc&) {  // of a receiver
    }
    if (state == State::kWaits) {
      const int64_t ready = sequence->final_rows / kPageSize;
      return sequence->pages_sent >= ready && sequence->final_rows < sequence->len();
    }
    done_.push_back({sequence, state == State::kSentAll});
    return true;
  });
  return done_;
}

PageExports::State PageExports::send_pages(Sequence& sequence) {
  HostCopies& copies = copies_[static_cast<size_t>(sequence.lane)];
  rows_.resize(static_cast<size_t>(copies.page_bytes()));
  const bool is_whole = sequence.final_rows == sequence.len();
  const int64_t ready =
      is_whole ? ceil_div(sequence.len(), kPageSize) : sequence.final_rows / kPageSize;
  for (; sequence.pages_sent < ready; ++sequence.pages_sent, ++pages_sent_) {
    const int64_t index = sequence.pages_sent;
    if (!copies.save(sequence.pages[static_cast<size_t>(index)], rows_)) return State::kFailed;
    if (!sequence.request->request.page_export->send(index, rows_, sequence.usage.cached_tokens)) {
      return State::kWaits;
    }
  }
  return is_whole ? State::kSentAll : State::kWaits;
}

}  // namespace fathom
