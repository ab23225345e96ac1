// One word of a process that says that its ranks must stop, and why.
//
// A rank that fails sets it; every wait of every group of the process watches it and ends with a
// CommError. The first reason stays. It is never cleared: a process whose ranks have stopped ends,
// and whoever started it starts it again.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/status.h"

namespace fathom {

// What a collective throws when it cannot be completed. By then the process's AbortWord is set.
class CommError : public std::runtime_error {
 public:
  // failed_rank: in the world's numbers; -1 if no single rank is known to have failed.
  CommError(Status status, int failed_rank)
      : std::runtime_error(status.message), status_(std::move(status)), failed_rank_(failed_rank) {}

  const Status& status() const { return status_; }
  int failed_rank() const { return failed_rank_; }

 private:
  Status status_;
  int failed_rank_;
};

class AbortWord {
 public:
  struct Reason {
    int rank = -1;  // in the world's numbers; -1: no single rank
    Status status;
  };

  AbortWord() = default;
  ~AbortWord();
  AbortWord(const AbortWord&) = delete;
  AbortWord& operator=(const AbortWord&) = delete;

  // Stops the ranks of this process. Returns whether this reason is the first. Any thread.
  bool abort(int rank, Status status);

  // Any thread; costs a load.
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  // Valid once aborted() is true.
  const Reason& reason() const;

  // Calls `wake` once when the word is set, on the thread that sets it; at once if it is set
  // already. `wake` must not block and must not use this object.
  int watch(std::function<void()> wake);
  // On return `wake` is not running and will not run.
  void unwatch(int id);

 private:
  std::atomic<bool> aborted_{false};
  Reason reason_;  // written once, before aborted_
  std::mutex mutex_;
  std::map<int, std::function<void()>> watchers_;
  int next_id_ = 0;
};

// Throws the reason of an abort as a CommError; `doing` tells what it ended: "rank 0 was in …".
[[noreturn]] void throw_abort(const AbortWord& word, const std::string& doing);

// Calls body() as a rank's thread does: what it throws sets the word with the rank's number, and
// goes no further. Returns whether the body returned.
template <typename Body>
bool run_rank(AbortWord& word, int rank, Body&& body) {
  try {
    std::forward<Body>(body)();
    return true;
  } catch (const CommError& failure) {
    word.abort(failure.failed_rank(), failure.status());
  } catch (const std::exception& failure) {
    word.abort(rank, Status{Code::kInternal, failure.what()});
  } catch (...) {
    word.abort(rank, Status{Code::kInternal, "an exception that is no std::exception"});
  }
  return false;
}

}  // namespace fathom
