#include "server/api/live_replies.h"

#include <algorithm>

namespace fathom {

void LiveReplies::add(std::string id, const std::shared_ptr<LiveReply>& reply) {
  const std::lock_guard lock(mutex_);
  if (replies_.size() >= next_sweep_) {
    std::erase_if(replies_, [](const auto& entry) { return entry.second.expired(); });
    next_sweep_ = std::max<size_t>(64, 2 * replies_.size());
  }
  replies_.emplace(std::move(id), reply);
}

std::vector<std::shared_ptr<LiveReply>> LiveReplies::find(const std::string& id) {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<LiveReply>> found;
  const auto [begin, end] =
      id.empty() ? std::pair(replies_.begin(), replies_.end()) : replies_.equal_range(id);
  for (auto entry = begin; entry != end; ++entry) {
    auto reply = entry->second.lock();
    if (reply && std::ranges::find(found, reply) == found.end()) found.push_back(std::move(reply));
  }
  return found;
}

int64_t LiveReplies::abort(const std::string& id) {
  int64_t count = 0;
  for (const auto& reply : find(id)) count += reply->abort() ? 1 : 0;
  return count;
}

std::vector<std::string> LiveReplies::ids() {
  std::vector<std::string> ids;
  for (const auto& reply : find({})) ids.push_back(reply->id());
  return ids;
}

void LiveReplies::fail_all(const ApiError& error) {
  for (const auto& reply : find({})) reply->fail(error);
}

}  // namespace fathom
