#include "cli/bench_workload.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <random>

#include "base/json.h"
#include "base/random.h"
#include "cli/bench.h"

namespace fathom {
namespace {

constexpr int64_t kMostTokens = int64_t{1} << 24;  // limit of one recorded prompt or output
constexpr int64_t kMostMilliseconds = int64_t{1} << 50;
constexpr int64_t kBlockTokens = 512;  // per Mooncake hash id
constexpr int64_t kBytesPerToken = 4;  // of English text
// Streams of random numbers. Those of prompts count up from 0.
constexpr uint64_t kGapStream = ~1ull, kCancelStream = ~2ull;
// Streams of prefixes count down from here.
constexpr uint64_t kPrefixStream = ~3ull;

int64_t scaled(int64_t length, double scale) {
  return std::max<int64_t>(1, std::llround(static_cast<double>(length) * scale));
}

// Calls take(line, where) for each non-empty line until it returns false.
Result<> for_each_line(const std::string& path,
                       const std::function<Result<bool>(std::string_view, std::string)>& take) {
  FATHOM_TRY(const std::string text, read_text_file(path, kMaxDatasetBytes));
  int64_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line(text.data() + begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    FATHOM_TRY(const bool more, take(line, fmt::format("{} line {}", path, number)));
    if (!more) break;
  }
  return {};
}

std::vector<int32_t> joined(std::vector<int32_t> first, const std::vector<int32_t>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

std::vector<LoadRequest> random_requests(const WorkloadOptions& options) {
  const auto prefix =
      random_prompt(options.vocab_size, options.random_prefix_len, options.seed, kPrefixStream);
  std::vector<LoadRequest> requests(static_cast<size_t>(options.num_prompts));
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt_ids =
        joined(prefix, random_prompt(options.vocab_size,
                                     spread_length(options.random_input_len, options.range_ratio,
                                                   options.seed, 2 * i),
                                     options.seed, i));
    requests[i].output_tokens =
        spread_length(options.random_output_len, options.range_ratio, options.seed, 2 * i + 1);
  }
  return requests;
}

// Prompts with the same prefix are not adjacent, as in vLLM's dataset of this name.
Result<std::vector<LoadRequest>> prefix_repetition_requests(const WorkloadOptions& options) {
  const int64_t each = options.num_prompts / options.num_prefixes;
  if (each == 0) {
    return invalid("--num-prompts is {}, the least allowed is --prefix-repetition-num-prefixes, {}",
                   options.num_prompts, options.num_prefixes);
  }
  std::vector<std::vector<int32_t>> prefixes;
  for (int64_t i = 0; i < options.num_prefixes; ++i) {
    prefixes.push_back(random_prompt(options.vocab_size, options.prefix_len, options.seed,
                                     kPrefixStream - static_cast<uint64_t>(i)));
  }
  std::vector<LoadRequest> requests(static_cast<size_t>(each * options.num_prefixes));
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt_ids =
        joined(prefixes[i % prefixes.size()],
               random_prompt(options.vocab_size, options.suffix_len, options.seed, i));
    requests[i].output_tokens = options.repetition_output_len;
  }
  return requests;
}

// Reads the prompts of a file: the "prompt" strings of a .jsonl, otherwise each non-empty line.
Result<std::vector<LoadRequest>> custom_requests(const WorkloadOptions& options) {
  std::vector<LoadRequest> requests;
  FATHOM_RETURN_IF_ERROR(for_each_line(
      options.path, [&](std::string_view line, const std::string& where) -> Result<bool> {
        if (line.find_first_not_of(" \t") == std::string_view::npos) return true;
        LoadRequest request;
        request.output_tokens = spread_length(options.random_output_len, options.range_ratio,
                                              options.seed, 2 * requests.size() + 1);
        request.prompt_text = line;
        if (options.path.ends_with(".jsonl")) {
          FATHOM_TRY(const json::value value, parse_json(line, where));
          if (!value.is_object()) {
            return invalid("{}: is {}, expected an object", where, brief(value));
          }
          FATHOM_TRY(request.prompt_text,
                     JsonFields(value.get_object(), where + ": ").string("prompt"));
        }
        requests.push_back(std::move(request));
        return std::ssize(requests) < options.num_prompts;
      }));
  return requests;
}

Result<std::string> turn_text(const json::value& turn, const std::string& where) {
  if (!turn.is_object()) return invalid("{}: is {}, expected an object", where, brief(turn));
  return JsonFields(turn.get_object(), where + ": ").string("value");
}

Result<std::vector<LoadRequest>> sharegpt_requests(const WorkloadOptions& options) {
  FATHOM_TRY(const std::string text, read_text_file(options.path, kMaxDatasetBytes));
  FATHOM_TRY(const json::value document, parse_json(text, options.path));
  if (!document.is_array()) {
    return invalid("{}: is {}, expected an array", options.path, brief(document));
  }
  std::vector<LoadRequest> requests;
  size_t number = 0;
  for (const json::value& item : document.get_array()) {
    if (std::ssize(requests) == options.num_prompts) break;
    const std::string where = fmt::format("{} item {}", options.path, ++number);
    const json::value* turns =
        item.is_object() ? item.get_object().if_contains("conversations") : nullptr;
    if (turns == nullptr || !turns->is_array()) {
      return invalid("{}: has no array \"conversations\"", where);
    }
    if (turns->get_array().size() < 2) continue;
    LoadRequest request;
    FATHOM_TRY(request.prompt_text, turn_text(turns->get_array()[0], where));
    FATHOM_TRY(const std::string answer, turn_text(turns->get_array()[1], where));
    if (request.prompt_text.empty()) continue;
    request.output_tokens = options.sharegpt_output_len > 0
                                ? options.sharegpt_output_len
                                : std::max<int64_t>(1, std::ssize(answer) / kBytesPerToken);
    requests.push_back(std::move(request));
  }
  return requests;
}

// Parses all of `text` as an integer from 0 to `most`.
std::optional<int64_t> whole_number(std::string_view text, int64_t most) {
  int64_t value = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), value);
  if (read.ec != std::errc() || read.ptr != text.data() + text.size()) return std::nullopt;
  return value >= 0 && value <= most ? std::optional(value) : std::nullopt;
}

// Converts "2023-11-16 18:15:46.6805900" to seconds since 1970.
std::optional<double> seconds_of_timestamp(std::string_view text) {
  if (text.size() < 19) return std::nullopt;
  // Offset and length of year, month, day, hour, minute and second.
  constexpr std::pair<size_t, size_t> kParts[] = {{0, 4},  {5, 2},  {8, 2},
                                                  {11, 2}, {14, 2}, {17, 2}};
  int64_t parts[6];
  for (size_t i = 0; i < 6; ++i) {
    const auto part = whole_number(text.substr(kParts[i].first, kParts[i].second), 9999);
    if (!part) return std::nullopt;
    parts[i] = *part;
  }
  const std::chrono::year_month_day date{std::chrono::year(static_cast<int>(parts[0])),
                                         std::chrono::month(static_cast<unsigned>(parts[1])),
                                         std::chrono::day(static_cast<unsigned>(parts[2]))};
  if (!date.ok()) return std::nullopt;
  double fraction = 0;
  if (text.size() > 19) {
    const auto read = std::from_chars(text.data() + 19, text.data() + text.size(), fraction);
    if (read.ec != std::errc() || read.ptr != text.data() + text.size()) return std::nullopt;
  }
  const int64_t days = std::chrono::sys_days(date).time_since_epoch().count();
  return static_cast<double>(((days * 24 + parts[3]) * 60 + parts[4]) * 60 + parts[5]) + fraction;
}

Result<std::vector<LoadRequest>> azure_requests(const WorkloadOptions& options) {
  std::vector<LoadRequest> requests;
  std::optional<double> first;
  FATHOM_RETURN_IF_ERROR(for_each_line(
      options.path, [&](std::string_view line, const std::string& where) -> Result<bool> {
        if (line.starts_with("TIMESTAMP")) return true;
        const size_t one = line.find(','), two = line.rfind(',');
        if (one == two)
          return invalid("{}: expected TIMESTAMP,ContextTokens,GeneratedTokens", where);
        const auto time = seconds_of_timestamp(line.substr(0, one));
        const auto input = whole_number(line.substr(one + 1, two - one - 1), kMostTokens);
        const auto output = whole_number(line.substr(two + 1), kMostTokens);
        if (!time || !input || !output) {
          return invalid("{}: \"{}\" is not a time and two counts up to {}", where,
                         line.substr(0, 80), kMostTokens);
        }
        if (!first) first = time;
        LoadRequest request;
        request.at_seconds = (*time - *first) * options.time_scale;
        request.prompt_ids = random_prompt(options.vocab_size, scaled(*input, options.length_scale),
                                           options.seed, requests.size());
        request.output_tokens = scaled(*output, options.length_scale);
        requests.push_back(std::move(request));
        return std::ssize(requests) < options.num_prompts;
      }));
  return requests;
}

Result<LoadRequest> mooncake_request(const WorkloadOptions& options, std::string_view line,
                                     const std::string& where) {
  FATHOM_TRY(const json::value value, parse_json(line, where));
  if (!value.is_object()) return invalid("{}: is {}, expected an object", where, brief(value));
  const JsonFields fields(value.get_object(), where + ": ");
  FATHOM_TRY(const int64_t milliseconds, fields.integer("timestamp", 0, kMostMilliseconds));
  FATHOM_TRY(const int64_t input, fields.integer("input_length", 1, kMostTokens));
  FATHOM_TRY(const int64_t output, fields.integer("output_length", 0, kMostTokens));
  const json::value* hashes = fields.find("hash_ids");
  const int64_t blocks = (input + kBlockTokens - 1) / kBlockTokens;
  if (hashes == nullptr || !hashes->is_array() || std::ssize(hashes->get_array()) < blocks) {
    return invalid("{}: hash_ids must be an array of {} ids, one for {} tokens", where, blocks,
                   kBlockTokens);
  }
  LoadRequest request;
  request.at_seconds = static_cast<double>(milliseconds) / 1e3 * options.time_scale;
  request.output_tokens = scaled(output, options.length_scale);
  const int64_t block = scaled(kBlockTokens, options.length_scale);
  const auto length = std::min(scaled(input, options.length_scale), blocks * block);
  for (const json::value& hash : hashes->get_array()) {
    if (!hash.is_int64() || hash.get_int64() < 0) {
      return invalid("{}: hash_ids has {}, expected whole numbers", where, brief(hash));
    }
    if (std::ssize(request.prompt_ids) >= length) break;
    const auto ids = random_prompt(options.vocab_size, block, options.seed,
                                   static_cast<uint64_t>(hash.get_int64()));
    request.prompt_ids.insert(request.prompt_ids.end(), ids.begin(), ids.end());
  }
  request.prompt_ids.resize(static_cast<size_t>(length));
  return request;
}

Result<std::vector<LoadRequest>> mooncake_requests(const WorkloadOptions& options) {
  std::vector<LoadRequest> requests;
  FATHOM_RETURN_IF_ERROR(for_each_line(
      options.path, [&](std::string_view line, const std::string& where) -> Result<bool> {
        FATHOM_TRY(LoadRequest request, mooncake_request(options, line, where));
        requests.push_back(std::move(request));
        return std::ssize(requests) < options.num_prompts;
      }));
  return requests;
}

// Replaces the arrival times by random ones.
void space_out(const WorkloadOptions& options, std::vector<LoadRequest>& requests) {
  std::mt19937_64 source(mix64(options.seed ^ kGapStream));
  std::gamma_distribution<double> gap(options.burstiness,
                                      1 / (options.request_rate * options.burstiness));
  double at = 0;
  for (LoadRequest& request : requests) {
    request.at_seconds = at;
    at += gap(source);
  }
}

Result<std::vector<LoadRequest>> read_dataset(const WorkloadOptions& options) {
  if (options.dataset == "random" || options.dataset == "prefix_repetition") {
    if (!options.path.empty()) {
      return invalid(
          "--dataset-path is {}, and --dataset-name {} reads no file: say which kind it is",
          options.path, options.dataset);
    }
    if (options.dataset == "random") return random_requests(options);
    return prefix_repetition_requests(options);
  }
  if (options.path.empty()) {
    return invalid("--dataset-name {} needs --dataset-path FILE", options.dataset);
  }
  if (options.dataset == "custom") return custom_requests(options);
  if (options.dataset == "sharegpt") return sharegpt_requests(options);
  return options.dataset == "azure" ? azure_requests(options) : mooncake_requests(options);
}

}  // namespace

Result<std::vector<LoadRequest>> make_workload(const WorkloadOptions& options) {
  FATHOM_TRY(std::vector<LoadRequest> requests, read_dataset(options));
  if (requests.empty()) return invalid("{}: has no requests", options.path);
  std::stable_sort(
      requests.begin(), requests.end(),
      [](const LoadRequest& a, const LoadRequest& b) { return a.at_seconds < b.at_seconds; });
  if (options.request_rate > 0) space_out(options, requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].cancelled = random_uniform(options.seed, kCancelStream, i) < options.cancel_rate;
  }
  return requests;
}

}  // namespace fathom
