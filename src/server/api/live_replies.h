// The generating requests that are being answered, by their ids: for /abort_request and for a
// server that stops. A request has the id of its X-Request-Id and the one in its answer.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "server/api/live_reply.h"

namespace fathom {

// Any thread.
class LiveReplies {
 public:
  void add(std::string id, const std::shared_ptr<LiveReply>& reply);

  // Aborts the requests of that id; how many there were. Empty: all.
  int64_t abort(const std::string& id);

  // Of those that have not been answered, each once.
  std::vector<std::string> ids();

  // Ends all with an error.
  void fail_all(const ApiError& error);

 private:
  std::vector<std::shared_ptr<LiveReply>> find(const std::string& id);

  std::mutex mutex_;
  std::unordered_multimap<std::string, std::weak_ptr<LiveReply>> replies_;
  size_t next_sweep_ = 64;  // entries at which those that have gone are dropped
};

}  // namespace fathom
