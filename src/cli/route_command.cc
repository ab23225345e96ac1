// `fathom route --replica URL…`: the router in front of several servers.
#include <CLI/CLI.hpp>
#include <csignal>

#include "base/log.h"
#include "cli/command.h"
#include "cli/command_line.h"
#include "cli/server_flags.h"
#include "cli/service_notifier.h"
#include "cli/stop_signals.h"
#include "router/router.h"
#include "server/http/host.h"

namespace fathom {
namespace {

struct RouteFlags {
  ServerFlags server;
  router::RouterOptions options;
  std::vector<std::string> replicas, prefill, decode;
  std::string policy = "cache_aware";
  std::optional<double> cache_threshold, balance_rel;
  int64_t tree_bytes = 64 << 20;
  int64_t poll_seconds = 2, poll_timeout_seconds = 5, open_seconds = 30;
  int64_t connect_seconds = 5, stream_seconds = 300, total_seconds = 1800;
  bool disable_retries = false;
};

Result<int> route(RouteFlags flags) {
  std::signal(SIGPIPE, SIG_IGN);  // writing to a closed log pipe must not end the router
  if (!flags.prefill.empty() || !flags.decode.empty()) {
    return invalid("--prefill and --decode are not available: name whole servers with --replica");
  }
  if (flags.replicas.empty())
    return invalid("--replica is missing: name at least one, http://HOST:PORT");
  StopSignals signals;
  ServiceNotifier notifier;
  set_log_level(log_level_of(flags.server.log_level));
  router::RouterOptions& options = flags.options;
  FATHOM_TRY(options.http, server_options(flags.server));
  options.http.worker_threads = 1;
  options.http.write_delay = std::chrono::milliseconds(0);
  options.log_requests = options.http.access_log;
  for (const std::string& url : flags.replicas) {
    const auto endpoint = client::parse_base_url(url);
    if (!endpoint) return invalid("--replica: {}", endpoint.error().message);
    options.replicas.push_back(*endpoint);
  }
  options.policy.policy = *router::policy_named(flags.policy);
  options.policy.cache_threshold = flags.cache_threshold.value_or(options.policy.cache_threshold);
  options.policy.balance_rel = flags.balance_rel.value_or(options.policy.balance_rel);
  options.max_tree_bytes = flags.tree_bytes;
  if (flags.disable_retries) options.max_retries = 0;
  options.connect_timeout = std::chrono::seconds(flags.connect_seconds);
  options.stream_timeout = std::chrono::seconds(flags.stream_seconds);
  options.request_timeout = std::chrono::seconds(flags.total_seconds);
  options.poll_interval = std::chrono::seconds(flags.poll_seconds);
  options.poll_timeout = std::chrono::seconds(flags.poll_timeout_seconds);
  options.breaker.open_for = std::chrono::seconds(flags.open_seconds);
  const size_t count = options.replicas.size();
  const bool tls = !options.http.tls_certificate_file.empty();
  if (options.http.api_keys.empty() && !http::is_loopback_host(options.http.host)) {
    log_warning("{} is reachable from other machines and no --api-key is set", options.http.host);
  }
  FATHOM_TRY(const auto server, router::Router::create(std::move(options)));
  FATHOM_RETURN_IF_ERROR(server->listen());
  signals.may_wait();
  server->start();
  log_info("routing to {} {} on {}://{}", count, count == 1 ? "replica" : "replicas",
           tls ? "https" : "http", http::address_text(flags.server.http.host, server->port()));
  notifier.ready();
  signals.wait();
  notifier.stopping();
  if (!server->stop(std::chrono::seconds(flags.server.shutdown_seconds))) {
    log_warning("some answers were cut off after {} s", flags.server.shutdown_seconds);
  }
  return 0;
}

}  // namespace

void add_route_command(CLI::App& app, Action* chosen) {
  auto flags = std::make_shared<RouteFlags>();
  CLI::App* command = app.add_subcommand("route", "Route requests to several servers of a model");
  command->footer(
      "Passes on everything under /v1, and /generate, /tokenize, /detokenize, /apply-template,\n"
      "/get_model_info, /server_info and /props. Answers /health, /ready, /metrics, /version and\n"
      "/replicas itself. Exit status: 0 stopped by a signal, 1 failed, 2 bad flags, 130 a second\n"
      "signal.");
  router::RouterOptions& options = flags->options;
  FlagGroup replicas(*command, "Replicas");
  replicas.texts("--replica,--worker-urls,--static-backends", &flags->replicas, "URL",
                 "Server to route to, http://HOST:PORT; several times for several");
  replicas.text("--replica-api-key", &options.replica_api_key, "KEY",
                "Key that replicas want, in place of the client's");
  replicas.texts("--prefill", &flags->prefill, "URL", "Not available yet");
  replicas.texts("--decode", &flags->decode, "URL", "Not available yet");
  FlagGroup choice(*command, "Choice");
  choice.choice("--policy,--routing-policy", &flags->policy,
                {"cache_aware", "power_of_two", "round_robin", "random"},
                "How a replica is chosen");
  choice.number("--cache-threshold", &flags->cache_threshold, 0, 1,
                "Share of a prompt that a replica must have seen to get it for that", "0.3");
  choice.count("--balance-abs-threshold", &options.policy.balance_abs, 0, 1 << 20,
               "Difference in requests beyond which loads count as unequal, and");
  choice.number("--balance-rel-threshold", &flags->balance_rel, 1, 1e6,
                "their ratio: then the least loaded replica is chosen", "1.5");
  choice.text("--session-header,--session-key", &options.session_header, "NAME",
              "Header whose value keeps a client at one replica");
  choice.count("--max-tree-bytes,--max-tree-size", &flags->tree_bytes, 1 << 16, int64_t{1} << 40,
               "Memory for what replicas have seen of prompts");
  FlagGroup failures(*command, "Failures");
  failures.count("--retry-max-retries,--max-retries", &options.max_retries, 0, 255,
                 "Further replicas to ask before the first byte of a reply");
  failures.toggle("--disable-retries", &flags->disable_retries, "The same as --max-retries 0");
  failures.count("--connect-timeout", &flags->connect_seconds, 1, 3600, "Seconds for a connection");
  failures.count("--stream-timeout", &flags->stream_seconds, 1, 86'400,
                 "Seconds that a replica may be silent within a reply");
  failures.count("--request-timeout,--request-timeout-secs", &flags->total_seconds, 0, 86'400,
                 "Seconds that a request may take in all; 0: no limit");
  failures.count("--cb-failure-threshold", &options.breaker.failure_threshold, 1, 1 << 20,
                 "Failures in a row that open a replica's circuit breaker");
  failures.count("--cb-success-threshold", &options.breaker.success_threshold, 1, 1 << 20,
                 "Successful trials in a row that close it");
  failures.count("--cb-timeout-duration-secs", &flags->open_seconds, 1, 86'400,
                 "Seconds that it stays open before a trial");
  failures.count("--health-check-interval-secs,--engine-stats-interval", &flags->poll_seconds, 1,
                 3600, "Seconds between two looks at a replica's /ready and /metrics");
  failures.count("--health-check-timeout-secs", &flags->poll_timeout_seconds, 1, 3600,
                 "Seconds for one of them");
  failures.count("--health-failure-threshold", &options.poll_failure_threshold, 1, 1 << 20,
                 "Looks in a row without an answer after which a replica gets no requests");
  add_server_flags(*command, &flags->server);
  command->callback([flags, chosen] { *chosen = [flags] { return route(*flags); }; });
}

}  // namespace fathom
