// `fathom bench serve`: load on a running server, as its clients see it.
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <limits>
#include <thread>

#include "cli/bench.h"
#include "cli/bench_load.h"
#include "cli/bench_workload.h"

namespace fathom {
namespace {

constexpr double kMostSeconds = 86'400;

struct ServeBenchFlags {
  std::string base_url, host = "127.0.0.1";
  int64_t port = 8000;
  std::string request_rate = "inf";
  std::optional<double> range_ratio, burstiness, time_scale, length_scale;
  std::optional<double> cancel_rate, cancel_delay, temperature;
  int64_t seed = 0;
  std::string metrics = "ttft,tpot,itl,e2el", percentiles = "99";
  std::vector<std::string> goodput;
  WorkloadOptions workload;
  ServerLoad load;
  OutputFlags output;
  bool quiet = false;
  // Flags of other load generators.
  std::string backend, label, result_dir, extra_body;
  std::optional<double> top_p, min_p, frequency_penalty, presence_penalty, repetition_penalty;
  std::optional<int64_t> top_k, logprobs;
  std::vector<std::string> metadata;
  int64_t num_warmups = 0, ready_seconds = 0;
  bool flush_cache = false;
};

// The endpoint of a --backend of vLLM's or SGLang's load generator; empty if not supported.
std::string endpoint_of(const std::string& backend) {
  for (const char* chat : {"openai-chat", "sglang-oai-chat", "vllm-chat"}) {
    if (backend == chat) return "/v1/chat/completions";
  }
  for (const char* text : {"openai", "vllm", "sglang", "sglang-oai", "sglang-native", "lmdeploy"}) {
    if (backend == text) return "/v1/completions";
  }
  return "";
}

std::vector<std::string> words_of(const std::string& list) {
  std::vector<std::string> words;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    words.push_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

Result<ServingReportOptions> report_options(const ServeBenchFlags& flags) {
  ServingReportOptions options{.request_rate = flags.request_rate,
                               .max_concurrency = flags.load.max_concurrency,
                               .metrics = words_of(flags.metrics),
                               .percentiles = {}};
  for (const std::string& metric : options.metrics) {
    if (metric != "ttft" && metric != "tpot" && metric != "itl" && metric != "e2el") {
      return invalid("--percentile-metrics has \"{}\", allowed are ttft, tpot, itl, e2el", metric);
    }
  }
  for (const std::string& word : words_of(flags.percentiles)) {
    const auto percent = parse_number(word);
    if (!percent || *percent < 0 || *percent > 100) {
      return invalid("--metric-percentiles has \"{}\", allowed are numbers from 0 to 100", word);
    }
    options.percentiles.push_back(*percent);
  }
  return options;
}

// Parses "ttft:200": at most 200 ms.
Result<ServiceGoals> service_goals(const std::vector<std::string>& words) {
  ServiceGoals goals;
  for (const std::string& word : words) {
    const size_t colon = word.find(':');
    const std::string name = word.substr(0, colon);
    const auto limit = parse_number(colon == std::string::npos ? "" : word.substr(colon + 1));
    auto* const goal = name == "ttft"   ? &goals.ttft
                       : name == "tpot" ? &goals.tpot
                       : name == "e2el" ? &goals.e2el
                                        : nullptr;
    if (goal == nullptr || !limit || *limit <= 0) {
      return invalid("--goodput is \"{}\", expected ttft:MS, tpot:MS or e2el:MS", word);
    }
    *goal = *limit;
  }
  return goals;
}

Result<json::object> get_object(client::HttpClient& client, const ServeBenchFlags& flags,
                                const std::string& path) {
  FATHOM_TRY(const client::ClientReply reply, client.ask({.path = path,
                                                          .api_key = flags.load.api_key,
                                                          .time_limit = std::chrono::seconds(30)}));
  if (reply.status != 200) {
    return invalid("the server answers {} with status {}", path, reply.status);
  }
  FATHOM_TRY(const json::value value, parse_json(reply.body, path));
  if (!value.is_object()) return invalid("{}: is {}, expected an object", path, brief(value));
  return value.get_object();
}

// The fields from --extra-body and the sampling flags.
Result<json::object> extra_fields(const ServeBenchFlags& flags) {
  json::object extra;
  const auto add = [&extra](const char* name, const auto& value) {
    if (value) extra[name] = *value;
  };
  add("top_p", flags.top_p);
  add("min_p", flags.min_p);
  add("top_k", flags.top_k);
  add("frequency_penalty", flags.frequency_penalty);
  add("presence_penalty", flags.presence_penalty);
  add("repetition_penalty", flags.repetition_penalty);
  if (flags.logprobs && flags.load.endpoint == "/v1/chat/completions") {
    extra["logprobs"] = true;
    extra["top_logprobs"] = *flags.logprobs;
  } else {
    add("logprobs", flags.logprobs);
  }
  if (flags.extra_body.empty()) return extra;
  FATHOM_TRY(const json::value given, parse_json(flags.extra_body, "--extra-body"));
  if (!given.is_object()) return invalid("--extra-body is {}, expected an object", brief(given));
  for (const auto& [name, value] : given.get_object()) extra[name] = value;
  return extra;
}

// Polls once a second until the server is ready.
Result<> wait_until_ready(client::HttpClient& client, const ServeBenchFlags& flags) {
  for (int64_t second = 0;; ++second) {
    const auto reply = client.ask({.path = "/ready", .time_limit = std::chrono::seconds(5)});
    // Other servers may lack this path; any reply will do.
    if (reply && reply->status != 503) return {};
    if (second >= flags.ready_seconds) {
      return error(Code::kUnavailable,
                   "the server is not ready after {} s of --ready-check-timeout-sec",
                   flags.ready_seconds);
    }
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
}

// Sends the first requests, all at once, before the measurement.
void warm_up(client::HttpClient& client, const ServeBenchFlags& flags,
             const std::vector<LoadRequest>& requests) {
  std::vector<LoadRequest> first;
  for (int64_t i = 0; i < flags.num_warmups; ++i) {
    first.push_back(requests[static_cast<size_t>(i) % requests.size()]);
    first.back().at_seconds = 0;
    first.back().cancelled = false;
  }
  ServerLoad load = flags.load;
  load.show_progress = false;
  const LoadRun run = run_load(client, first, load);
  for (const auto& [message, count] : run.failures) {
    fmt::print(stderr, "{} of the warm-up failed: {}\n", count, message);
  }
}

Result<> flush_cache(client::HttpClient& client, const ServeBenchFlags& flags) {
  FATHOM_TRY(const client::ClientReply reply, client.ask({.method = "POST",
                                                          .path = "/flush_cache",
                                                          .api_key = flags.load.api_key,
                                                          .body = "{}",
                                                          .time_limit = std::chrono::seconds(30)}));
  if (reply.status == 200) return {};
  return invalid("--flush-cache: the server answers /flush_cache with status {}", reply.status);
}

// The first model in the server's list.
Result<std::string> ask_model(client::HttpClient& client, const ServeBenchFlags& flags) {
  FATHOM_TRY(const json::object models, get_object(client, flags, "/v1/models"));
  const json::value* list = models.if_contains("data");
  if (list == nullptr || !list->is_array() || list->get_array().empty() ||
      !list->get_array().front().is_object()) {
    return invalid("/v1/models names no model, say --model");
  }
  return JsonFields(list->get_array().front().get_object(), "/v1/models: data[0].").string("id");
}

Result<int64_t> ask_vocab_size(client::HttpClient& client, const ServeBenchFlags& flags) {
  const auto info = get_object(client, flags, "/server_info");
  const json::value* model = info ? info->if_contains("model") : nullptr;
  if (model == nullptr || !model->is_object()) {
    return invalid("the server does not tell its vocabulary's size, say --vocab-size");
  }
  return JsonFields(model->get_object(), "/server_info: model.").integer("vocab_size", 2, 1 << 30);
}

json::object serve_json(const ServeBenchFlags& flags, const ServingFigures& figures,
                        const LoadRun& run, size_t num_prompts) {
  json::object object = {{"date", utc_now()},
                         {"backend", flags.backend.empty() ? "openai" : flags.backend},
                         {"endpoint", flags.load.endpoint},
                         {"model_id", flags.load.model},
                         {"dataset_name", flags.workload.dataset},
                         {"num_prompts", num_prompts},
                         {"seed", flags.seed},
                         {"burstiness", flags.workload.burstiness},
                         {"time_scale", flags.workload.time_scale},
                         {"length_scale", flags.workload.length_scale},
                         {"cancel_rate", flags.workload.cancel_rate}};
  if (!flags.label.empty()) object["label"] = flags.label;
  for (const std::string& pair : flags.metadata) {
    const size_t equals = pair.find('=');
    object[pair.substr(0, equals)] = pair.substr(equals + 1);
  }
  if (flags.workload.request_rate > 0) {
    object["request_rate"] = flags.workload.request_rate;
  } else {
    object["request_rate"] = flags.request_rate;
  }
  object["max_concurrency"] =
      flags.load.max_concurrency > 0 ? json::value(flags.load.max_concurrency) : json::value();
  object["cancelled"] = figures.cancelled;
  object["total_cached_tokens"] = figures.cached_tokens;
  object["total_accepted_tokens"] = figures.accepted_tokens;
  json::object& errors = object["errors"].emplace_object();
  for (const auto& [message, count] : run.failures) errors[message] = count;
  return object;
}

Result<int> bench_serve(ServeBenchFlags flags) {
  if (!flags.backend.empty() && endpoint_of(flags.backend).empty()) {
    return invalid(
        "--backend is \"{}\", allowed are openai, vllm, sglang, sglang-oai, sglang-native, "
        "lmdeploy, "
        "openai-chat, sglang-oai-chat, vllm-chat",
        flags.backend);
  }
  FATHOM_TRY(const ServingReportOptions report, report_options(flags));
  FATHOM_TRY(const ServiceGoals goals, service_goals(flags.goodput));
  client::Endpoint endpoint{flags.host, static_cast<int>(flags.port)};
  if (!flags.base_url.empty()) {
    FATHOM_TRY(endpoint, client::parse_base_url(flags.base_url));
  }
  WorkloadOptions& workload = flags.workload;
  if (flags.request_rate != "inf") {
    const auto rate = parse_number(flags.request_rate);
    if (!rate || *rate <= 0) {
      return invalid("--request-rate is \"{}\", expected a number above 0, or inf",
                     flags.request_rate);
    }
    workload.request_rate = *rate;
  }
  for (const std::string& pair : flags.metadata) {
    if (pair.find('=') == std::string::npos) {
      return invalid("--metadata is \"{}\", expected NAME=VALUE", pair);
    }
  }
  if (!flags.result_dir.empty()) {
    std::string& file = flags.output.result_file;
    if (file.empty() && flags.output.save) file = fmt::format("{}.json", utc_now());
    if (!file.empty()) file = (std::filesystem::path(flags.result_dir) / file).string();
  }
  workload.seed = static_cast<uint64_t>(flags.seed);
  workload.range_ratio = flags.range_ratio.value_or(0);
  workload.burstiness = flags.burstiness.value_or(1);
  workload.time_scale = flags.time_scale.value_or(1);
  workload.length_scale = flags.length_scale.value_or(1);
  workload.cancel_rate = flags.cancel_rate.value_or(0);
  flags.load.cancel_delay_seconds = flags.cancel_delay.value_or(0.5);
  flags.load.temperature = flags.temperature.value_or(0);
  flags.load.show_progress = !flags.quiet;
  FATHOM_TRY(flags.load.extra, extra_fields(flags));

  FATHOM_TRY(const auto client, client::HttpClient::create(endpoint));
  if (flags.ready_seconds > 0) {
    FATHOM_RETURN_IF_ERROR(wait_until_ready(*client, flags));
  }
  if (flags.load.model.empty()) {
    auto model = ask_model(*client, flags);
    if (!model) {
      return with_context(fmt::format("{}:{}: ", endpoint.host, endpoint.port), model.error());
    }
    flags.load.model = std::move(*model);
  }
  if (workload.vocab_size == 0 && workload.dataset != "sharegpt") {
    FATHOM_TRY(workload.vocab_size, ask_vocab_size(*client, flags));
  }
  FATHOM_TRY(const std::vector<LoadRequest> requests, make_workload(workload));
  if (flags.num_warmups > 0) warm_up(*client, flags, requests);
  if (flags.flush_cache) {
    FATHOM_RETURN_IF_ERROR(flush_cache(*client, flags));
  }
  const LoadRun run = run_load(*client, requests, flags.load);

  ServingFigures figures = measure_serving(run.completed, run.begin, run.seconds, goals);
  figures.failed = run.failed;
  figures.cancelled = run.cancelled;
  figures.peak_concurrency = run.peak_concurrency;
  if (!flags.output.json) print_serving_report(figures, report);
  for (const auto& [message, count] : run.failures) {
    fmt::print(stderr, "{} failed: {}\n", count, message);
  }
  json::object object = serve_json(flags, figures, run, requests.size());
  add_serving_figures(figures, report, object);
  FATHOM_RETURN_IF_ERROR(report_json(flags.output, object));
  if (figures.completed == 0 && figures.cancelled == 0) {
    return error(Code::kUnavailable, "none of {} requests succeeded", requests.size());
  }
  return 0;
}

}  // namespace

void add_bench_serve_command(CLI::App& bench, Action* chosen) {
  auto flags = std::make_shared<ServeBenchFlags>();
  CLI::App* command = bench.add_subcommand("serve", "Load test of a running server");
  FlagGroup server(*command, "Server");
  server.text("--base-url", &flags->base_url, "URL",
              "http://HOST:PORT, instead of --host and --port");
  server.text("--host", &flags->host, "HOST", "Address of the server (default: 127.0.0.1)");
  server.count("--port", &flags->port, 1, 65535, "Port of the server");
  server.choice("--endpoint", &flags->load.endpoint, {"/v1/completions", "/v1/chat/completions"},
                "Endpoint to measure; chats get random ids as letters");
  server.text("--backend", &flags->backend, "NAME",
              "--endpoint by its name in other load generators: openai, vllm, sglang, openai-chat, "
              "sglang-oai-chat");
  server.count("--ready-check-timeout-sec", &flags->ready_seconds, 0, 86'400,
               "Seconds to wait for the server to be ready");
  server.toggle("--flush-cache", &flags->flush_cache, "Drop the server's prefix cache first");
  server.text("--api-key", &flags->load.api_key, "KEY", "Key to send");
  server.text("--model,--served-model-name", &flags->load.model, "NAME",
              "Model to request (default: the server's first)");
  FlagGroup work(*command, "Work");
  WorkloadOptions& workload = flags->workload;
  work.choice("--dataset-name", &workload.dataset,
              {"random", "prefix_repetition", "custom", "sharegpt", "azure", "mooncake"},
              "Source of the requests");
  work.text("--dataset-path", &workload.path, "FILE", "The dataset's file");
  work.count("--num-prompts", &workload.num_prompts, 1, kMostOfAFlag, "Maximum number of requests");
  work.count("--num-warmups", &flags->num_warmups, 0, kMostOfAFlag, "Warm-up requests");
  work.count("--random-input-len,--input-len", &workload.random_input_len, 1, kMostOfAFlag,
             "Tokens of each prompt");
  work.count("--random-output-len,--output-len,--custom-output-len", &workload.random_output_len, 1,
             kMostOfAFlag, "Tokens of each answer, of custom prompts too");
  work.count("--random-prefix-len", &workload.random_prefix_len, 0, kMostOfAFlag,
             "Tokens of a prefix that all prompts share");
  work.count("--prefix-repetition-prefix-len", &workload.prefix_len, 0, kMostOfAFlag,
             "Tokens of each prefix");
  work.count("--prefix-repetition-suffix-len", &workload.suffix_len, 1, kMostOfAFlag,
             "Tokens of each prompt after it");
  work.count("--prefix-repetition-num-prefixes", &workload.num_prefixes, 1, kMostOfAFlag,
             "Prefixes, each with an equal share of the prompts");
  work.count("--prefix-repetition-output-len", &workload.repetition_output_len, 1, kMostOfAFlag,
             "Tokens of each answer");
  work.number("--random-range-ratio", &flags->range_ratio, 0, 1,
              "Spread the lengths evenly by this share, up and down", "0");
  work.count("--sharegpt-output-len", &workload.sharegpt_output_len, 0, kMostOfAFlag,
             "Tokens of each answer; 0: about the recorded one's");
  work.count("--vocab-size", &workload.vocab_size, 0, 1 << 30,
             "Upper bound of token ids; 0: ask the server");
  work.number("--time-scale", &flags->time_scale, 0, kMostSeconds,
              "Factor of a trace's arrival times; 0.5 is twice as fast", "1");
  work.number("--length-scale", &flags->length_scale, 0, 1000,
              "Factor of a trace's lengths, including shared blocks", "1");
  work.count("--seed", &flags->seed, 0, std::numeric_limits<int64_t>::max(),
             "Seed of prompts, lengths, gaps and cancellations");
  work.toggle("--ignore-eos", &flags->load.ignore_eos,
              "Ignore the end-of-sequence token, so that answers have full length");
  work.number("--temperature", &flags->temperature, 0, 2, "Sampling temperature", "0");
  work.number("--top-p", &flags->top_p, 0, 1, "top_p of sampling", "the server's");
  work.count("--top-k", &flags->top_k, -1, kMostOfAFlag, "top_k of sampling", "the server's");
  work.number("--min-p", &flags->min_p, 0, 1, "min_p of sampling", "the server's");
  work.number("--frequency-penalty", &flags->frequency_penalty, -2, 2, "Frequency penalty", "0");
  work.number("--presence-penalty", &flags->presence_penalty, -2, 2, "Presence penalty", "0");
  work.number("--repetition-penalty", &flags->repetition_penalty, 0, 10, "Repetition penalty", "1");
  work.count("--logprobs", &flags->logprobs, 0, 20, "Alternatives per token to request", "none");
  work.text("--extra-body", &flags->extra_body, "JSON", "Further fields of each request");
  FlagGroup pace(*command, "Pace");
  pace.text("--request-rate", &flags->request_rate, "X",
            "Requests/s; inf: all at once, a trace at its own times (default: inf)");
  pace.number("--burstiness", &flags->burstiness, 0.001, 1000,
              "1: a Poisson process; less: bursts; more: steadier", "1");
  pace.count("--max-concurrency", &flags->load.max_concurrency, 0, kMostOfAFlag,
             "Maximum number of concurrent requests; 0: no limit");
  pace.number("--cancel-rate", &flags->cancel_rate, 0, 1, "Share of clients that disconnect", "0");
  pace.number("--cancel-delay", &flags->cancel_delay, 0, kMostSeconds, "Seconds until they do",
              "0.5");
  add_output_flags(*command, &flags->output);
  FlagGroup output(*command, "Output");
  output.text("--percentile-metrics", &flags->metrics, "LIST",
              "Times to report (default: ttft,tpot,itl,e2el)");
  output.text("--metric-percentiles", &flags->percentiles, "LIST",
              "Percentiles of them (default: 99)");
  output.texts("--goodput", &flags->goodput, "NAME:MS",
               "Count requests within ttft:MS, tpot:MS, e2el:MS");
  output.text("--result-dir", &flags->result_dir, "DIR", "Directory of the result file");
  output.text("--label", &flags->label, "TEXT", "Label in the JSON object");
  output.texts("--metadata", &flags->metadata, "NAME=VALUE", "Further fields of the JSON object");
  output.toggle("-q,--quiet", &flags->quiet, "No progress bar");
  const CLI::Option* const given_endpoint = command->get_option("--endpoint");
  command->callback([flags, chosen, given_endpoint] {
    const std::string endpoint = endpoint_of(flags->backend);
    // An unsupported backend is reported when the command runs.
    if (given_endpoint->count() == 0 && !endpoint.empty()) flags->load.endpoint = endpoint;
    *chosen = [flags] { return bench_serve(*flags); };
  });
}

}  // namespace fathom
