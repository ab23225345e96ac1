#include "cli/bench_load.h"

#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/progress.h"

namespace fathom {
namespace {

using Clock = std::chrono::steady_clock;

// A text of about as many tokens, a function of the ids: " w a r c …". For endpoints that accept no
// ids.
std::string letters_of(const std::vector<int32_t>& ids) {
  std::string text;
  for (const int32_t id : ids) {
    text += ' ';
    text += static_cast<char>('a' + id % 26);
  }
  return text;
}

json::object body_of(const LoadRequest& request, const ServerLoad& options) {
  json::object body = {{"model", options.model},
                       {"max_tokens", request.output_tokens},
                       {"temperature", options.temperature},
                       {"stream", true},
                       {"stream_options", {{"include_usage", true}}}};
  if (options.ignore_eos) body["ignore_eos"] = true;
  if (options.endpoint == "/v1/chat/completions") {
    const std::string text =
        request.prompt_text.empty() ? letters_of(request.prompt_ids) : request.prompt_text;
    body["messages"] = json::array{{{"role", "user"}, {"content", text}}};
  } else if (request.prompt_text.empty()) {
    body["prompt"] = json::value_from(request.prompt_ids);
  } else {
    body["prompt"] = request.prompt_text;
  }
  for (const auto& [name, value] : options.extra) body[name] = value;
  return body;
}

// "error.message" of an error's body, or the beginning of the body.
std::string message_of(std::string_view text) {
  const auto value = parse_json(text, "error");
  if (value && value->is_object()) {
    const json::value* error = value->get_object().if_contains("error");
    if (error != nullptr && error->is_object()) {
      const json::value* message = error->get_object().if_contains("message");
      if (message != nullptr && message->is_string()) return std::string(message->get_string());
    }
  }
  return std::string(text.substr(0, 200));
}

int64_t count_in(const json::object& usage, std::string_view key) {
  const json::value* value = usage.if_contains(key);
  return value != nullptr && value->is_int64() ? value->get_int64() : 0;
}

int64_t count_in_details(const json::object& usage, std::string_view details,
                         std::string_view key) {
  const json::value* object = usage.if_contains(details);
  return object != nullptr && object->is_object() ? count_in(object->get_object(), key) : 0;
}

// Whether an event's choice contains generated text, and not only the role that begins a chat.
bool brings_token(const json::value& choice) {
  if (!choice.is_object()) return false;
  const json::value* delta = choice.get_object().if_contains("delta");
  if (delta == nullptr || !delta->is_object()) return true;
  const json::value* finish = choice.get_object().if_contains("finish_reason");
  if (finish != nullptr && !finish->is_null()) return true;
  for (const auto& [key, value] : delta->get_object()) {
    if (key != "role" && !value.is_null() && !(value.is_string() && value.get_string().empty())) {
      return true;
    }
  }
  return false;
}

// State shared by the I/O thread and the sending thread.
struct Shared {
  explicit Shared(size_t count, bool show_progress)
      : progress("Requests", show_progress ? static_cast<int64_t>(count) : 0,
                 Progress::Unit::kItems) {}

  std::mutex mutex;
  std::condition_variable changed;
  int64_t under_way = 0;
  LoadRun run;
  Progress progress;
};

// Records the reply to one request.
class Recorder : public client::ReplyHandler {
 public:
  Recorder(Shared& shared, bool cancelled, int64_t prompt_tokens)
      : shared_(shared), cancelled_(cancelled) {
    served_.submitted = Clock::now();
    served_.input_tokens = prompt_tokens;
  }

  void on_event(std::string_view data) override {
    const auto now = Clock::now();
    if (data == "[DONE]") {
      done_ = true;
      return;
    }
    const auto event = parse_json(data, "event");
    if (!event || !event->is_object()) {
      failure_ = "an event that is no JSON object";
      return;
    }
    const json::object& object = event->get_object();
    if (object.contains("error")) {
      failure_ = message_of(data);
      return;
    }
    const json::value* choices = object.if_contains("choices");
    if (choices != nullptr && choices->is_array() && !choices->get_array().empty() &&
        brings_token(choices->get_array().front())) {
      served_.token_times.push_back(now);
    }
    const json::value* usage = object.if_contains("usage");
    if (usage != nullptr && usage->is_object()) read_usage(usage->get_object());
  }

  void on_end(Result<client::ClientReply> reply) override {
    if (reply && reply->status != 200) {
      failure_ = fmt::format("{}: {}", reply->status, message_of(reply->body));
    } else if (reply && !done_ && failure_.empty()) {
      failure_ = "the stream ended without [DONE]";
    } else if (!reply && failure_.empty()) {
      failure_ = reply.error().message;
    }
    const bool left = !reply && cancelled_ && reply.error().code == Code::kDeadlineExceeded;
    // Without a usage each piece counts as one token.
    if (served_.output_tokens == 0) served_.output_tokens = std::ssize(served_.token_times);
    shared_.progress.add(1);
    const std::lock_guard lock(shared_.mutex);
    if (left) {
      ++shared_.run.cancelled;
    } else if (!failure_.empty()) {
      ++shared_.run.failed;
      ++shared_.run.failures[failure_];
    } else {
      shared_.run.completed.push_back(std::move(served_));
    }
    --shared_.under_way;
    shared_.changed.notify_all();
  }

 private:
  void read_usage(const json::object& usage) {
    served_.output_tokens = count_in(usage, "completion_tokens");
    if (const int64_t prompt = count_in(usage, "prompt_tokens"); prompt > 0) {
      served_.input_tokens = prompt;
    }
    served_.cached_tokens = count_in_details(usage, "prompt_tokens_details", "cached_tokens");
    served_.accepted_tokens =
        count_in_details(usage, "completion_tokens_details", "accepted_tokens");
  }

  Shared& shared_;
  const bool cancelled_;
  ServedRequest served_;
  bool done_ = false;
  std::string failure_;
};

}  // namespace

LoadRun run_load(client::HttpClient& client, const std::vector<LoadRequest>& workload,
                 const ServerLoad& options) {
  Shared shared(workload.size(), options.show_progress);
  const auto begin = shared.run.begin = Clock::now();
  for (const LoadRequest& request : workload) {
    client::ClientRequest message = {.method = "POST",
                                     .path = options.endpoint,
                                     .api_key = options.api_key,
                                     .body = json::serialize(body_of(request, options))};
    if (request.cancelled) {
      message.time_limit = std::chrono::duration_cast<std::chrono::nanoseconds>(
          std::chrono::duration<double>(options.cancel_delay_seconds));
    }
    std::this_thread::sleep_until(begin + std::chrono::duration_cast<Clock::duration>(
                                              std::chrono::duration<double>(request.at_seconds)));
    {
      std::unique_lock lock(shared.mutex);
      shared.changed.wait(lock, [&] {
        return options.max_concurrency == 0 || shared.under_way < options.max_concurrency;
      });
      ++shared.under_way;
      shared.run.peak_concurrency = std::max(shared.run.peak_concurrency, shared.under_way);
    }
    client.send(std::move(message), std::make_shared<Recorder>(shared, request.cancelled,
                                                               std::ssize(request.prompt_ids)));
  }
  std::unique_lock lock(shared.mutex);
  shared.changed.wait(lock, [&] { return shared.under_way == 0; });
  shared.run.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return std::move(shared.run);
}

}  // namespace fathom
