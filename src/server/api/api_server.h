// Serves clients of OpenAI, Anthropic, vLLM and SGLang: routes over one engine.
//
//   create(), listen(), start()   clients can connect; /health answers, /ready and everything that
//                                 needs the model return 503
//   serve()                       installs the loaded model
//   stop()                        drains, then ends what is left
//
// Any thread may call. Handlers run on the transport's threads.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "server/api/backend.h"
#include "server/api/live_replies.h"
#include "server/api/metrics.h"
#include "server/http/responder.h"
#include "server/http/server.h"
#include "server/openai/generation.h"

namespace fathom {

struct ApiOptions {
  http::ServerOptions http;
  RequestLimits limits;
  // The engine counts as dead if work is pending and no step ended for this long. 0: never.
  std::chrono::nanoseconds watchdog_timeout = std::chrono::seconds(300);
  // After the engine's death: how long an I/O thread that is late may take to send the last words.
  std::chrono::nanoseconds last_flush = std::chrono::seconds(5);
  std::string version;
  // Exports vLLM's metrics a second time under this prefix ("fathom_"); empty: not.
  std::string metrics_prefix;
  // Requests that generate are refused with 503 and this sentence, but for those of which another
  // server decodes the answer; empty: they are not.
  std::string why_no_generation = {};
};

class ApiServer {
 public:
  static Result<std::unique_ptr<ApiServer>> create(ApiOptions options);
  ~ApiServer();  // stop() with zero grace
  ApiServer(const ApiServer&) = delete;
  ApiServer& operator=(const ApiServer&) = delete;

  Result<> listen();
  int port() const;
  const http::RouteTable& routes() const;
  void start();
  void serve(std::unique_ptr<Backend> backend);

  // Refuses new requests with 503. Requests in flight may take `grace` to finish; after that their
  // clients get an error. Returns true if all finished in time.
  bool stop(std::chrono::nanoseconds grace);

  // Waits until the engine is dead (Engine::is_dead(), or watchdog_timeout) or stop() is called;
  // returns true if it is dead. By then every waiting client has been answered, and /health and
  // /ready return 503.
  bool wait_until_dead();

  bool is_dead() const;

 private:
  using Answer = std::shared_ptr<http::Responder>;
  enum class State { kLoading, kReady, kDraining, kDead };

  explicit ApiServer(ApiOptions options);
  http::RouteTable make_routes();
  // Refuses a request before its body is parsed if the queue is full.
  std::optional<http::Response> refuse_early(GeneratingEndpoint endpoint);
  void generate(GeneratingEndpoint endpoint, const http::Request& request, const Answer& answer);
  void submit_with_grammar(Generation generation, GrammarCompiler::Compiled compiled,
                           ErrorShape shape, std::string id, const http::Caller& caller,
                           const Answer& answer);
  void submit(Generation generation, std::string id, const http::Caller& caller,
              const Answer& answer);
  http::Response abort_request(const http::Request& request);
  http::Response readiness() const;
  http::Response metrics_page() const;
  std::string openapi() const;
  std::string server_info() const;
  template <typename Tell>
  void die(Tell tell);

  const ApiOptions options_;
  std::atomic<State> state_ = State::kLoading;
  std::atomic<const Backend*> backend_ = nullptr;  // null: the model is loading
  Metrics metrics_;
  LiveReplies replies_;
  std::unique_ptr<http::Server> http_;
  // Its engine uses the members above, so it is destroyed first.
  std::unique_ptr<Backend> owned_;
};

}  // namespace fathom
