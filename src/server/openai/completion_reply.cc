#include "server/openai/completion_reply.h"

#include "server/openai/json_writer.h"

namespace fathom {
namespace {

void write_envelope(JsonWriter& json, const std::string& id, const ReplySpec& spec) {
  json.field("id", id).field("object", "text_completion");
  json.field("created", spec.identity.created).field("model", spec.model);
  json.field("system_fingerprint", spec.served->fingerprint);
}

}  // namespace

CompletionStream::CompletionStream(ReplySpec spec) : ReplyWriter(std::move(spec)) {
  set_id(spec_.identity.make_id("cmpl-"));
  JsonWriter json(base_ = "data: ");
  json.open('{');
  write_envelope(json, id(), spec_);
  json.key("choices").open('[');
  for (int i = 0; i < spec_.num_choices(); ++i) {
    choices_.push_back({CompletionLogprobs(*spec_.served->tokenizer)});
  }
}

void CompletionStream::write_event(size_t choice, const Event& event, std::string& out) {
  Choice& state = choices_[choice];
  const bool first = !state.started;
  state.started = true;
  const bool shows_ids = (spec_.logprobs || spec_.return_token_ids) && !event.ids.empty();
  const bool echoes = first && spec_.echo;
  if (event.text.empty() && !event.finish && !shows_ids && !echoes) return;
  out += base_;
  out += fmt::format("{{\"index\":{},\"text\":\"", choice);
  if (echoes) append_json_escaped(out, prompt_of(choice).text);
  append_json_escaped(out, event.text);
  out += "\",\"logprobs\":";
  if (spec_.logprobs && !event.logprobs.empty()) {
    for (const TokenLogprob& token : event.logprobs) state.logprobs.add(token);
    state.logprobs.take(out);
  } else {
    out += "null";
  }
  JsonWriter json(out);
  if (event.finish) {
    json.field("finish_reason", name_of(*event.finish));
    out += ',';
    append_matched_stop(out, *spec_.served->tokenizer, event.matched_stop);
  } else {
    json.field("finish_reason", nullptr);
  }
  if (spec_.return_token_ids) {
    if (first) {
      json.key("prompt_token_ids");
      append_ids(out, prompt_of(choice).ids);
    }
    json.key("token_ids");
    append_ids(out, event.ids);
  }
  out += "}]";
  if (spec_.continuous_usage) {
    ReplyUsage so_far;
    so_far.prompt_tokens = std::ssize(prompt_of(choice).ids);
    so_far.completion_tokens = completion_tokens(choice);
    json.raw_field("usage", so_far.to_json());
  } else if (spec_.include_usage) {
    json.field("usage", nullptr);
  }
  out += "}\n\n";
}

void CompletionStream::write_end(std::string& out) {
  if (spec_.include_usage) out += base_ + "],\"usage\":" + usage().to_json() + "}\n\n";
  out += "data: [DONE]\n\n";
}

void CompletionStream::write_failure(const ApiError& error, std::string& out) {
  out += "data: " + error.to_json() + "\n\n";
}

CompletionCollector::CompletionCollector(ReplySpec spec)
    : ReplyWriter(std::move(spec)),
      choices_(static_cast<size_t>(spec_.num_choices())),
      prompt_logprobs_(spec_.prompts.size()) {
  set_id(spec_.identity.make_id("cmpl-"));
}

void CompletionCollector::write_event(size_t choice, const Event& event, std::string&) {
  Choice& state = choices_[choice];
  state.text += event.text;
  if (spec_.logprobs) {
    state.logprobs.insert(state.logprobs.end(), event.logprobs.begin(), event.logprobs.end());
  }
  if (spec_.return_token_ids) {
    state.ids.insert(state.ids.end(), event.ids.begin(), event.ids.end());
  }
  if (!event.prompt_logprobs.empty()) {
    prompt_logprobs_[choice / static_cast<size_t>(spec_.n)] = event.prompt_logprobs;
  }
  if (!event.finish) return;
  state.finish = *event.finish;
  state.matched_stop = event.matched_stop;
}

void CompletionCollector::write_logprobs(size_t index, std::string& out) const {
  CompletionLogprobs logprobs(*spec_.served->tokenizer);
  if (spec_.echo) {
    const std::vector<int32_t>& ids = prompt_of(index).ids;
    const auto& of_prompt = prompt_logprobs_[index / static_cast<size_t>(spec_.n)];
    for (size_t i = 0; i < ids.size(); ++i) {
      if (i < of_prompt.size() && of_prompt[i]) {
        logprobs.add(*of_prompt[i]);
      } else {
        logprobs.add_without(ids[i]);
      }
    }
  }
  for (const TokenLogprob& token : choices_[index].logprobs) logprobs.add(token);
  logprobs.take(out);
}

void CompletionCollector::write_choice(size_t index, std::string& out) const {
  const Choice& choice = choices_[index];
  JsonWriter json(out);
  json.open('{').field("index", index);
  json.field("text", spec_.echo ? prompt_of(index).text + choice.text : choice.text);
  json.key("logprobs");
  if (spec_.logprobs) {
    write_logprobs(index, out);
  } else {
    json.value(nullptr);
  }
  json.field("finish_reason", name_of(choice.finish));
  out += ',';
  append_matched_stop(out, *spec_.served->tokenizer, choice.matched_stop);
  if (spec_.prompt_logprobs) {
    json.key("prompt_logprobs");
    append_prompt_logprobs(out, *spec_.served->tokenizer,
                           prompt_logprobs_[index / static_cast<size_t>(spec_.n)]);
  }
  if (spec_.return_token_ids) {
    json.key("prompt_token_ids");
    append_ids(out, prompt_of(index).ids);
    json.key("token_ids");
    append_ids(out, choice.ids);
  }
  json.close('}');
}

void CompletionCollector::write_end(std::string& out) {
  JsonWriter json(out);
  json.open('{');
  write_envelope(json, id(), spec_);
  json.key("choices").open('[');
  for (size_t i = 0; i < choices_.size(); ++i) write_choice(i, out);
  json.close(']').raw_field("usage", usage().to_json());
  if (!spec_.kv_transfer_params.empty()) {
    json.raw_field("kv_transfer_params", spec_.kv_transfer_params);
  }
  json.close('}');
}

}  // namespace fathom
