// Asks one replica whether it is ready and how loaded it is: GET /ready (or /health, where there is
// none), then GET /metrics. Used on the router's thread only.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "router/replica_call.h"
#include "router/replica_load.h"

namespace fathom::router {

struct PollResult {
  bool answered = false;  // it can be reached
  bool ready = false;
  std::optional<ReplicaLoad> load = {};
};

class ReplicaPoll : public ReplySink, public std::enable_shared_from_this<ReplicaPoll> {
 public:
  ReplicaPoll(std::shared_ptr<ConnectionPool> pool, std::string api_key,
              std::function<void(const PollResult&)> then);

  ~ReplicaPoll() override;  // ends it silently
  ReplicaPoll(const ReplicaPoll&) = delete;
  ReplicaPoll& operator=(const ReplicaPoll&) = delete;

  void start();
  // Ends the poll without an answer.
  void give_up();

  void on_head(ReplyHead head) override { status_ = head.status; }
  void on_body(std::string_view bytes) override;
  void on_end() override;
  void on_failure(CallFailure failure, std::string_view what) override;

 private:
  void ask(std::string path);
  void end();

  const std::shared_ptr<ConnectionPool> pool_;
  const std::string api_key_;
  std::function<void(const PollResult&)> then_;
  PollResult result_;
  std::string path_, page_;
  int status_ = 0;
  std::shared_ptr<ReplicaCall> call_;
};

}  // namespace fathom::router
