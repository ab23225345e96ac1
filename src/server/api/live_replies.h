// Registry of generating requests in flight, by id, for /abort_request and for shutdown. A request
// has two ids: its X-Request-Id and the id in its response. Several may share an X-Request-Id,
// because clients choose it. A request belongs to the key that created it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "server/api/live_reply.h"
#include "server/http/message.h"

namespace fathom {

// Any thread may call.
class LiveReplies {
 public:
  void add(std::string id, const http::Caller& owner, const std::shared_ptr<LiveReply>& reply);

  // Aborts the requests with that id that `caller` may touch; empty: with any id. Returns their
  // number.
  int64_t abort(const std::string& id, const http::Caller& caller);

  // Returns the ids of unanswered requests, each once.
  std::vector<std::string> ids();

  // Ends all requests with an error.
  void fail_all(const ApiError& error);

 private:
  struct Entry {
    http::Caller owner;
    std::weak_ptr<LiveReply> reply;
  };
  std::vector<std::shared_ptr<LiveReply>> find(const std::string& id, const http::Caller& caller);

  std::mutex mutex_;
  std::unordered_multimap<std::string, Entry> replies_;
  size_t next_sweep_ = 64;  // number of entries at which expired ones are erased
};

}  // namespace fathom
