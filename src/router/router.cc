#include "router/router.h"

#include <algorithm>
#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <map>
#include <thread>
#include <utility>

#include "base/json.h"
#include "base/log.h"
#include "base/version.h"
#include "router/forward.h"
#include "router/prompt_text.h"
#include "router/replica_poll.h"
#include "server/http/error_body.h"
#include "server/http/server.h"

namespace fathom::router {
namespace {

namespace asio = boost::asio;
using Answer = std::shared_ptr<http::Responder>;
using http::Access;
using http::Method;
using Clock = std::chrono::steady_clock;

// How often time limits are applied and due polls begun.
constexpr std::chrono::milliseconds kTick{100};

json::object describe(const Replica& replica) {
  return {{"url", replica.url},
          {"ready", replica.ready()},
          {"draining", replica.draining},
          {"breaker", name_of(replica.breaker.state())},
          {"outstanding", replica.outstanding},
          {"running", replica.polled().running},
          {"waiting", replica.polled().waiting},
          {"cache_use", replica.polled().cache_use}};
}

}  // namespace

struct Router::Parts {
  explicit Parts(RouterOptions given)
      : options(std::move(given)),
        replicas(context, options),
        forwards{.io = context, .options = options, .replicas = replicas, .metrics = metrics} {}

  struct Polled {
    std::shared_ptr<ReplicaPoll> poll;
    Time began;
  };

  http::RouteTable routes();
  void pass_on(http::Request request, Answer responder);
  void change_replicas(const http::Request& request, const Answer& responder);
  void tick();
  void poll(const std::shared_ptr<Replica>& replica, Time now);
  void note_poll(const std::shared_ptr<Replica>& replica, const PollResult& result);
  template <typename Step>
  void on_thread(Step step) {
    asio::post(context, std::move(step));
  }

  const RouterOptions options;
  asio::io_context context{1};
  asio::executor_work_guard<asio::io_context::executor_type> work{context.get_executor()};
  asio::steady_timer timer{context};
  ReplicaSet replicas;
  RouterMetrics metrics;
  std::map<int64_t, Polled> polls;  // the last poll of each replica, by its number
  ForwardContext forwards;
  std::atomic<bool> draining = false;
  std::unique_ptr<http::Server> server;
  std::thread thread;
};

http::RouteTable Router::Parts::routes() {
  http::RouteTable table;
  const http::RouteOptions at_once{.run_on = http::RunOn::kIoThread, .while_draining = true};
  for (const char* path : {"/health", "/ping"}) {
    table.add(
        Method::kGet, path, Access::kPublic,
        [](const http::Request&, const Answer& answer) {
          answer->send({.body = R"({"status":"ok"})"});
        },
        at_once);
  }
  table.add(
      Method::kGet, "/version", Access::kPublic,
      [](const http::Request&, const Answer& answer) {
        answer->send({.body = json::serialize(json::value{{"version", program_version()}})});
      },
      at_once);
  table.add(
      Method::kGet, "/ready", Access::kPublic,
      [this](const http::Request&, const Answer& answer) {
        on_thread([this, answer] {
          if (!draining && replicas.has_other({}, Clock::now())) {
            answer->send({.body = R"({"status":"ready"})"});
          } else {
            answer->send(http::error_response(
                error(Code::kUnavailable, "{}",
                      draining ? "the router is shutting down" : "no replica is ready")
                    .value()));
          }
        });
      },
      at_once);
  table.add(
      Method::kGet, "/metrics", Access::kKey,
      [this](const http::Request&, const Answer& answer) {
        on_thread([this, answer] {
          answer->send(
              {.content_type = "text/plain; version=0.0.4; charset=utf-8",
               .body = metrics.text(replicas, std::ssize(forwards.active), server->stats())});
        });
      },
      at_once);
  table.add(
      Method::kGet, "/replicas", Access::kOperator,
      [this](const http::Request&, const Answer& answer) {
        on_thread([this, answer] {
          json::array all;
          for (const auto& replica : replicas.all()) all.push_back(describe(*replica));
          answer->send({.body = json::serialize(json::value{{"replicas", std::move(all)}})});
        });
      },
      at_once);
  table.add(Method::kPost, "/replicas", Access::kAdmin,
            [this](const http::Request& request, const Answer& answer) {
              change_replicas(request, answer);
            },
            {.run_on = http::RunOn::kIoThread, .while_draining = true, .wants_json = true});
  const auto pass = [this](http::Request request, const Answer& answer) {
    pass_on(std::move(request), answer);
  };
  for (const Method method : {Method::kGet, Method::kPost, Method::kPut, Method::kDelete}) {
    table.add(method, "/v1/{path...}", Access::kKey, pass);
  }
  for (const char* path : {"/generate", "/tokenize", "/detokenize", "/apply-template"}) {
    table.add(Method::kPost, path, Access::kKey, pass);
  }
  for (const char* path : {"/get_model_info", "/server_info", "/props"}) {
    table.add(Method::kGet, path, Access::kKey, pass);
  }
  return table;
}

// On a worker, as a long body takes a while to parse.
void Router::Parts::pass_on(http::Request request, Answer responder) {
  std::string prompt = prompt_text(request.body);
  const auto forward = std::make_shared<Forward>(forwards, std::move(request), std::move(prompt),
                                                 std::move(responder));
  on_thread([forward] { forward->start(); });
}

void Router::Parts::change_replicas(const http::Request& request, const Answer& responder) {
  const auto refuse = [&](std::string_view message) {
    responder->send(http::error_response(400, message));
  };
  const auto parsed = parse_json(request.body, "body");
  if (!parsed) return refuse(parsed.error().message);
  const auto text = [&](const char* name) {
    const auto* object = parsed->if_object();
    const json::value* field = object == nullptr ? nullptr : object->if_contains(name);
    return field != nullptr && field->is_string() ? std::string(field->as_string()) : std::string();
  };
  const std::string action = text("action");
  if (action != "add" && action != "drain" && action != "remove") {
    return refuse("action is missing or unknown, expected \"add\", \"drain\" or \"remove\"");
  }
  const auto endpoint = client::parse_base_url(text("url"));
  if (!endpoint) return refuse("url: " + endpoint.error().message);
  on_thread([this, action, endpoint = *endpoint, responder] {
    const auto changed = action == "add"     ? replicas.add(endpoint)
                         : action == "drain" ? replicas.drain(endpoint)
                                             : replicas.remove(endpoint);
    if (!changed) return void(responder->send(http::error_response(changed.error())));
    log_info("replica {}: {}", (*changed)->url, action);
    responder->send({.body = json::serialize(describe(**changed))});
  });
}

void Router::Parts::tick() {
  const Time now = Clock::now();
  // A check may end a request.
  const std::vector<std::shared_ptr<Forward>> active(forwards.active.begin(),
                                                     forwards.active.end());
  for (const auto& forward : active) forward->check(now);
  std::erase_if(polls, [&](const auto& entry) {
    return std::none_of(replicas.all().begin(), replicas.all().end(),
                        [&](const auto& replica) { return replica->number == entry.first; });
  });
  for (const auto& replica : replicas.all()) poll(replica, now);
  timer.expires_after(kTick);
  timer.async_wait([this](const boost::system::error_code& failure) {
    if (!failure) tick();
  });
}

void Router::Parts::poll(const std::shared_ptr<Replica>& replica, Time now) {
  const auto last = polls.find(replica->number);
  if (last != polls.end()) {
    if (last->second.poll != nullptr) {
      if (now - last->second.began >= options.poll_timeout) last->second.poll->give_up();
      return;
    }
    if (now - last->second.began < options.poll_interval) return;
  }
  const auto asked = std::make_shared<ReplicaPoll>(
      replica->connections, options.replica_api_key,
      [this, replica](const PollResult& result) { note_poll(replica, result); });
  polls[replica->number] = {asked, now};
  asked->start();
}

void Router::Parts::note_poll(const std::shared_ptr<Replica>& replica, const PollResult& result) {
  const bool was_ready = replica->ready();
  if (result.answered) {
    if (replica->poll_succeeded(result.ready, result.load)) replicas.forget_cache(*replica);
  } else {
    replica->poll_failed(options.poll_failure_threshold);
  }
  if (replica->ready() != was_ready) {
    log_info("replica {}: {}", replica->url,
             replica->ready()  ? "ready"
             : result.answered ? "not ready"
                               : "does not answer");
  }
  const auto last = polls.find(replica->number);
  if (last == polls.end()) return;
  // The poll itself is still on the call stack.
  on_thread([finished = std::exchange(last->second.poll, nullptr)] {});
}

Router::Router(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

Router::~Router() { stop(std::chrono::nanoseconds(0)); }

Result<std::unique_ptr<Router>> Router::create(RouterOptions options) {
  auto parts = std::make_unique<Parts>(std::move(options));
  for (const client::Endpoint& endpoint : parts->options.replicas) {
    FATHOM_RETURN_IF_ERROR(parts->replicas.add(endpoint));
  }
  FATHOM_TRY(parts->server, http::Server::create(parts->options.http, parts->routes()));
  return std::unique_ptr<Router>(new Router(std::move(parts)));
}

Result<> Router::listen() { return parts_->server->listen(); }

int Router::port() const { return parts_->server->port(); }

void Router::start() {
  Parts& parts = *parts_;
  parts.thread = std::thread([&parts] {
    asio::post(parts.context, [&parts] { parts.tick(); });
    while (!parts.context.stopped()) {
      try {
        parts.context.run();
      } catch (const std::exception& failure) {
        log_error("router: {}", failure.what());
      }
    }
  });
  parts.server->start();
}

bool Router::stop(std::chrono::nanoseconds grace) {
  Parts& parts = *parts_;
  parts.draining = true;
  const bool all_answered = parts.server->stop(grace);
  parts.context.stop();
  if (parts.thread.joinable()) parts.thread.join();
  return all_answered;
}

}  // namespace fathom::router
