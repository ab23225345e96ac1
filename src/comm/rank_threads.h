// For tests and benchmarks: ranks as threads of this process.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/group.h"

namespace fathom {

// What became of a rank's thread.
struct RankEnd {
  bool returned = false;
  bool comm_error = false;  // it ended by a CommError
  std::string what;         // the exception's text
};

// Runs body(group) on a thread for each of the groups; returns when all have ended.
inline std::vector<RankEnd> run_ranks(std::vector<std::unique_ptr<Group>>& groups,
                                      AbortWord& abort_word,
                                      const std::function<void(Group&)>& body) {
  std::vector<RankEnd> ends(groups.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < groups.size(); ++i) {
    threads.emplace_back([&, i] {
      Group& group = *groups[i];
      ends[i].returned = run_rank(abort_word, group.world_rank(group.rank()), [&] {
        try {
          body(group);
        } catch (const CommError& failure) {
          ends[i].comm_error = true;
          ends[i].what = failure.what();
          throw;
        } catch (const std::exception& failure) {
          ends[i].what = failure.what();
          throw;
        }
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ends;
}

// The same over new groups of `size` ranks.
inline std::vector<RankEnd> run_ranks(int size, const std::function<void(Group&)>& body,
                                      GroupOptions options = {}) {
  AbortWord abort_word;
  auto groups = make_local_groups(size, abort_word, std::move(options));
  return run_ranks(groups, abort_word, body);
}

}  // namespace fathom
