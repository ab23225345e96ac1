// One generating request from admission to the last byte of its response. Converts engine events to
// a stream or a complete body. The end of either side ends the other.
//
// Owned by the engine's sinks and listed in LiveReplies. Events arrive on the engine's thread, the
// disconnect on an I/O thread, everything else on a worker. One mutex serializes them; it is held
// only while copying.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "server/api/metrics.h"
#include "server/http/responder.h"
#include "server/openai/generation.h"

namespace fathom {

class LiveReply : public std::enable_shared_from_this<LiveReply> {
 public:
  // `engine` and `metrics` outlive the object. `id` is the request's id, for the log.
  LiveReply(std::string id, Engine& engine, Metrics& metrics, std::unique_ptr<ReplyWriter> writer,
            std::shared_ptr<http::Responder> responder);

  // Submits every prompt's request and starts the response. If the engine refuses one, those
  // already submitted are aborted and the client gets the refusal. Nothing has been sent by then.
  void start(std::vector<Request> requests);

  // Ends the response with an error and aborts running requests. Any thread may call, also before
  // start(), which does nothing then.
  void fail(ApiError error);

  // Aborts running requests on demand: the client gets what there is, with an error that should not
  // be retried. Returns false if nothing was running. Any thread may call.
  bool abort();

  const std::string& id() const { return id_; }

 private:
  void push(size_t prompt, const Event& event);
  void client_left();
  // Precondition of the functions below: mutex_ is held.
  void submit(std::vector<Request> requests);
  void write(size_t prompt, const Event& event);
  void write_failure(ApiError error);
  void give_up() noexcept;
  void send_error(const ApiError& error);
  void deliver(const std::string& bytes);
  void abort_engine() noexcept;
  void observe(size_t prompt, const Event& event);

  const std::string id_;
  Engine& engine_;
  Metrics& metrics_;
  std::mutex mutex_;
  std::unique_ptr<ReplyWriter> writer_;
  std::shared_ptr<http::Responder> responder_;
  std::vector<RequestId> running_;  // engine ids; aborting a finished one does nothing
  bool left_ = false;               // the client disconnected
  bool aborted_ = false;            // abort() was called
  bool stream_begun_ = false;
  bool sent_ = false;  // the response is complete
  std::string out_;    // reused buffer
  // Arrival of each choice's last token, for the inter-token latency.
  std::vector<std::optional<RequestTimings::Time>> last_token_;
};

}  // namespace fathom
