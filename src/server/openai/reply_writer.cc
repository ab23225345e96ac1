#include "server/openai/reply_writer.h"

#include "base/check.h"
#include "server/openai/json_writer.h"

namespace fathom {
namespace {

Event without_output(Event event) {
  event.ids.clear();
  event.text.clear();
  event.logprobs.clear();
  event.matched_stop = {};
  if (event.finish == FinishReason::kStop) event.finish = FinishReason::kLength;
  return event;
}

}  // namespace

std::string ReplyUsage::to_json() const {
  return fmt::format(R"({{"prompt_tokens":{},"completion_tokens":{},"total_tokens":{},)"
                     R"("prompt_tokens_details":{{"cached_tokens":{}}},)"
                     R"("completion_tokens_details":{{"reasoning_tokens":{}{}}}}})",
                     prompt_tokens, completion_tokens, prompt_tokens + completion_tokens,
                     cached_tokens, reasoning_tokens, accepted_field());
}

std::string ReplyUsage::accepted_field() const {
  return draft_tokens > 0 ? fmt::format(R"(,"accepted_tokens":{})", accepted_tokens) : "";
}

ReplyWriter::ReplyWriter(ReplySpec spec)
    : spec_(std::move(spec)),
      tallies_(static_cast<size_t>(spec_.num_choices())),
      think_end_(spec_.served->tokenizer->token_id("</think>")),
      unfinished_(tallies_.size()) {
  for (size_t i = 0; i < tallies_.size(); ++i) {
    tallies_[i].in_reasoning = think_end_ && prompt_of(i).opens_reasoning;
  }
}

void ReplyWriter::push(size_t prompt, const Event& event, std::string& out) {
  if (ended_) return;
  if (spec_.drop_output && !event.ids.empty()) return push(prompt, without_output(event), out);
  FATHOM_CHECK(prompt < spec_.prompts.size() && event.index >= 0 && event.index < spec_.n,
               "an event of prompt {}, choice {}; there are {} prompts with {} choices", prompt,
               event.index, spec_.prompts.size(), spec_.n);
  if (event.finish == FinishReason::kError || event.finish == FinishReason::kAbort) {
    return fail(error_of(event), out);
  }
  const size_t choice = prompt * static_cast<size_t>(spec_.n) + static_cast<size_t>(event.index);
  Tally& tally = tallies_[choice];
  FATHOM_CHECK(!tally.ended, "an event of choice {} after its end", choice);
  count(tally, event);
  write_event(choice, event, out);
  if (!event.finish) return;
  tally.ended = true;
  if (--unfinished_ > 0) return;
  ended_ = true;
  write_end(out);
}

void ReplyWriter::fail(ApiError error, std::string& out) {
  if (ended_) return;
  ended_ = true;
  failure_ = std::move(error);
  if (spec_.stream) write_failure(*failure_, out);
}

void ReplyWriter::count(Tally& tally, const Event& event) {
  tally.completion_tokens += std::ssize(event.ids);
  reasoning_ids_ = 0;
  while (tally.in_reasoning && reasoning_ids_ < event.ids.size()) {
    tally.in_reasoning = event.ids[reasoning_ids_++] != *think_end_;
    if (tally.in_reasoning) ++tally.reasoning_tokens;
  }
  if (!event.finish) return;
  tally.cached_tokens = event.usage.cached_tokens;
  tally.draft_tokens = event.usage.draft_tokens;
  tally.accepted_tokens = event.usage.accepted_tokens;
}

ReplyUsage ReplyWriter::usage() const {
  ReplyUsage total;
  for (const EncodedPrompt& prompt : spec_.prompts) total.prompt_tokens += std::ssize(prompt.ids);
  for (size_t i = 0; i < tallies_.size(); ++i) {
    total.completion_tokens += tallies_[i].completion_tokens;
    total.reasoning_tokens += tallies_[i].reasoning_tokens;
    total.draft_tokens += tallies_[i].draft_tokens;
    total.accepted_tokens += tallies_[i].accepted_tokens;
    // The choices of a prompt share it, and only the first one's prefix was looked up in the cache.
    if (i % static_cast<size_t>(spec_.n) == 0) total.cached_tokens += tallies_[i].cached_tokens;
  }
  return total;
}

ApiError error_of(const Event& event) {
  if (event.error.message.empty()) return ApiError(500, "the request was aborted", {}, "aborted");
  return ApiError(event.error);
}

}  // namespace fathom
