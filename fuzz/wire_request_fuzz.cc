// Bodies from the network, all endpoints: no input may do worse than an error with a status below
// 500, and what is accepted is answered: the writer takes an answer, fails or ends, and writes what
// is JSON again.
//
// Input: one byte (endpoint), the body.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "engine/fake_tokenizer.h"
#include "server/client/sse_parser.h"
#include "server/openai/generation.h"
#include "server/openai/model_bodies.h"

namespace fathom {
namespace {

constexpr int kGenerating = 5;

const ServedModel& served_model() {
  static const ServedModel kModel = [] {
    ServedModel served;
    served.names = {"fuzz"};
    served.tokenizer = fake_tokenizer();
    served.chat_format = ChatFormat::kV31;
    served.vocab_size = 300;
    served.max_model_len = 4096;
    return served;
  }();
  return kModel;
}

void check_error(const ApiError& error) {
  FATHOM_CHECK(error.status >= 400 && error.status < 500, "status {}: {}", error.status,
               error.message);
  for (const ErrorShape shape : {ErrorShape::kOpenAi, ErrorShape::kAnthropic}) {
    const auto body = parse_json(error.to_json(shape), "error");
    FATHOM_CHECK(body.has_value(), "an error is not JSON: {}", error.to_json(shape));
  }
}

Event event_of(int index, std::string_view text, bool last) {
  Event event;
  event.index = index;
  event.ids = {'a'};
  event.text = text;
  event.logprobs = {{'a', -1, {{'a', -1}}}};
  if (last) event.finish = FinishReason::kStop;
  return event;
}

// A small answer, and that the reply has ended and is JSON.
void answer(Generation& generation) {
  std::string out;
  const int n = generation.requests.front().sampling.n;
  for (size_t prompt = 0; prompt < generation.requests.size(); ++prompt) {
    for (int i = 0; i < n; ++i) {
      generation.writer->push(prompt, event_of(i, "r</think>\"é\n", false), out);
      generation.writer->push(prompt, event_of(i, "z", true), out);
    }
  }
  FATHOM_CHECK(generation.writer->ended(), "the reply has not ended");
  if (generation.writer->streams()) {
    FATHOM_CHECK(out.ends_with("\n\n"), "the stream is cut: {}", out);
    client::SseParser().feed(out, [](std::string_view data) {
      FATHOM_CHECK(data == "[DONE]" || parse_json(data, "event", 100), "no JSON: {}", data);
    });
    return;
  }
  const auto body = parse_json(out, "reply", 100);
  FATHOM_CHECK(body.has_value(), "a reply is not JSON: {}: {}", body.error().message, out);
}

template <typename F>
void check_body(F body_of, std::string_view text) {
  const auto body = body_of(text, served_model(), RequestLimits());
  if (!body) return check_error(body.error());
  FATHOM_CHECK(parse_json(*body, "body").has_value(), "a body is not JSON: {}", *body);
}

}  // namespace
}  // namespace fathom

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fathom;
  if (size == 0) return 0;
  const std::string_view body(reinterpret_cast<const char*>(data) + 1, size - 1);
  const int which = data[0] % (kGenerating + 3);
  if (which == kGenerating) {
    check_body(tokenize_body, body);
  } else if (which == kGenerating + 1) {
    check_body(detokenize_body, body);
  } else if (which == kGenerating + 2) {
    check_body(count_tokens_body, body);
  } else {
    auto generation = prepare(static_cast<GeneratingEndpoint>(which), body, served_model(),
                              RequestLimits(), {.nonce = 1, .created = 1});
    if (!generation) {
      check_error(generation.error());
    } else {
      answer(*generation);
    }
  }
  return 0;
}
