// One request to a replica and its reply, over a connection of the pool. Used on the router's
// thread only; keeps itself alive while an operation is pending.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "router/connection_pool.h"
#include "server/http/message.h"

namespace fathom::router {

struct ReplyHead {
  int status = 0;
  http::Headers headers = {};                  // as received
  std::optional<int64_t> content_length = {};  // none: chunked
  bool is_event_stream = false;
};

enum class CallFailure {
  kNotConnected,  // the replica has not seen the request
  kLost,          // it may have, and there is no reply
  kBroken,        // within the reply
  kBadReply,      // no HTTP, or without length
  kTooSlow,       // a time limit
};
std::string_view name_of(CallFailure failure);  // "not_connected", …

// Takes a reply. Each function may cancel the call. on_end() or on_failure() comes last, once.
class ReplySink {
 public:
  virtual ~ReplySink() = default;
  virtual void on_head(ReplyHead head) = 0;
  virtual void on_body(std::string_view bytes) = 0;
  virtual void on_end() = 0;
  virtual void on_failure(CallFailure failure, std::string_view what) = 0;
};

struct CallLimits {
  std::chrono::nanoseconds connect = std::chrono::seconds(5);
  std::chrono::nanoseconds silence = std::chrono::seconds(300);  // within a reply
};

class ReplicaCall : public std::enable_shared_from_this<ReplicaCall> {
 public:
  // `head`: the request's head with its final empty line. `sink` lives until on_end(), on_failure()
  // or cancel().
  ReplicaCall(std::shared_ptr<ConnectionPool> pool, const CallLimits& limits, std::string head,
              std::shared_ptr<const std::string> body, ReplySink& sink);
  ~ReplicaCall();
  ReplicaCall(const ReplicaCall&) = delete;
  ReplicaCall& operator=(const ReplicaCall&) = delete;

  void start();
  // Closes the connection, which makes a replica abort the request. The sink is not called any
  // more.
  void cancel();
  // Stops and resumes reading. The replica notices when the kernel's buffers are full.
  void pause();
  void resume();
  // Applies the limits. Call it a few times a second.
  void check(std::chrono::steady_clock::time_point now);

 private:
  struct Reading;  // Beast's parser

  void connect();
  void exchange();
  void read();
  void on_read(const boost::system::error_code& failure, size_t bytes);
  void parse();
  void give_head();
  void finish();
  void fail(CallFailure failure, std::string_view what);

  const std::shared_ptr<ConnectionPool> pool_;
  const CallLimits limits_;
  const std::string head_;
  const std::shared_ptr<const std::string> body_;
  ReplySink* sink_;  // null: ended
  std::shared_ptr<Socket> socket_;
  std::unique_ptr<Reading> reading_;
  bool connecting_ = false, sent_ = false;
  bool paused_ = false, read_pending_ = false, in_reply_ = false, has_head_ = false;
  std::chrono::steady_clock::time_point since_;  // of the state that a limit applies to
};

}  // namespace fathom::router
