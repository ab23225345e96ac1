#include "comm/abort_word.h"

#include "base/check.h"

namespace fathom {

AbortWord::~AbortWord() {
  FATHOM_CHECK(watchers_.empty(), "an abort word ends before those that watch it");
}

bool AbortWord::abort(int rank, Status status) {
  const std::lock_guard lock(mutex_);
  if (aborted_.load(std::memory_order_relaxed)) return false;
  reason_ = Reason{rank, std::move(status)};
  aborted_.store(true);
  for (const auto& [id, wake] : watchers_) wake();
  return true;
}

const AbortWord::Reason& AbortWord::reason() const {
  FATHOM_CHECK(aborted(), "the reason of an abort that did not happen");
  return reason_;
}

int AbortWord::watch(std::function<void()> wake) {
  const std::lock_guard lock(mutex_);
  if (aborted_.load(std::memory_order_relaxed)) wake();
  watchers_.emplace(next_id_, std::move(wake));
  return next_id_++;
}

void AbortWord::unwatch(int id) {
  const std::lock_guard lock(mutex_);
  watchers_.erase(id);
}

void throw_abort(const AbortWord& word, const std::string& doing) {
  const AbortWord::Reason& reason = word.reason();
  const std::string who =
      reason.rank >= 0 ? fmt::format("rank {} failed: ", reason.rank) : std::string();
  throw CommError(
      Status{reason.status.code, fmt::format("{}{} ({})", who, reason.status.message, doing)},
      reason.rank);
}

}  // namespace fathom
