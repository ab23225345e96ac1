#include "router/replica_set.h"

#include <algorithm>

#include "base/entropy.h"
#include "server/http/host.h"

namespace fathom::router {
namespace {

bool was_tried(const std::vector<int64_t>& tried, const Replica& replica) {
  return std::find(tried.begin(), tried.end(), replica.number) != tried.end();
}

// Marsaglia's xorshift64.
uint64_t next_random(uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

}  // namespace

ReplicaSet::ReplicaSet(boost::asio::io_context& context, const RouterOptions& options)
    : context_(context),
      policy_(options.policy),
      breaker_(options.breaker),
      tree_(options.max_tree_bytes),
      random_(unpredictable_bits() | 1) {}

std::vector<std::shared_ptr<Replica>>::iterator ReplicaSet::find(const client::Endpoint& endpoint) {
  return std::find_if(replicas_.begin(), replicas_.end(), [&](const auto& replica) {
    const client::Endpoint& other = replica->connections->endpoint();
    return other.host == endpoint.host && other.port == endpoint.port;
  });
}

Result<std::shared_ptr<Replica>> ReplicaSet::add(const client::Endpoint& endpoint) {
  if (const auto known = find(endpoint); known != replicas_.end()) {
    (*known)->draining = false;
    return *known;
  }
  if (std::ssize(replicas_) >= kMostReplicas) {
    return invalid("there are {} replicas, the most", kMostReplicas);
  }
  replicas_.push_back(std::make_shared<Replica>(context_, endpoint, ++numbers_, breaker_));
  return replicas_.back();
}

Result<std::shared_ptr<Replica>> ReplicaSet::drain(const client::Endpoint& endpoint) {
  const auto known = find(endpoint);
  if (known == replicas_.end()) {
    return not_found("there is no replica http://{}",
                     http::address_text(endpoint.host, endpoint.port));
  }
  (*known)->draining = true;
  return *known;
}

Result<std::shared_ptr<Replica>> ReplicaSet::remove(const client::Endpoint& endpoint) {
  FATHOM_TRY(const auto replica, drain(endpoint));
  replicas_.erase(find(endpoint));
  tree_.forget(replica->number);
  return replica;
}

bool ReplicaSet::has_other(const std::vector<int64_t>& tried, Time now) {
  return std::any_of(replicas_.begin(), replicas_.end(), [&](const auto& replica) {
    return !was_tried(tried, *replica) && replica->admits(now);
  });
}

std::optional<ReplicaSet::Pick> ReplicaSet::pick(std::string_view prompt, std::string_view session,
                                                 const std::vector<int64_t>& tried, Time now) {
  std::vector<TextTree::Match> matches;
  if (policy_.policy == Policy::kCacheAware) matches = tree_.match(prompt);
  std::vector<Candidate> candidates;
  std::vector<std::shared_ptr<Replica>> replicas;
  for (const auto& replica : replicas_) {
    if (was_tried(tried, *replica) || !replica->admits(now)) continue;
    Candidate candidate{
        .name = replica->url, .load = replica->load(), .cache_use = replica->polled().cache_use};
    for (const TextTree::Match& match : matches) {
      if (match.holder == replica->number) candidate.prefix_bytes = match.bytes;
    }
    candidates.push_back(candidate);
    replicas.push_back(replica);
  }
  if (candidates.empty()) return std::nullopt;
  const Choice choice =
      choose(policy_, candidates, std::ssize(prompt), session, turn_++, next_random(random_));
  const auto& replica = replicas[choice.index];
  // Now and not when the reply comes: requests that begin alike and come together belong together.
  if (policy_.policy == Policy::kCacheAware) tree_.insert(prompt, replica->number);
  ++replica->outstanding;
  return Pick{.replica = replica,
              .pass = replica->breaker.begin(),
              .reason = choice.reason,
              .prefix_bytes = candidates[choice.index].prefix_bytes};
}

}  // namespace fathom::router
