// `fathom serve MODEL`: the HTTP server.
#include <fmt/format.h>
#include <malloc.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <new>
#include <optional>
#include <thread>

#include "base/log.h"
#include "base/version.h"
#include "cli/command.h"
#include "cli/command_line.h"
#include "cli/kv_event_flags.h"
#include "cli/loaded_engine.h"
#include "cli/node_engine.h"
#include "cli/separation.h"
#include "cli/server_flags.h"
#include "cli/service_notifier.h"
#include "cli/stop_signals.h"
#include "cli/transfer_flags.h"
#include "server/api/api_server.h"
#include "server/http/host.h"

namespace fathom {
namespace {

// Time for a running step to end after the shutdown timeout; a step that hangs must not keep the
// process alive.
constexpr std::chrono::milliseconds kLastStep{1500};

struct ServeFlags {
  ModelFlags model;
  ServerFlags server;
  TransferFlags transfer;
  EventPublisherOptions kv_events;
  QueueLimits queue;
  std::vector<std::string> names;
  int64_t max_choices = 32;
  int64_t queue_seconds = 120, total_seconds = 1800, watchdog_seconds = 300;
  int64_t grammar_seconds = 2;
  std::string metrics_prefix;
  bool strict = false;
  bool enable_priority = false;
  std::string scheduling_policy = "fcfs";
  // Sampling defaults of requests; none: see sampling_defaults.
  std::optional<double> temperature, top_p;
  std::optional<int64_t> top_k;
  std::string sampling_defaults = "model";
};

// Normalizes the prefix: "fathom" and "fathom_" are equivalent.
Result<std::string> metrics_prefix(std::string prefix) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == ':';
  };
  if (prefix.empty()) return prefix;
  if (!std::all_of(prefix.begin(), prefix.end(), allowed) || std::isdigit(prefix.front()) ||
      prefix == "vllm:") {
    return invalid(
        "--metrics-prefix is '{}', expected letters, digits, '_' and ':', no digit first, and not "
        "\"vllm:\"",
        prefix);
  }
  if (prefix.back() != '_' && prefix.back() != ':') prefix += '_';
  return prefix;
}

Result<ApiOptions> api_options(const ServeFlags& flags) {
  ApiOptions options;
  options.version = program_version();
  FATHOM_TRY(options.http, server_options(flags.server));
  options.http.worker_threads = 2;
  options.limits.max_choices = flags.max_choices;
  options.limits.refuse_unknown = flags.strict;
  options.limits.allow_priority = flags.enable_priority || flags.scheduling_policy == "priority";
  FATHOM_TRY(options.metrics_prefix, metrics_prefix(flags.metrics_prefix));
  options.watchdog_timeout = std::chrono::seconds(flags.watchdog_seconds);
  return options;
}

// A model's default name. "models/fathom-tiny/" and a hub snapshot's folder get the name of their
// content.
std::string default_name(const std::string& given, const Checkpoint& checkpoint) {
  std::string path = given.empty() ? checkpoint.directory() : given;
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  // A hub id is its own name; for a directory it is the last component.
  const bool is_path = given.empty() || path.starts_with('/') || path.starts_with('.') ||
                       path == checkpoint.directory();
  return is_path ? path.substr(path.rfind('/') + 1) : path;
}

// For /server_info, with the ranks of each node.
json::object placement_settings(const ModelFlags& flags, const TransferPlan& transfer) {
  const Placement placement = flags.placement();
  json::array nodes;
  const NodePlace place = node_place(flags.nodes).value_or(NodePlace());
  int rank = 0;
  for (const int count : ranks_of_nodes(place, placement.world()).value_or(std::vector<int>())) {
    json::array ranks;
    for (int i = 0; i < count; ++i) ranks.push_back(rank++);
    nodes.push_back(std::move(ranks));
  }
  json::object settings = {{"world_size", placement.world()},
                           {"tensor_parallel_size", placement.tp},
                           {"data_parallel_size", placement.dp},
                           {"enable_expert_parallel", placement.expert_parallel},
                           {"ranks_of_nodes", std::move(nodes)}};
  const auto ranks_of = [&](const std::vector<int>& lanes) {
    json::array ranks;
    for (const int lane : lanes) {
      for (int i = 0; i < placement.tp; ++i) ranks.push_back(placement.rank_of(lane, i));
    }
    return ranks;
  };
  if (transfer.has_sites()) {
    settings["prefill_ranks"] = ranks_of(transfer.prefill_lanes);
    settings["decode_ranks"] = ranks_of(transfer.decode_lanes);
  }
  return settings;
}

std::unique_ptr<Backend> make_backend(LoadedEngine loaded, const ServeFlags& flags,
                                      const TransferPlan& transfer) {
  auto backend = std::make_unique<Backend>();
  ServedModel& served = backend->served;
  served.names = flags.names;
  if (served.names.empty()) {
    served.names.push_back(default_name(flags.model.model, loaded.checkpoint));
  }
  served.tokenizer = loaded.tokenizer;
  served.chat_format = loaded.chat_format;
  served.vocab_size = loaded.checkpoint.config().vocab_size;
  served.max_model_len = loaded.max_model_len;
  const auto& defaults = loaded.checkpoint.generation_defaults();
  const bool from_model = flags.sampling_defaults == "model";
  served.temperature = flags.temperature ? flags.temperature
                       : from_model      ? defaults.temperature
                                         : std::nullopt;
  served.top_p = flags.top_p ? flags.top_p : from_model ? defaults.top_p : std::nullopt;
  served.top_k = flags.top_k ? flags.top_k : from_model ? defaults.top_k : std::nullopt;
  served.created = std::chrono::duration_cast<std::chrono::seconds>(
                       std::chrono::system_clock::now().time_since_epoch())
                       .count();
  served.path = loaded.checkpoint.directory();
  served.version = program_version();
  served.fingerprint = fmt::format("fathom-{}-{}-{}", program_version(), name_of(loaded.compute),
                                   name_of(loaded.cache_format));
  backend->cache = {.dtype = std::string(name_of(loaded.cache_format)),
                    .prefix_caching = flags.model.prefix_caching.value_or(true)};
  backend->settings = {{"dtype", name_of(loaded.compute)},
                       {"kv_cache_dtype", name_of(loaded.cache_format)},
                       {"max_num_seqs", loaded.max_num_seqs},
                       {"max_num_batched_tokens", flags.model.step_rows()},
                       {"max_queued_requests", flags.queue.max_requests},
                       {"threads", loaded.num_threads},
                       {"placement", placement_settings(flags.model, transfer)}};
  backend->grammars = std::make_unique<GrammarCompiler>(
      served.tokenizer, served.vocab_size,
      GrammarCompilerOptions{.deadline = std::chrono::seconds(flags.grammar_seconds)});
  backend->engine = std::move(loaded.engine);
  return backend;
}

// Returns a request's large buffers (a body of megabytes and what is derived from it) to the system
// when they are freed. By default the allocator raises its threshold after the first one and keeps
// later ones.
void return_large_buffers() { mallopt(M_MMAP_THRESHOLD, 1 << 20); }

// Ends the process when the engine is dead. A thread, which ends with this object: whatever is
// thrown while it runs, it is not destroyed running.
class DeathWatch {
 public:
  explicit DeathWatch(ApiServer& server)
      : server_(server), thread_([&server] {
          if (server.wait_until_dead()) std::_Exit(kExitDead);
        }) {}
  ~DeathWatch() {
    try {
      server_.stop(std::chrono::nanoseconds(0));  // ends the wait, whatever else fails
    } catch (const std::bad_alloc&) {
    }
    thread_.join();
  }
  DeathWatch(const DeathWatch&) = delete;
  DeathWatch& operator=(const DeathWatch&) = delete;

 private:
  ApiServer& server_;
  std::thread thread_;
};

// Watchdog for shutdown: ends the process if not destroyed within `limit`.
class LastResort {
 public:
  explicit LastResort(std::chrono::nanoseconds limit)
      : thread_([this, limit] {
          std::unique_lock lock(mutex_);
          if (changed_.wait_for(lock, limit, [this] { return ended_; })) return;
          log_warning("a step did not end within {} s of the end: it is cut off",
                      std::chrono::duration<double>(kLastStep).count());
          std::_Exit(0);
        }) {}
  ~LastResort() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  LastResort(const LastResort&) = delete;
  LastResort& operator=(const LastResort&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::thread thread_;  // last: it uses the others
};

Result<int> serve(ServeFlags flags) {
  return_large_buffers();
  std::signal(SIGPIPE, SIG_IGN);  // writing to a closed log pipe must not end the server
  StopSignals signals;
  ServiceNotifier notifier;
  set_log_level(log_level_of(flags.server.log_level));
  FATHOM_TRY(ApiOptions options, api_options(flags));
  FATHOM_TRY(TransferPlan transfer, transfer_plan(flags.transfer, flags.model));
  if (transfer.role == TransferRole::kPrefill) {
    options.why_no_generation =
        "this server computes prompts for others (--role prefill); ask one with --role decode";
  }
  const std::string scheme = options.http.tls_certificate_file.empty() ? "http" : "https";
  const bool open_to_all =
      options.http.api_keys.empty() && !http::is_loopback_host(options.http.host);
  FATHOM_TRY(const auto server, ApiServer::create(std::move(options)));
  FATHOM_RETURN_IF_ERROR(server->listen());
  server->start();
  if (open_to_all) {
    log_warning("{} is reachable from other machines and no --api-key is set",
                flags.server.http.host);
  }

  EngineNeeds needs;
  needs.num_seqs = flags.model.many_sequences();
  flags.queue.max_queue_time = std::chrono::seconds(flags.queue_seconds);
  flags.queue.max_total_time = std::chrono::seconds(flags.total_seconds);
  needs.queue = flags.queue;
  Separated separated(std::move(transfer), flags.model);
  needs.prefill = [&](const LoadedEngine& model) { return separated.connect(model); };
  needs.sites = separated.sites();
  FATHOM_TRY(const auto events, publish_cache_events(flags.kv_events, flags.model, needs));
  FATHOM_TRY(LoadedEngine loaded, load_engine(flags.model, needs));
  FATHOM_RETURN_IF_ERROR(separated.listen(loaded));
  log_info("{} sequences at once, {} tokens of cache, {} tokens a sequence", loaded.max_num_seqs,
           loaded.memory.tokens(), loaded.max_model_len);
  auto backend = make_backend(std::move(loaded), flags, separated.plan());
  backend->served.transfer = separated.port();
  const std::string name = backend->served.names.front();
  if (separated.plan().is_separated() || separated.plan().has_sites()) {
    backend->more_metrics = [&separated](std::string_view labels, const EngineStats& engine,
                                         std::string& out) {
      separated.write_metrics(labels, engine, out);
    };
  }
  signals.may_wait();
  server->serve(std::move(backend));
  log_info("serving {} on {}://{}", name, scheme,
           http::address_text(flags.server.http.host, server->port()));
  notifier.ready();

  bool all_ended = false;
  {
    std::optional<LastResort> last_resort;  // until the watch has ended too
    const DeathWatch watch(*server);
    signals.wait();
    notifier.stopping();
    const auto grace = std::chrono::seconds(flags.server.shutdown_seconds);
    last_resort.emplace(grace + kLastStep);
    all_ended = server->stop(grace);
  }
  if (server->is_dead()) return kExitDead;
  if (!all_ended)
    log_warning("some answers were cut off after {} s", flags.server.shutdown_seconds);
  return 0;
}

}  // namespace

void add_serve_command(CLI::App& app, Action* chosen) {
  auto flags = std::make_shared<ServeFlags>();
  CLI::App* command = app.add_subcommand("serve", "Serve a model over HTTP");
  command->footer(
      "Implements OpenAI's API (/v1/chat/completions, /v1/completions, /v1/responses,\n"
      "/v1/models), Anthropic's (/v1/messages), /tokenize, /detokenize, /generate, /metrics,\n"
      "/health and /ready. Limits that no flag changes: 16 KiB of headers, JSON 64 deep with\n"
      "100,000 keys, 4,096 messages, 128 tools, 16 stop strings of 256 bytes, 1,024 logit biases,\n"
      "64 KiB of schema or regex. A client that does not read for 60 s is cut off. Exit\n"
      "status: 0 stopped by a signal, 1 failed, 2 bad flags or model files, 3 the engine was\n"
      "stuck, or its device or another node lost, 130 a second signal.");
  add_model_positional(*command, &flags->model);
  FlagGroup requests(*command, "Requests");
  requests.texts("--served-model-name", &flags->names, "NAME",
                 "Name of the model, then aliases (default: its folder's name)");
  requests.choice(
      "--sampling-defaults", &flags->sampling_defaults, {"model", "openai"},
      "Sampling defaults of requests (model: generation_config.json's; openai: temperature "
      "and top_p 1)");
  requests.number("--temperature,--temp", &flags->temperature, 0, kMaxTemperature,
                  "Default temperature of requests", "as --sampling-defaults says");
  requests.number("--top-p", &flags->top_p, 0, 1, "Default top_p of requests",
                  "as --sampling-defaults says");
  requests.count("--top-k", &flags->top_k, -1, std::numeric_limits<int32_t>::max(),
                 "Default top_k of requests", "as --sampling-defaults says");
  requests.count("--max-choices", &flags->max_choices, 1, kMaxChoices, "Largest n of a request");
  requests.toggle("--strict", &flags->strict, "Refuse unknown fields");
  requests.toggle("--enable-priority", &flags->enable_priority,
                  "Clients may send `priority`: lower goes first, with ageing");
  requests.choice("--scheduling-policy", &flags->scheduling_policy, {"fcfs", "priority"},
                  "priority: the same as --enable-priority");
  requests.count("--max-queued-requests,--max-num-queued-reqs", &flags->queue.max_requests, 1,
                 1 << 20, "Maximum number of waiting requests; more get 429");
  requests.count("--max-queued-tokens,--max-num-queued-tokens", &flags->queue.max_tokens, 0,
                 int64_t{1} << 40, "Maximum number of their prompt tokens", "four times the cache");
  requests.count("--queue-timeout", &flags->queue_seconds, 0, 86'400,
                 "Seconds that a request may wait in the queue; 0: no limit");
  requests.count("--request-timeout", &flags->total_seconds, 0, 86'400,
                 "Seconds that a request may take in all; 0: no limit");
  requests.count("--grammar-timeout", &flags->grammar_seconds, 1, 3600,
                 "Seconds that compiling a request's schema or grammar may take");
  add_server_flags(*command, &flags->server);
  add_transfer_flags(*command, &flags->transfer);
  add_kv_event_flags(*command, &flags->kv_events);
  FlagGroup operation(*command, "Operation");
  operation.count("--watchdog-timeout", &flags->watchdog_seconds, 0, 86'400,
                  "Seconds without a step despite work after which the server ends; 0: never");
  operation.text("--metrics-prefix", &flags->metrics_prefix, "PREFIX",
                 "Export vLLM's metrics under this prefix too, for example fathom_");
  add_model_flags(*command, &flags->model);
  command->callback([flags, chosen] {
    *chosen = [flags] { return lead_or_follow(flags->model, [&] { return serve(*flags); }); };
  });
}

}  // namespace fathom
