#include "comm/group.h"

#include <fmt/format.h>

#include <cstring>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/random.h"

namespace fathom {
namespace {

// Longer frames are a mistake of the sender.
constexpr uint64_t kMaxFrameBytes = uint64_t{1} << 40;
// A closed connection tells less than the reason for which its process closed it.
constexpr auto kReasonComesWithin = std::chrono::milliseconds(250);

// The same in all processes, and another one for another group.
uint64_t id_of(const GroupOptions& options) {
  uint64_t id = mix64(options.world_ranks.size());
  for (const int rank : options.world_ranks) id = mix64(id ^ static_cast<uint64_t>(rank));
  for (const char c : options.name) id = mix64(id ^ static_cast<unsigned char>(c));
  return id;
}

std::string seconds_text(std::chrono::nanoseconds time) {
  return fmt::format("{:.3g} s", std::chrono::duration<double>(time).count());
}

}  // namespace

Group::Group(int rank, std::shared_ptr<MeetingBoard> board, std::vector<int> local_of,
             RemoteRanks remote, AbortWord& abort_word, GroupOptions options)
    : rank_(rank),
      size_(static_cast<int>(options.world_ranks.size())),
      board_(std::move(board)),
      local_of_(std::move(local_of)),
      remote_(std::move(remote)),
      abort_word_(abort_word),
      options_(std::move(options)),
      gathered_(size_),
      id_(id_of(options_)) {
  FATHOM_CHECK(rank >= 0 && rank < size_ && static_cast<int>(local_of_.size()) == size_,
               "rank {} of {}", rank, size_);
  for (int other = 0; other < size_; ++other) {
    if (local_of_[other] < 0) remote_ranks_.push_back(other);
  }
  exchanges_.resize(remote_ranks_.size());
  received_ = std::vector<GrowingBuffer>(remote_ranks_.size());
  remote_last_ = std::vector<SharedRecord>(remote_ranks_.size());
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
  current_ = {current_.number + 1, kind, bytes, plan_};
  call_hook(MeetingPhase::kBefore);
  if (abort_word_.aborted()) throw_aborted();

  const auto deadline = MeetingBoard::Clock::now() + options_.limit;
  board_->arrive(local_of_[rank_], current_, mine, to_each);
  if (remote_ranks_.empty()) {
    call_hook(MeetingPhase::kIn);
  } else {
    exchange(mine, to_each, deadline);
  }
  switch (board_->wait(current_.number, deadline)) {
    case MeetingBoard::Outcome::kComplete:
      break;
    case MeetingBoard::Outcome::kAborted:
      throw_aborted();
    case MeetingBoard::Outcome::kTimedOut:
      fail_late();
  }
  for (int rank = 0; rank < size_; ++rank) {
    const int local = local_of_[rank];
    if (local >= 0) gathered_[rank] = board_->given(local, current_.number, rank_);
  }
  for (int rank = 0; rank < size_; ++rank) {
    const int local = local_of_[rank];
    if (local < 0) continue;
    check_same(rank, board_->record(local, current_.number), gathered_[rank].size(),
               gathered_[rank_].size());
  }
  call_hook(MeetingPhase::kAfter);
  return gathered_;
}

void Group::call_hook(MeetingPhase phase) {
  if (options_.at_meeting) options_.at_meeting({rank_, current_.kind, current_.number, phase});
}

void Group::exchange(const ConstBytes* mine, std::span<const ConstBytes> to_each,
                     MeetingBoard::Clock::time_point deadline) {
  const size_t for_me = mine != nullptr ? mine->size() : to_each[rank_].size();
  for (size_t i = 0; i < exchanges_.size(); ++i) {
    const int rank = remote_ranks_[i];
    PeerLinks::Exchange& exchange = exchanges_[i];
    exchange.peer = world_rank(rank);
    exchange.given = mine != nullptr ? *mine : to_each[rank];
    exchange.out = FrameHeader{};
    exchange.out.kind = static_cast<uint32_t>(current_.kind);
    exchange.out.epoch = remote_.epoch;
    exchange.out.group = id_;
    exchange.out.number = current_.number;
    exchange.out.total_bytes = current_.bytes;
    exchange.out.bytes = exchange.given.size();
    exchange.out.plan = current_.plan;
    options_.name.copy(exchange.out.group_name, sizeof exchange.out.group_name);
    exchange.buffer = &received_[i];
    exchange.sent = exchange.got = 0;
  }
  size_t closed = 0;
  const auto on_header = [&](size_t i) {
    check_header(remote_ranks_[i], exchanges_[i], for_me);
    if (i == 0) call_hook(MeetingPhase::kIn);
  };
  switch (remote_.links->exchange(exchanges_, deadline, on_header, &closed)) {
    case PeerLinks::Outcome::kComplete:
      break;
    case PeerLinks::Outcome::kAborted:
      throw_aborted();
    case PeerLinks::Outcome::kTimedOut:
      fail_late();
    case PeerLinks::Outcome::kClosed: {
      if (remote_.links->await_abort(kReasonComesWithin)) throw_aborted();
      const int rank = exchanges_[closed].peer;
      fail(rank, Code::kUnavailable,
           fmt::format("rank {} closed its connection while rank {} was in {} (its last: {})", rank,
                       world_rank(rank_), describe(current_),
                       to_string(last_of(remote_ranks_[closed]))));
    }
  }
  for (size_t i = 0; i < exchanges_.size(); ++i) {
    gathered_[remote_ranks_[i]] = exchanges_[i].received;
  }
}

void Group::check_header(int rank, const PeerLinks::Exchange& exchange, size_t bytes_for_me) {
  const FrameHeader& header = exchange.in;
  if (header.magic != FrameHeader::kMagic || header.epoch != remote_.epoch ||
      header.kind >= kNumCollectives || header.bytes > header.total_bytes ||
      header.total_bytes > kMaxFrameBytes) {
    fail(exchange.peer, Code::kInternal,
         fmt::format("rank {} sent what is no frame of this world while rank {} was in {}",
                     exchange.peer, world_rank(rank_), describe(current_)));
  }
  if (header.group != id_) {
    const std::string_view name(header.group_name,
                                strnlen(header.group_name, sizeof header.group_name));
    fail(-1, Code::kInternal,
         fmt::format("rank {} is in {} of group {}, this rank {} in {} of group {}", exchange.peer,
                     to_string(header.record()), name, world_rank(rank_), to_string(current_),
                     options_.name));
  }
  for (size_t i = 0; i < remote_ranks_.size(); ++i) {
    if (remote_ranks_[i] == rank) remote_last_[i].set(header.record());
  }
  check_same(rank, header.record(), header.bytes, bytes_for_me);
}

void Group::check_same(int rank, const CollectiveRecord& theirs, size_t bytes,
                       size_t bytes_for_me) {
  const bool same = theirs.number == current_.number && theirs.kind == current_.kind;
  if (same && theirs.plan != current_.plan) {
    fail(-1, Code::kInternal,
         fmt::format("rank {} came to {} with plan {:016x}, this rank {} with plan {:016x}",
                     world_rank(rank), describe(theirs), theirs.plan, world_rank(rank_),
                     current_.plan));
  }
  if (same && !needs_equal_bytes(current_.kind)) return;
  if (same && theirs.bytes == current_.bytes && bytes == bytes_for_me) return;
  const std::string part =
      same && theirs.bytes == current_.bytes
          ? fmt::format("; it gave this one {} bytes of them instead of {}", bytes, bytes_for_me)
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
  if (late.empty()) text = "bytes on their way";
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
  throw_abort(abort_word_, fmt::format("rank {} was in {}", world_rank(rank_), describe(current_)));
}

void Group::abort(Status status) { abort_word_.abort(world_rank(rank_), std::move(status)); }

CollectiveRecord Group::last_of(int rank) const {
  if (local_of_[rank] >= 0) return board_->last_of(local_of_[rank]);
  for (size_t i = 0; i < remote_ranks_.size(); ++i) {
    if (remote_ranks_[i] == rank) return remote_last_[i].get();
  }
  return {};
}

std::vector<std::unique_ptr<Group>> make_local_groups(int size, AbortWord& abort_word,
                                                      GroupOptions options) {
  FATHOM_CHECK(size >= 1, "a group of {} ranks", size);
  if (options.world_ranks.empty()) {
    options.world_ranks.resize(size);
    std::iota(options.world_ranks.begin(), options.world_ranks.end(), 0);
  }
  FATHOM_CHECK(static_cast<int>(options.world_ranks.size()) == size, "{} world ranks of {}",
               options.world_ranks.size(), size);
  std::vector<int> local_of(size);
  std::iota(local_of.begin(), local_of.end(), 0);
  const auto board = std::make_shared<MeetingBoard>(size, abort_word);
  std::vector<std::unique_ptr<Group>> groups;
  groups.reserve(size);
  for (int rank = 0; rank < size; ++rank) {
    groups.push_back(
        std::make_unique<Group>(rank, board, local_of, RemoteRanks{}, abort_word, options));
  }
  return groups;
}

}  // namespace fathom
