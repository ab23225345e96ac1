// What the engine's thread takes from engines that compute its prompts, and sends to those whose
// prompts it computes; part of EngineLoop (engine_loop.h).
#include <fmt/format.h>

#include <new>

#include "base/out_of_memory.h"
#include "engine/engine_loop.h"

namespace fathom {
namespace {

// How long the engine sleeps when all it has waits for another engine: at most so long until it
// looks for orders that nobody answers, and for room in a window.
constexpr std::chrono::milliseconds kPeerPoll(20), kWindowPoll(1);

}  // namespace

// Out of memory loses pieces; their orders fail when nothing more comes for them.
void EngineLoop::take_pieces() {
  try {
    for (const Lanes::Stranded& stranded : lanes_.take_pieces()) {
      end_early(*stranded.sequence, FinishReason::kError,
                {Code::kUnavailable,
                 fmt::format("the prompt cannot be computed: {}", stranded.why.message)});
    }
  } catch (const std::bad_alloc&) {
  }
}

// Ends the prompts whose pages have all gone to another engine.
void EngineLoop::send_pages() {
  if (exports_.empty()) return;
  std::span<const PageExports::Done> ended;
  try {
    ended = exports_.send();
  } catch (const std::bad_alloc&) {
    return;  // the next step's end sends them
  }
  for (const PageExports::Done& done : ended) {
    if (!done.ok) {
      end_early(*done.sequence, FinishReason::kError,
                {Code::kInternal, "a page could not be copied to host memory"});
      continue;
    }
    Event& event = new_event(*done.sequence);
    event.finish = FinishReason::kStop;
    emit(*done.sequence, event);
  }
}

// Pieces that come, and requests, end the wait; room in a receiver's window does not.
void EngineLoop::wait_for_peer() {
  ++peer_waits_;
  if (lanes_.awaits_pieces()) inbox_.wait(kPeerPoll);
  if (!exports_.empty()) inbox_.wait(kWindowPoll);
}

void EngineLoop::export_rows(const StepEntry& entry) {
  try {
    exports_.add(entry);
  } catch (const std::bad_alloc&) {
    end_early(*entry.sequence, FinishReason::kError, out_of_memory());
  }
}

}  // namespace fathom
