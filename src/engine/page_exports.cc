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
  PageExport& page_export = *sequence.request->request.page_export;
  const bool is_whole = sequence.final_rows == sequence.len();
  const int64_t ready =
      is_whole ? ceil_div(sequence.len(), kPageSize) : sequence.final_rows / kPageSize;
  for (; sequence.pages_sent < ready; ++sequence.pages_sent, ++pages_sent_) {
    const int64_t index = sequence.pages_sent;
    auto rows = rows_of(copies, sequence.pages[static_cast<size_t>(index)]);
    if (rows == nullptr) return State::kFailed;
    if (!page_export.send(index, std::move(rows), sequence.usage.cached_tokens)) {
      return State::kWaits;
    }
  }
  return is_whole && !page_export.has_lent() ? State::kSentAll : State::kWaits;
}

// Null: the copy has failed.
std::shared_ptr<LentRows> PageExports::rows_of(HostCopies& copies, int32_t page) {
  const std::span<const std::byte> in_place = copies.rows_in_place(page);
  if (!in_place.empty()) return std::make_shared<LentRows>(in_place);
  auto buffer = spare(static_cast<size_t>(copies.page_bytes()));
  return copies.save(page, buffer->own()) ? buffer : nullptr;
}

// A buffer that nobody reads any more, or a new one.
std::shared_ptr<LentRows> PageExports::spare(size_t bytes) {
  for (const auto& buffer : buffers_) {
    if (!buffer->is_lent()) return buffer;
  }
  return buffers_.emplace_back(std::make_shared<LentRows>(std::vector<std::byte>(bytes)));
}

}  // namespace fathom
