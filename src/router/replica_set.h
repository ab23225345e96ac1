// The replicas, what they have seen of prompts, and the choice between them. Used on the router's
// thread only; sends nothing.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "router/policy.h"
#include "router/replica.h"
#include "router/router_options.h"
#include "router/text_tree.h"

namespace fathom::router {

class ReplicaSet {
 public:
  static constexpr int64_t kMostReplicas = 256;

  ReplicaSet(boost::asio::io_context& context, const RouterOptions& options);

  // Adds a replica, or takes back a draining one. An error: there are too many.
  Result<std::shared_ptr<Replica>> add(const client::Endpoint& endpoint);
  // Gives it no more requests. An error: there is none with that URL.
  Result<std::shared_ptr<Replica>> drain(const client::Endpoint& endpoint);
  // Forgets it. Its requests in flight go on.
  Result<std::shared_ptr<Replica>> remove(const client::Endpoint& endpoint);

  struct Pick {
    std::shared_ptr<Replica> replica;
    CircuitBreaker::Pass pass;
    Reason reason = Reason::kOnly;
    int64_t prefix_bytes = 0;  // how much of the prompt it has seen
  };
  // Chooses among those that admit requests and are not in `tried`, and counts the request as
  // outstanding there. None: there is no such replica.
  std::optional<Pick> pick(std::string_view prompt, std::string_view session,
                           const std::vector<int64_t>& tried, Time now);
  // Returns whether pick() would find one.
  bool has_other(const std::vector<int64_t>& tried, Time now);

  // The replica's cache is gone.
  void forget_cache(const Replica& replica) { tree_.forget(replica.number); }

  const std::vector<std::shared_ptr<Replica>>& all() const { return replicas_; }
  const TextTree& tree() const { return tree_; }

 private:
  std::vector<std::shared_ptr<Replica>>::iterator find(const client::Endpoint& endpoint);

  boost::asio::io_context& context_;
  const PolicyOptions policy_;
  const BreakerOptions breaker_;
  std::vector<std::shared_ptr<Replica>> replicas_;
  TextTree tree_;
  int64_t numbers_ = 0, turn_ = 0;
  uint64_t random_;
};

}  // namespace fathom::router
