// One rank's end of a set of ranks that meet.
//
// A rank is a thread that computes its share of a model. meet() is the one primitive: each rank
// gives bytes and gets everyone's. comm/collectives.h builds sums and gathers on it.
//
// All ranks of a group call the same collectives in the same order. Ranks that share two groups
// meet in the same order in both. What breaks this rule ends in a CommError that names both sides,
// at the latest after the group's limit; it never hangs.
//
// Ranks of one process share memory: what one gives is read in place. Ranks of different processes
// are joined by TCP (comm/world.h).
//
// A Group belongs to its rank's thread. last_of() and abort() are for any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/abort_word.h"
#include "comm/collective.h"
#include "comm/meeting_board.h"
#include "comm/peer_links.h"

namespace fathom {

// Where a rank is in a meeting: before it has come; in it, when it has given its part (and, if
// there are ranks of other processes, the first of them has been heard of); and after all have met.
enum class MeetingPhase { kBefore, kIn, kAfter };
struct MeetingPoint {
  int rank = 0;  // in the group
  Collective kind = Collective::kBarrier;
  uint64_t number = 0;
  MeetingPhase phase = MeetingPhase::kBefore;
};
using MeetingHook = std::function<void(const MeetingPoint&)>;

struct GroupOptions {
  // For messages: "world", "tp 1".
  std::string name = "world";
  // The world's number of each rank of the group, ascending. Empty: 0 … size - 1. Messages name
  // ranks by these.
  std::vector<int> world_ranks = {};
  // How long a rank waits in one collective before it gives up. Ranks that are further apart, as
  // when they load weights, meet in a group of its own with a longer limit.
  std::chrono::nanoseconds limit = std::chrono::seconds(30);
  // For tests: called on the rank's thread at points of each of its meetings. May sleep or throw.
  MeetingHook at_meeting = {};
};

// How a rank reaches the ranks of its group that are in other processes.
struct RemoteRanks {
  std::shared_ptr<PeerLinks> links;
  uint64_t epoch = 0;  // of the world
};

class Group {
 public:
  // Rank `rank` of a group. local_of[r]: which rank of `board` the group's rank r is, -1 if it is
  // in another process.
  Group(int rank, std::shared_ptr<MeetingBoard> board, std::vector<int> local_of,
        RemoteRanks remote, AbortWord& abort_word, GroupOptions options);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return options_.name; }
  // Whether some ranks are in other processes than others.
  bool spans_processes() const { return !remote_ranks_.empty(); }
  // The world's number of a rank of this group.
  int world_rank(int rank) const { return options_.world_ranks[rank]; }

  // Gives `mine` to all ranks. Returns size() spans: what each rank gave.
  //
  // The result is valid until this rank enters its next meeting of this group. What was given must
  // stay unchanged until this rank's next meeting of this group returns, which proves that everyone
  // has read it: who gives memory that it will not keep meets once more (a barrier) before it
  // leaves. Throws CommError.
  std::span<const ConstBytes> meet(Collective kind, ConstBytes mine);
  // Gives to_each[r] to rank r. Returns size() spans: what each rank gave to this one. The array
  // to_each itself may change on return.
  std::span<const ConstBytes> meet(Collective kind, std::span<const ConstBytes> to_each);

  // From the next meeting on, ranks whose plans differ end in an error that names both: a hash of
  // what all ranks of the group must have decided alike for the step that they compute.
  void set_plan(uint64_t plan) { plan_ = plan; }

  // Room for `bytes` bytes, aligned to 64, that may be given in the next meeting and needs no care
  // after it: two buffers that grow, in turns from meeting to meeting.
  std::span<std::byte> staging(size_t bytes) {
    return board_->staging(local_of_[rank_], current_.number + 1, bytes);
  }

  // Ends all collectives of this process and of all that it is joined with: this rank failed.
  void abort(Status status);
  // Sets the abort word and throws: in the last meeting `rank` gave `bytes` bytes where this rank,
  // by what all ranks know, expected `expected`.
  [[noreturn]] void fail_bytes(int rank, size_t bytes, size_t expected);

  // Which collective of this group a rank is in or was in last; of a rank in another process, as
  // far as this rank has heard. Any thread.
  CollectiveRecord last_of(int rank) const;

 private:
  std::span<const ConstBytes> meet(Collective kind, const ConstBytes* mine,
                                   std::span<const ConstBytes> to_each);
  // Meets the ranks of other processes.
  void exchange(const ConstBytes* mine, std::span<const ConstBytes> to_each,
                MeetingBoard::Clock::time_point deadline);
  // Checks the frame that a rank of another process sends, before its bytes are received.
  void check_header(int rank, const PeerLinks::Exchange& exchange, size_t bytes_for_me);
  // Compares what the rank came with to what this rank came with.
  void check_same(int rank, const CollectiveRecord& theirs, size_t bytes, size_t bytes_for_me);
  // "all_reduce #118 (14336 bytes)", with the group's name unless it is the world.
  std::string describe(const CollectiveRecord& record) const;
  // The ranks that have not come to the current meeting.
  std::vector<int> missing() const;
  [[noreturn]] void fail_late();
  // Sets the abort word to this failure and throws it.
  [[noreturn]] void fail(int failed_rank, Code code, std::string message);
  void call_hook(MeetingPhase phase);
  // Throws the process's abort as this rank meets it.
  [[noreturn]] void throw_aborted();

  const int rank_, size_;
  const std::shared_ptr<MeetingBoard> board_;
  const std::vector<int> local_of_;
  const RemoteRanks remote_;
  AbortWord& abort_word_;
  GroupOptions options_;
  CollectiveRecord current_;
  uint64_t plan_ = 0;
  std::vector<ConstBytes> gathered_;  // [size], the result of the last meeting

  // For ranks of other processes, in the group's order.
  uint64_t id_ = 0;                // of the group, in frames
  std::vector<int> remote_ranks_;  // their numbers in the group
  std::vector<PeerLinks::Exchange> exchanges_;
  std::vector<GrowingBuffer> received_;
  std::vector<SharedRecord> remote_last_;
};

// All ranks of a group of `size` ranks in this process. The abort word outlives them.
std::vector<std::unique_ptr<Group>> make_local_groups(int size, AbortWord& abort_word,
                                                      GroupOptions options = {});

}  // namespace fathom
