// One generating request from its admission to the last byte of its answer: the engine's events go
// in, the client gets a stream or a whole body, and either side's end ends the other's.
//
// Held by the engine's sinks and by the list of what runs (live_replies.h). Events come on the
// engine's thread, the client's disconnect on an I/O thread, everything else on a worker; one lock
// keeps them apart, held only for copying.
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
  // `engine` and `metrics` outlive it. `id` is the request's, for the log.
  LiveReply(std::string id, Engine& engine, Metrics& metrics, std::unique_ptr<ReplyWriter> writer,
            std::shared_ptr<http::Responder> responder);

  // Submits every prompt's request and begins the answer. If the engine refuses one, those before
  // it are aborted and the client gets the refusal: nothing has been sent by then.
  void start(std::vector<Request> requests);

  // Ends the answer with an error and aborts what still runs. Any thread.
  void fail(ApiError error);

  // Aborts what still runs because somebody asked for it: the client gets what there is, with an
  // error that is not worth another try. Any thread.
  bool abort();  // false: nothing ran any more

  const std::string& id() const { return id_; }

 private:
  void push(size_t prompt, const Event& event);
  void client_left();
  // The others with the lock held.
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
  std::vector<RequestId> running_;  // the engine's; aborting one that has ended does nothing
  bool left_ = false;               // the client has gone
  bool aborted_ = false;            // by abort()
  bool stream_begun_ = false;
  bool sent_ = false;  // the answer is complete
  std::string out_;    // kept for its memory
  // When each choice's last token came, for the time between tokens.
  std::vector<std::optional<RequestTimings::Time>> last_token_;
};

}  // namespace fathom
