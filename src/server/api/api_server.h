// The server that clients of OpenAI, Anthropic, vLLM and SGLang talk to: its routes over one
// engine.
//
//   create(), listen(), start()   from here on clients can connect; /health answers, /ready and
//                                 everything that needs the model says 503
//   serve()                       the model is there
//   stop()                        drains, then ends what is left
//
// Any thread may call; handlers run on the transport's threads.
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
  // Work is pending and no step has ended for so long: the engine counts as dead. 0: never.
  std::chrono::nanoseconds watchdog_timeout = std::chrono::seconds(300);
  std::string version;
  std::string metrics_prefix;  // vLLM's metrics under this name too: "fathom_"; empty: not
};

class ApiServer {
 public:
  static Result<std::unique_ptr<ApiServer>> create(ApiOptions options);
  ~ApiServer();  // stop() without grace
  ApiServer(const ApiServer&) = delete;
  ApiServer& operator=(const ApiServer&) = delete;

  Result<> listen();
  int port() const;
  const http::RouteTable& routes() const;
  void start();
  void serve(std::unique_ptr<Backend> backend);

  // New requests get 503 from here on. What runs may take `grace` to end; then its clients get an
  // error. True if everything had ended by itself.
  bool stop(std::chrono::nanoseconds grace);

  // Waits until the engine is dead (Engine::is_dead(), or watchdog_timeout) or stop() is called;
  // true: dead. Everybody who waits for an answer has been told by then, /health and /ready say
  // 503.
  bool wait_until_dead();

  bool is_dead() const;

 private:
  using Answer = std::shared_ptr<http::Responder>;
  enum class State { kLoading, kReady, kDraining, kDead };

  explicit ApiServer(ApiOptions options);
  http::RouteTable make_routes();
  // What there is no room for in the queue, before anything is done for it.
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
  bool has_work(const EngineStats& stats) const;
  void fail_clients(const ApiError& last_words);
  void wait_for_last_words() const;

  const ApiOptions options_;
  std::atomic<State> state_ = State::kLoading;
  std::atomic<const Backend*> backend_ = nullptr;  // null: the model is being loaded
  Metrics metrics_;
  LiveReplies replies_;
  std::unique_ptr<http::Server> http_;
  std::unique_ptr<Backend> owned_;  // its engine calls into what stands above, so it goes first
};

}  // namespace fathom
