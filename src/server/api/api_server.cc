#include "server/api/api_server.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <new>
#include <thread>

#include "base/entropy.h"
#include "base/log.h"
#include "base/thread_stacks.h"
#include "cache/latent_layout.h"
#include "server/api/abort_request.h"
#include "server/api/api_document.h"
#include "server/api/error_response.h"
#include "server/http/log_text.h"
#include "server/openai/model_bodies.h"
#include "server/page/page.h"

namespace fathom {
namespace {

using http::Access;
using http::Method;
using http::Response;
using http::RouteOptions;
using http::RunOn;

// For health and metrics: answers at once, even if all workers are busy or the server drains.
constexpr RouteOptions kAlways = {.run_on = RunOn::kIoThread, .while_draining = true};
constexpr RouteOptions kAtOnce = {.run_on = RunOn::kIoThread};
constexpr RouteOptions kJson = {.wants_json = true};
constexpr RouteOptions kJsonAtOnce = {.run_on = RunOn::kIoThread, .wants_json = true};

constexpr std::chrono::milliseconds kWatchInterval{500};
// Time for the last bytes after the engine has died. Clients receive them within milliseconds;
// slower ones must not delay the restart.
constexpr std::chrono::milliseconds kLastWords{500};
// Threads report their stacks within microseconds, unless they are stuck in the kernel.
constexpr std::chrono::milliseconds kStacksLimit{1000};

Response respond(ApiResult<std::string> body, ErrorShape shape = ErrorShape::kOpenAi) {
  if (!body) return error_response(body.error(), shape);
  return {.body = std::move(*body)};
}

// Selects the error shape of routes that both OpenAI's and Anthropic's clients call.
ErrorShape shape_for(const http::Request& request) {
  return request.headers.find("anthropic-version") == nullptr ? ErrorShape::kOpenAi
                                                              : ErrorShape::kAnthropic;
}

ApiError loading() { return ApiError(503, "the model is still being loaded"); }

Response page() {
  return {.content_type = "text/html; charset=utf-8",
          .headers = {{"Content-Security-Policy", std::string(page_csp())},
                      {"X-Content-Type-Options", "nosniff"},
                      {"Referrer-Policy", "no-referrer"}},
          .body = std::string(page_html())};
}

int64_t now_seconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

void log_thread_stacks() {
  for (const ThreadStack& stack : thread_stacks(kStacksLimit)) {
    const std::string threads = fmt::format("{}", fmt::join(stack.threads, ", "));
    if (stack.frames.empty()) log_error("thread {}: no answer", threads);
    for (size_t i = 0; i < stack.frames.size(); ++i) {
      log_error("thread {}: #{} {}", threads, i, stack.frames[i]);
    }
  }
}

// The lane that the header X-Data-Parallel-Rank asks for; nothing without it. Whether there is such
// a lane is the engine's to say.
ApiResult<std::optional<int>> asked_lane(const http::Headers& headers) {
  const std::string* const text = headers.find("X-Data-Parallel-Rank");
  if (text == nullptr) return std::nullopt;
  int lane = 0;
  const char* const end = text->data() + text->size();
  const auto read = std::from_chars(text->data(), end, lane);
  if (read.ec == std::errc() && read.ptr == end && lane >= 0) return lane;
  return tl::unexpected(
      ApiError(400, fmt::format("the header X-Data-Parallel-Rank is '{}', must be a rank's number",
                                http::for_log(*text))));
}

}  // namespace

ApiServer::ApiServer(ApiOptions options)
    : options_(std::move(options)), metrics_(options_.metrics_prefix) {}

ApiServer::~ApiServer() { stop(std::chrono::nanoseconds(0)); }

Result<std::unique_ptr<ApiServer>> ApiServer::create(ApiOptions options) {
  std::unique_ptr<ApiServer> server(new ApiServer(std::move(options)));
  FATHOM_TRY(server->http_, http::Server::create(server->options_.http, server->make_routes()));
  return server;
}

Result<> ApiServer::listen() { return http_->listen(); }
int ApiServer::port() const { return http_->port(); }
const http::RouteTable& ApiServer::routes() const { return http_->routes(); }
void ApiServer::start() { http_->start(); }

void ApiServer::serve(std::unique_ptr<Backend> backend) {
  owned_ = std::move(backend);
  backend_ = owned_.get();
  State loading_state = State::kLoading;
  state_.compare_exchange_strong(loading_state, State::kReady);
}

bool ApiServer::stop(std::chrono::nanoseconds grace) {
  const auto end = std::chrono::steady_clock::now() + grace;
  if (state_ != State::kDead) state_ = State::kDraining;
  http_->begin_drain();
  bool all_ended = true;
  if (owned_) {
    all_ended = owned_->engine->drain(grace);
    if (!all_ended) {
      replies_.fail_all(ApiError(503, "the server is shutting down"));
    }
  }
  const auto left = std::max(end - std::chrono::steady_clock::now(),
                             std::chrono::steady_clock::duration(std::chrono::milliseconds(200)));
  const bool all_sent = http_->stop(left);
  if (owned_) owned_->engine->stop();
  return all_ended && all_sent;
}

bool ApiServer::is_dead() const {
  const Backend* const backend = backend_;
  return state_ == State::kDead || (backend != nullptr && backend->engine->is_dead());
}

// The engine is dead: tells why, ends the requests that it has not ended, and waits until all
// responses are sent: at most kLastWords for clients, longer for I/O threads, which a busy machine
// may keep from running. What there is no memory to tell is not told.
template <typename Tell>
void ApiServer::die(Tell tell) {
  state_ = State::kDead;
  http_->begin_drain();
  std::shared_ptr<const std::atomic<int>> late;
  try {
    tell();
    late = http_->flush();
  } catch (const std::bad_alloc&) {
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto may_wait = [&] {
    const bool is_late = late != nullptr && *late > 0;
    return std::chrono::steady_clock::now() - begin < (is_late ? options_.last_flush : kLastWords);
  };
  while (http_->stats().requests_in_flight > 0 && may_wait()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

bool ApiServer::wait_until_dead() {
  // When each site's steps were last seen to go on.
  struct Watched {
    int64_t steps = -1;
    std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
  };
  std::array<Watched, Engine::kMostSites> sites;
  while (state_ != State::kDraining) {
    const Backend* const backend = backend_;
    if (backend == nullptr) {
      std::this_thread::sleep_for(kWatchInterval);
      continue;
    }
    if (backend->engine->wait_until_dead(kWatchInterval)) {
      if (state_ == State::kDraining) return false;
      die([&] {
        const auto room = backend->engine->has_room();  // a dead engine refuses with the reason
        const std::string why = room ? "the engine is dead" : room.error().message;
        log_error("{}", why);
        replies_.fail_all(ApiError(503, why));
      });
      return true;
    }
    if (options_.watchdog_timeout.count() == 0) continue;
    const auto now = std::chrono::steady_clock::now();
    auto since = now;
    for (int i = 0; i < backend->engine->num_sites(); ++i) {
      const EngineProgress progress = backend->engine->progress(i);
      Watched& site = sites[static_cast<size_t>(i)];
      if (progress.steps != site.steps || !progress.has_work) site = {progress.steps, now};
      since = std::min(since, site.since);
    }
    if (now - since < options_.watchdog_timeout) continue;
    die([&] {
      const EngineStats stats = backend->engine->stats();
      log_error(
          "no step has ended for {:.1f} s: {} running, {} waiting, {} queued, {} of {} pages "
          "used, {} steps done; the step that hangs has {} sequences, {} rows, the longest "
          "sequence {} tokens",
          std::chrono::duration<double>(now - since).count(), stats.running, stats.waiting,
          stats.queued_requests, stats.pages_used, stats.pages_total, stats.steps,
          stats.step_sequences, stats.step_rows, stats.step_longest);
      log_error("unanswered requests: {}", fmt::join(replies_.ids(), ", "));
      replies_.fail_all(ApiError(500, "the engine has stopped working"));
      log_thread_stacks();
    });
    return true;
  }
  return false;
}

http::Response ApiServer::readiness() const {
  if (is_dead()) return {.status = 503, .body = R"({"status":"dead"})"};
  switch (state_.load()) {
    case State::kReady:
      return {.body = R"({"status":"ok"})"};
    case State::kLoading:
      return {.status = 503, .headers = {{"Retry-After", "1"}}, .body = R"({"status":"loading"})"};
    case State::kDraining:
      return {.status = 503, .headers = {{"Retry-After", "1"}}, .body = R"({"status":"draining"})"};
    case State::kDead:
      break;
  }
  return {.status = 503, .body = R"({"status":"dead"})"};
}

http::Response ApiServer::metrics_page() const {
  const Backend* const backend = backend_;
  Response response;
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  if (backend == nullptr) {
    response.body = metrics_.text("", nullptr, {}, http_->stats());
  } else {
    const EngineStats stats = backend->engine->stats();
    response.body =
        metrics_.text(backend->served.names.front(), &stats, backend->cache, http_->stats());
    if (backend->more_metrics) {
      backend->more_metrics(engine_labels(backend->served.names.front()), stats, response.body);
    }
  }
  return response;
}

std::string ApiServer::openapi() const {
  const bool has_keys = !options_.http.api_keys.empty();
  return json::serialize(api_document(options_.version, options_.limits, has_keys));
}

std::string ApiServer::server_info() const {
  const Backend& backend = *backend_.load();
  json::object server = backend.settings;
  const EngineStats stats = backend.engine->stats();
  server["running"] = stats.running;
  server["waiting"] = std::max(stats.waiting, stats.queued_requests);
  server["kv_tokens"] = stats.pages_total * kPageSize;
  if (stats.experts) {
    const ExpertStats& experts = *stats.experts;
    server["experts"] = {{"num_experts", experts.experts},
                         {"num_ranks", experts.ranks},
                         {"layers", json::value_from(experts.table->lists())},
                         {"balance", experts.window.balance},
                         {"moves", experts.moves}};
  }
  return server_info_body(backend.served, server);
}

std::optional<Response> ApiServer::refuse_early(GeneratingEndpoint endpoint) {
  const Backend* const backend = backend_;
  if (backend == nullptr) return std::nullopt;  // generate() refuses
  const Result<> room = backend->engine->has_room();
  if (room) return std::nullopt;
  const ApiError error(room.error());
  metrics_.count_rejection(error);
  return error_response(error, error_shape_of(endpoint));
}

void ApiServer::generate(GeneratingEndpoint endpoint, const http::Request& request,
                         const Answer& answer) {
  const ErrorShape shape = error_shape_of(endpoint);
  const Backend& backend = *backend_.load();
  // Ids are unpredictable: whoever knows the id in a response may abort its request.
  const ReplyIdentity identity{unpredictable_bits(), now_seconds()};
  auto prepared = prepare(endpoint, request.body, backend.served, options_.limits, identity);
  if (!prepared) {
    metrics_.count_rejection(prepared.error());
    answer->send(error_response(prepared.error(), shape));
    return;
  }
  if (!options_.why_no_generation.empty() && !prepared->is_prompt_only) {
    const ApiError refused(Status{Code::kUnavailable, options_.why_no_generation});
    metrics_.count_rejection(refused);
    answer->send(error_response(refused, shape));
    return;
  }
  const auto lane = asked_lane(request.headers);
  if (!lane) {
    metrics_.count_rejection(lane.error());
    answer->send(error_response(lane.error(), shape));
    return;
  }
  for (const std::string& field : prepared->unknown_fields) {
    log_info("ignored id={} field={}", request.id, http::for_log(field));
  }
  for (Request& one : prepared->requests) {
    one.cache_salt = prepared->cache_salt;
    one.lane = *lane;
    one.priority = static_cast<int32_t>(prepared->priority);
    one.max_drafts = prepared->speculation;
    metrics_.observe_request(one.sampling);
  }
  if (!prepared->grammar) {
    submit(std::move(*prepared), request.id, request.caller, answer);
    return;
  }
  const GrammarSpec spec = *prepared->grammar;
  // std::function needs a copyable callable.
  auto generation = std::make_shared<Generation>(std::move(*prepared));
  backend.grammars->compile(spec, [this, generation, answer, shape, id = request.id,
                                   caller = request.caller](GrammarCompiler::Compiled compiled) {
    try {
      submit_with_grammar(std::move(*generation), std::move(compiled), shape, id, caller, answer);
      // The compiler's thread has no other handler for it.
    } catch (const std::bad_alloc&) {
      answer->give_up();
    }
  });
}

void ApiServer::submit_with_grammar(Generation generation, GrammarCompiler::Compiled compiled,
                                    ErrorShape shape, std::string id, const http::Caller& caller,
                                    const Answer& answer) {
  if (!compiled) {
    ApiError error(compiled.error());
    if (error.status == 400) error.param = generation.grammar_param;
    metrics_.count_rejection(error);
    answer->send(error_response(error, shape));
    return;
  }
  const auto& tokenizer = *backend_.load()->served.tokenizer;
  for (Request& one : generation.requests) {
    one.grammar = *compiled;
    if (generation.grammar->after_reasoning) {
      one.grammar_begins_after = tokenizer.token_id("</think>");
    }
  }
  submit(std::move(generation), std::move(id), caller, answer);
}

void ApiServer::submit(Generation generation, std::string id, const http::Caller& caller,
                       const Answer& answer) {
  const std::string answer_id = generation.writer->id();
  const auto reply = std::make_shared<LiveReply>(id, *backend_.load()->engine, metrics_,
                                                 std::move(generation.writer), answer);
  if (answer_id != id) replies_.add(answer_id, caller, reply);
  replies_.add(std::move(id), caller, reply);
  reply->start(std::move(generation.requests));
}

http::Response ApiServer::abort_request(const http::Request& request) {
  const auto target = read_abort_target(request.body, options_.limits);
  if (!target) return error_response(target.error());
  if (target->empty() && !options_.http.admin_keys.empty() && !request.caller.is_admin) {
    return error_response(ApiError(403, "abort_all needs an admin key", "abort_all", "not_admin"));
  }
  const int64_t aborted = replies_.abort(*target, request.caller);
  return Response{.body = fmt::format(R"({{"aborted":{}}})", aborted)};
}

http::RouteTable ApiServer::make_routes() {
  http::RouteTable routes;
  const auto add = [&](Method method, const char* path, Access access, RouteOptions options,
                       auto respond_to) {
    routes.add(
        method, path, access,
        [respond_to](const http::Request& request, const Answer& answer) {
          answer->send(respond_to(request));
        },
        options);
  };
  // Adds a route that needs the model.
  const auto add_for_model = [&](Method method, const char* path, Access access,
                                 RouteOptions options, auto respond_to) {
    add(method, path, access, options, [this, respond_to](const http::Request& request) {
      const Backend* const backend = backend_;
      return backend == nullptr ? error_response(loading()) : respond_to(*backend, request);
    });
  };
  const auto add_generating = [&](std::string path, GeneratingEndpoint endpoint) {
    routes.add(
        Method::kPost, std::move(path), Access::kKey,
        [this, endpoint](const http::Request& request, const Answer& answer) {
          if (backend_ == nullptr) {
            answer->send(error_response(loading(), error_shape_of(endpoint)));
          } else {
            generate(endpoint, request, answer);
          }
        },
        kJson, [this, endpoint] { return refuse_early(endpoint); });
  };

  for (const char* path : {"/health", "/ping"}) {
    add(Method::kGet, path, Access::kPublic, kAlways, [this](const http::Request&) {
      return is_dead() ? readiness() : Response{.body = R"({"status":"ok"})"};
    });
  }
  add(Method::kGet, "/ready", Access::kPublic, kAlways,
      [this](const http::Request&) { return readiness(); });
  add(Method::kGet, "/metrics", Access::kKey, kAlways,
      [this](const http::Request&) { return metrics_page(); });
  add(Method::kGet, "/", Access::kPublic, {}, [](const http::Request&) { return page(); });
  add(Method::kGet, "/openapi.json", Access::kPublic, {},
      [this](const http::Request&) { return Response{.body = openapi()}; });

  add_for_model(Method::kGet, "/v1/models", Access::kKey, kAtOnce,
                [](const Backend& backend, const http::Request& request) {
                  return Response{.body = models_body(backend.served, shape_for(request))};
                });
  add_for_model(Method::kGet, "/v1/models/{id...}", Access::kKey, kAtOnce,
                [](const Backend& backend, const http::Request& request) {
                  const ErrorShape shape = shape_for(request);
                  return respond(model_body(backend.served, *request.path_parameter("id"), shape),
                                 shape);
                });
  add_for_model(Method::kGet, "/version", Access::kPublic, kAtOnce,
                [](const Backend& backend, const http::Request&) {
                  return Response{.body = version_body(backend.served)};
                });
  add_for_model(Method::kGet, "/get_model_info", Access::kKey, kAtOnce,
                [](const Backend& backend, const http::Request&) {
                  return Response{.body = get_model_info_body(backend.served)};
                });
  add_for_model(
      Method::kGet, "/server_info", Access::kKey, kAtOnce,
      [this](const Backend&, const http::Request&) { return Response{.body = server_info()}; });
  add_for_model(Method::kGet, "/props", Access::kKey, kAtOnce,
                [](const Backend& backend, const http::Request&) {
                  return Response{.body = props_body(backend.served)};
                });

  add_for_model(Method::kGet, "/load", Access::kKey, kAtOnce,
                [](const Backend& backend, const http::Request&) {
                  const EngineStats stats = backend.engine->stats();
                  const int64_t requests =
                      stats.running + std::max(stats.waiting, stats.queued_requests);
                  return Response{.body = fmt::format(R"({{"server_load":{}}})", requests)};
                });

  add_generating("/v1/chat/completions", GeneratingEndpoint::kChat);
  add_generating("/v1/completions", GeneratingEndpoint::kCompletions);
  add_generating("/v1/messages", GeneratingEndpoint::kMessages);
  add_generating("/v1/responses", GeneratingEndpoint::kResponses);
  add_generating("/generate", GeneratingEndpoint::kGenerate);

  add_for_model(Method::kPost, "/v1/messages/count_tokens", Access::kKey, kJson,
                [this](const Backend& backend, const http::Request& request) {
                  return respond(count_tokens_body(request.body, backend.served, options_.limits),
                                 ErrorShape::kAnthropic);
                });
  add_for_model(Method::kPost, "/tokenize", Access::kKey, kJson,
                [this](const Backend& backend, const http::Request& request) {
                  return respond(tokenize_body(request.body, backend.served, options_.limits));
                });
  add_for_model(
      Method::kPost, "/apply-template", Access::kKey, kJson,
      [this](const Backend& backend, const http::Request& request) {
        return respond(apply_template_body(request.body, backend.served, options_.limits));
      });
  add_for_model(Method::kPost, "/detokenize", Access::kKey, kJson,
                [this](const Backend& backend, const http::Request& request) {
                  return respond(detokenize_body(request.body, backend.served, options_.limits));
                });

  add_for_model(Method::kPost, "/flush_cache", Access::kOperator, kJsonAtOnce,
                [](const Backend& backend, const http::Request&) {
                  backend.engine->flush_prefix_cache();
                  return Response{.body = R"({"status":"ok"})"};
                });
  add_for_model(
      Method::kPost, "/abort_request", Access::kKey, kJsonAtOnce,
      [this](const Backend&, const http::Request& request) { return abort_request(request); });
  for (const MissingEndpoint& missing : kMissingEndpoints) {
    for (const Method method : {Method::kGet, Method::kPost, Method::kPut, Method::kDelete}) {
      add(method, missing.path, Access::kKey, kAtOnce, [missing](const http::Request& request) {
        return error_response(ApiError(404,
                                       fmt::format("{} is not available at {}: {}", missing.what,
                                                   http::for_log(request.path), missing.why),
                                       std::nullopt, "not_supported"),
                              shape_for(request));
      });
    }
  }
  return routes;
}

}  // namespace fathom
