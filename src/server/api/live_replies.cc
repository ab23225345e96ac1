#include "server/api/live_replies.h"

#include <algorithm>

namespace fathom {
namespace {

constexpr http::Caller kServerItself = {.key = -1, .is_admin = true};

}  // namespace

void LiveReplies::add(std::string id, const http::Caller& owner,
                      const std::shared_ptr<LiveReply>& reply) {
  const std::lock_guard lock(mutex_);
  if (replies_.size() >= next_sweep_) {
    std::erase_if(replies_, [](const auto& entry) { return entry.second.reply.expired(); });
    next_sweep_ = std::max<size_t>(64, 2 * replies_.size());
  }
  replies_.emplace(std::move(id), Entry{owner, reply});
}

std::vector<std::shared_ptr<LiveReply>> LiveReplies::find(const std::string& id,
                                                          const http::Caller& caller) {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<LiveReply>> found;
  const auto [begin, end] =
      id.empty() ? std::pair(replies_.begin(), replies_.end()) : replies_.equal_range(id);
  for (auto entry = begin; entry != end; ++entry) {
    auto reply = entry->second.reply.lock();
    if (reply && caller.may_touch(entry->second.owner) &&
        std::ranges::find(found, reply) == found.end())
      found.push_back(std::move(reply));
  }
  return found;
}

int64_t LiveReplies::abort(const std::string& id, const http::Caller& caller) {
  int64_t count = 0;
  for (const auto& reply : find(id, caller)) count += reply->abort() ? 1 : 0;
  return count;
}

std::vector<std::string> LiveReplies::ids() {
  std::vector<std::string> ids;
  for (const auto& reply : find({}, kServerItself)) ids.push_back(reply->id());
  return ids;
}

void LiveReplies::fail_all(const ApiError& error) {
  for (const auto& reply : find({}, kServerItself)) reply->fail(error);
}

}  // namespace fathom
