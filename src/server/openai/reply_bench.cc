// Host time per token of the wire formats: events of one token to server-sent events. 50,000
// tokens/s on two cores leave 40 us of host time per token; the target for a chunk is 2 us.
#include <benchmark/benchmark.h>

#include "engine/fake_tokenizer.h"
#include "server/openai/generation.h"

namespace fathom {
namespace {

const ServedModel& served_model() {
  static const ServedModel kModel = [] {
    ServedModel served;
    served.names = {"bench"};
    served.tokenizer = fake_tokenizer();
    served.chat_format = ChatFormat::kV31;
    served.vocab_size = 300;
    served.max_model_len = 1 << 30;
    served.fingerprint = "fathom-0.1.0";
    return served;
  }();
  return kModel;
}

// One endless stream; each iteration is a token of five characters.
void stream_tokens(benchmark::State& state, GeneratingEndpoint endpoint, const char* body,
                   bool logprobs) {
  auto generation =
      prepare(endpoint, body, served_model(), RequestLimits(), {.nonce = 1, .created = 1});
  if (!generation) return state.SkipWithError(generation.error().message.c_str());
  Event event;
  event.ids = {'a'};
  event.text = " word";
  if (logprobs) event.logprobs = {{'a', -0.25f, {{'a', -0.25f}, {'b', -1.5f}}}};
  std::string out;
  int64_t bytes = 0;
  for (auto _ : state) {
    generation->writer->push(0, event, out);
    bytes += std::ssize(out);
    out.clear();
  }
  state.SetItemsProcessed(state.iterations());
  state.SetBytesProcessed(bytes);
}

BENCHMARK_CAPTURE(stream_tokens, chat, GeneratingEndpoint::kChat,
                  R"({"messages":[{"role":"user","content":"a"}],"stream":true})", false);
BENCHMARK_CAPTURE(stream_tokens, chat_logprobs, GeneratingEndpoint::kChat,
                  R"({"messages":[{"role":"user","content":"a"}],"stream":true,"logprobs":true,)"
                  R"("top_logprobs":2})",
                  true);
BENCHMARK_CAPTURE(stream_tokens, completions, GeneratingEndpoint::kCompletions,
                  R"({"prompt":"a","stream":true})", false);
BENCHMARK_CAPTURE(stream_tokens, messages, GeneratingEndpoint::kMessages,
                  R"({"messages":[{"role":"user","content":"a"}],"stream":true,"max_tokens":9})",
                  false);
BENCHMARK_CAPTURE(stream_tokens, responses, GeneratingEndpoint::kResponses,
                  R"({"input":"a","stream":true})", false);

// A conversation of state.range(0) bytes, from its body to the engine request.
void prepare_chat_body(benchmark::State& state) {
  const std::string body = fmt::format(
      R"({{"messages":[{{"role":"user","content":"{}"}}],"stream":true,"temperature":0.5}})",
      std::string(static_cast<size_t>(state.range(0)), 'a'));
  for (auto _ : state) {
    auto generation = prepare(GeneratingEndpoint::kChat, body, served_model(), RequestLimits(),
                              {.nonce = 1, .created = 1});
    benchmark::DoNotOptimize(generation);
  }
  state.SetBytesProcessed(state.iterations() * std::ssize(body));
}
BENCHMARK(prepare_chat_body)->Arg(100)->Arg(16'000);

}  // namespace
}  // namespace fathom
