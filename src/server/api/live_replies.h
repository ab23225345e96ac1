// The generating requests that are being answered, by their ids: for /abort_request and for a
// server that stops. A request has the id of its X-Request-Id and the one in its answer; several
// may have the same X-Request-Id, because clients choose it. A request belongs to the key that made
// it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "server/api/live_reply.h"
#include "server/http/message.h"

namespace fathom {

// Any thread.
class LiveReplies {
 public:
  void add(std::string id, const http::Caller& owner, const std::shared_ptr<LiveReply>& reply);

  // Aborts the requests of that id that `caller` may touch; how many there were. Empty: of any id.
  int64_t abort(const std::string& id, const http::Caller& caller);

  // Ids of the requests that have not been answered, each once.
  std::vector<std::string> ids();

  // Ends all with an error.
  void fail_all(const ApiError& error);

 private:
  struct Entry {
    http::Caller owner;
    std::weak_ptr<LiveReply> reply;
  };
  std::vector<std::shared_ptr<LiveReply>> find(const std::string& id, const http::Caller& caller);

  std::mutex mutex_;
  std::unordered_multimap<std::string, Entry> replies_;
  size_t next_sweep_ = 64;  // entries at which those that have gone are dropped
};

}  // namespace fathom
