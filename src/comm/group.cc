#include "comm/group.h"

#include <fmt/format.h>

#include <numeric>
#include <utility>

#include "base/check.h"

namespace fathom {
namespace {

std::string seconds_text(std::chrono::nanoseconds time) {
  return fmt::format("{:.3g} s", std::chrono::duration<double>(time).count());
}

}  // namespace

Group::Group(int rank, std::shared_ptr<MeetingBoard> board, AbortWord& abort_word,
             GroupOptions options)
    : rank_(rank),
      size_(static_cast<int>(options.world_ranks.size())),
      board_(std::move(board)),
      abort_word_(abort_word),
      options_(std::move(options)),
      gathered_(size_) {
  FATHOM_CHECK(rank >= 0 && rank < size_, "rank {} of {}", rank, size_);
}

std::span<const ConstBytes> Group::meet(Collective kind, ConstBytes mine) {
  return meet(kind, &mine, {});
}

std::span<const ConstBytes> Group::meet(Collective kind, std::span<const ConstBytes> to_each) {
  FATHOM_CHECK(static_cast<int>(to_each.size()) == size_, "{} spans for {} ranks", to_each.size(),
               size_);
  return meet(kind, nullptr, to_each);
}

std::span<const ConstBytes> Group::meet(Collective kind, const ConstBytes* mine,
                                        std::span<const ConstBytes> to_each) {
  size_t bytes = mine != nullptr ? mine->size() : 0;
  for (const ConstBytes& part : to_each) bytes += part.size();
  current_ = {current_.number + 1, kind, bytes};
  if (options_.before_meeting) options_.before_meeting(rank_, kind, current_.number);
  if (abort_word_.aborted()) throw_aborted();

  const auto deadline = MeetingBoard::Clock::now() + options_.limit;
  board_->arrive(rank_, current_, mine, to_each);
  switch (board_->wait(current_.number, deadline)) {
    case MeetingBoard::Outcome::kComplete:
      break;
    case MeetingBoard::Outcome::kAborted:
      throw_aborted();
    case MeetingBoard::Outcome::kTimedOut:
      fail_late();
  }
  for (int rank = 0; rank < size_; ++rank) {
    gathered_[rank] = board_->given(rank, current_.number, rank_);
  }
  for (int rank = 0; rank < size_; ++rank) {
    check_same(rank, board_->record(rank, current_.number), gathered_[rank].size());
  }
  return gathered_;
}

void Group::check_same(int rank, const CollectiveRecord& theirs, size_t bytes_for_me) {
  const bool same = theirs.number == current_.number && theirs.kind == current_.kind;
  if (same && !needs_equal_bytes(current_.kind)) return;
  if (same && theirs.bytes == current_.bytes && bytes_for_me == gathered_[rank_].size()) return;
  const std::string part = same && theirs.bytes == current_.bytes
                               ? fmt::format("; it gave this one {} bytes of them instead of {}",
                                             bytes_for_me, gathered_[rank_].size())
                               : "";
  fail(-1, Code::kInternal,
       fmt::format("rank {} is in {}, this rank {} in {}{}", world_rank(rank), describe(theirs),
                   world_rank(rank_), describe(current_), part));
}

void Group::fail_bytes(int rank, size_t bytes, size_t expected) {
  fail(-1, Code::kInternal,
       fmt::format("rank {} gave {} bytes in {} where this rank {} expected {}", world_rank(rank),
                   bytes, describe(current_), world_rank(rank_), expected));
}

std::string Group::describe(const CollectiveRecord& record) const {
  if (options_.name == "world") return to_string(record);
  return fmt::format("{} of group {}", to_string(record), options_.name);
}

std::vector<int> Group::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (last_of(rank).number < current_.number) ranks.push_back(rank);
  }
  return ranks;
}

void Group::fail_late() {
  const std::vector<int> late = missing();
  std::string text;
  for (const int rank : late) {
    text += fmt::format("{}rank {} (last: {})", text.empty() ? "" : ", ", world_rank(rank),
                        to_string(last_of(rank)));
  }
  fail(late.size() == 1 ? world_rank(late[0]) : -1, Code::kUnavailable,
       fmt::format("rank {} waited {} in {} for {}", world_rank(rank_),
                   seconds_text(options_.limit), describe(current_), text));
}

void Group::fail(int failed_rank, Code code, std::string message) {
  const Status status{code, std::move(message)};
  abort_word_.abort(failed_rank, status);
  throw CommError(status, failed_rank);
}

void Group::throw_aborted() {
  const AbortWord::Reason& reason = abort_word_.reason();
  const std::string who =
      reason.rank >= 0 ? fmt::format("rank {} failed: ", reason.rank) : std::string();
  throw CommError(
      Status{reason.status.code, fmt::format("{}{} (rank {} was in {})", who, reason.status.message,
                                             world_rank(rank_), describe(current_))},
      reason.rank);
}

void Group::abort(Status status) { abort_word_.abort(world_rank(rank_), std::move(status)); }

CollectiveRecord Group::last_of(int rank) const { return board_->last_of(rank); }

std::vector<std::unique_ptr<Group>> make_local_groups(int size, AbortWord& abort_word,
                                                      GroupOptions options) {
  FATHOM_CHECK(size >= 1, "a group of {} ranks", size);
  if (options.world_ranks.empty()) {
    options.world_ranks.resize(size);
    std::iota(options.world_ranks.begin(), options.world_ranks.end(), 0);
  }
  FATHOM_CHECK(static_cast<int>(options.world_ranks.size()) == size, "{} world ranks of {}",
               options.world_ranks.size(), size);
  const auto board = std::make_shared<MeetingBoard>(size, abort_word);
  std::vector<std::unique_ptr<Group>> groups;
  for (int rank = 0; rank < size; ++rank) {
    groups.push_back(std::make_unique<Group>(rank, board, abort_word, options));
  }
  return groups;
}

}  // namespace fathom
