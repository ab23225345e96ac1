#include "server/openai/generate_reply.h"

#include <algorithm>

#include "server/openai/json_writer.h"
#include "server/openai/token_json.h"

namespace fathom {

GenerateReply::GenerateReply(ReplySpec spec, GenerateOptions options)
    : ReplyWriter(std::move(spec)),
      options_(std::move(options)),
      choices_(static_cast<size_t>(spec_.num_choices())) {
  set_id(options_.rid.empty() ? spec_.identity.make_id("gen-") : options_.rid);
}

// Adds SGLang's triples: [log-probability, id, null].
void GenerateReply::add_logprobs(const std::vector<TokenLogprob>& tokens, std::string& list,
                                 std::string& top) const {
  JsonWriter json(list), tops(top);
  for (const TokenLogprob& token : tokens) {
    json.open('[').value(token.logprob).value(token.id).value(nullptr).close(']');
    if (options_.top_logprobs == 0) continue;
    tops.open('[');
    for (const auto& [id, logprob] : token.top) {
      tops.open('[').value(logprob).value(id).value(nullptr).close(']');
    }
    tops.close(']');
  }
}

void GenerateReply::write_event(size_t choice, const Event& event, std::string& out) {
  Choice& state = choices_[choice];
  state.text += event.text;
  state.ids.insert(state.ids.end(), event.ids.begin(), event.ids.end());
  if (spec_.logprobs) add_logprobs(event.logprobs, state.logprobs, state.top_logprobs);
  for (size_t i = static_cast<size_t>(std::max<int64_t>(options_.logprob_start, 0));
       i < event.prompt_logprobs.size() && spec_.prompt_logprobs; ++i) {
    if (event.prompt_logprobs[i]) {
      add_logprobs({*event.prompt_logprobs[i]}, state.prompt_logprobs, state.prompt_top_logprobs);
    } else {
      JsonWriter(state.prompt_logprobs)
          .open('[')
          .value(nullptr)
          .value(prompt_of(choice).ids[i])
          .value(nullptr)
          .close(']');
      if (options_.top_logprobs > 0) JsonWriter(state.prompt_top_logprobs).value(nullptr);
    }
  }
  if (event.finish) state.end = event;
  if (!spec_.stream) return;
  out += "data: ";
  write_choice(choice, out);
  out += "\n\n";
}

void GenerateReply::write_choice(size_t index, std::string& out) const {
  const Choice& choice = choices_[index];
  JsonWriter json(out);
  json.open('{').field("text", choice.text).key("output_ids");
  append_ids(out, choice.ids);
  if (spec_.num_choices() > 1) json.field("index", index);
  json.key("meta_info").open('{');
  json.field("id", id());
  json.key("finish_reason");
  if (choice.end) {
    json.open('{').field("type", name_of(*choice.end->finish));
    if (choice.end->finish == FinishReason::kLength) {
      json.field("length", choice.ids.size());
    } else {
      json.key("matched");
      append_stop(out, choice.end->matched_stop);
    }
    json.close('}');
  } else {
    json.value(nullptr);
  }
  json.field("prompt_tokens", prompt_of(index).ids.size());
  json.field("completion_tokens", choice.ids.size());
  json.field("cached_tokens", choice.end ? choice.end->usage.cached_tokens : 0);
  if (choice.end) json.field("e2e_latency", choice.end->timings.total_seconds());
  if (spec_.prompt_logprobs) {
    json.raw_field("input_token_logprobs", choice.prompt_logprobs + "]");
    if (options_.top_logprobs > 0) {
      json.raw_field("input_top_logprobs", choice.prompt_top_logprobs + "]");
    }
  }
  if (spec_.logprobs) {
    json.raw_field("output_token_logprobs", choice.logprobs + "]");
    if (options_.top_logprobs > 0) {
      json.raw_field("output_top_logprobs", choice.top_logprobs + "]");
    }
  }
  json.close('}').close('}');
}

void GenerateReply::write_end(std::string& out) {
  if (spec_.stream) {
    out += "data: [DONE]\n\n";
    return;
  }
  const bool is_list = options_.is_list || choices_.size() > 1;
  if (is_list) out += '[';
  for (size_t i = 0; i < choices_.size(); ++i) write_choice(i, out);
  if (is_list) out += ']';
}

void GenerateReply::write_failure(const ApiError& error, std::string& out) {
  out += "data: " + error.to_json() + "\n\n";
}

}  // namespace fathom
