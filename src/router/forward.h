// One client's request on its way through the router: choice, attempts, and the reply. Used on the
// router's thread only; the set of active requests keeps it alive until it ends.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "router/error_reply.h"
#include "router/event_boundary.h"
#include "router/replica_call.h"
#include "router/replica_set.h"
#include "router/router_metrics.h"
#include "router/router_options.h"
#include "server/http/message.h"
#include "server/http/responder.h"

namespace fathom::router {

class Forward;

// What all requests share.
struct ForwardContext {
  boost::asio::io_context& io;
  const RouterOptions& options;
  ReplicaSet& replicas;
  RouterMetrics& metrics;
  std::unordered_set<std::shared_ptr<Forward>> active = {};
};

class Forward : public ReplySink, public std::enable_shared_from_this<Forward> {
 public:
  // `prompt`: see prompt_text.h.
  Forward(ForwardContext& context, http::Request request, std::string prompt,
          std::shared_ptr<http::Responder> responder);

  void start();
  void client_left();
  void resume();
  void check(Time now);

  void on_head(ReplyHead head) override;
  void on_body(std::string_view bytes) override;
  void on_end() override;
  void on_failure(CallFailure failure, std::string_view what) override;

 private:
  enum class Stage { kWaiting, kCollecting, kStreaming, kEnded };

  void attempt();
  void refuse(int status, std::string_view message, std::string_view code);
  void start_stream();
  void write(std::string_view bytes);
  void leave_replica();
  void end(std::string_view how);

  ForwardContext& context_;
  const http::Request request_;
  const std::string prompt_, session_;
  const ErrorForm form_;
  std::shared_ptr<http::Responder> responder_;

  Stage stage_ = Stage::kWaiting;
  std::vector<int64_t> tried_;  // replicas' numbers
  int64_t lost_ = 0;            // attempts that a replica may have seen
  std::string last_failure_;
  std::optional<ReplicaSet::Pick> pick_;
  std::shared_ptr<ReplicaCall> call_;
  ReplyHead head_;
  std::string collected_;
  EventBoundary boundary_;
  bool paused_ = false;                // until the client has taken what was written
  std::string url_, reason_ = "none";  // for the log: of the last and the first choice
  int64_t prefix_bytes_ = 0;
};

}  // namespace fathom::router
