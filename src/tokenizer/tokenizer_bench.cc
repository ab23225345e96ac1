// Encoding and decoding speed in MB/s on one thread. FATHOM_TOKENIZER_DIR names the model directory
// (default: the V3 vocabulary of tests/data), FATHOM_BENCH_TEXT the text.
//
// Cold: a new tokenizer encodes the text once. Warm: it encodes the same text again. There is no
// cache of encoded words. Warm runs differ by the CPU's caches, and by one cached result per
// vocabulary entry: whether its merges produce it.
#include <benchmark/benchmark.h>

#include <cstdlib>

#include "base/check.h"
#include "base/json.h"
#include "tokenizer/tokenizer.h"

namespace fathom {
namespace {

std::string from_environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : std::string(FATHOM_SOURCE_DIR) + otherwise;
}

std::unique_ptr<Tokenizer> load_tokenizer() {
  auto tokenizer = Tokenizer::load(
      from_environment("FATHOM_TOKENIZER_DIR", "/tests/data/tokenizers/deepseek-v3"));
  FATHOM_CHECK(tokenizer.has_value(), "{}", tokenizer.error().message);
  return std::move(*tokenizer);
}

const std::string& bench_text() {
  static const std::string text = [] {
    auto read = read_text_file(from_environment("FATHOM_BENCH_TEXT", "/tests/data/eval/prose.txt"),
                               1 << 30);
    FATHOM_CHECK(read.has_value(), "{}", read.error().message);
    return *read;
  }();
  return text;
}

void report(benchmark::State& state, size_t tokens) {
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * bench_text().size()));
  state.counters["MB/s"] =
      benchmark::Counter(static_cast<double>(state.iterations() * bench_text().size()) / 1e6,
                         benchmark::Counter::kIsRate);
  state.counters["bytes/token"] = static_cast<double>(bench_text().size()) / tokens;
}

void BM_Load(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(load_tokenizer());
}
BENCHMARK(BM_Load)->Unit(benchmark::kMillisecond);

void BM_EncodeCold(benchmark::State& state) {
  size_t tokens = 0;
  for (auto _ : state) {
    state.PauseTiming();
    auto tokenizer = load_tokenizer();
    state.ResumeTiming();
    tokens = tokenizer->encode(bench_text()).size();
    state.PauseTiming();
    tokenizer.reset();
    state.ResumeTiming();
  }
  report(state, tokens);
}
BENCHMARK(BM_EncodeCold)->Iterations(10)->Unit(benchmark::kMillisecond);

void BM_EncodeWarm(benchmark::State& state) {
  const auto tokenizer = load_tokenizer();
  size_t tokens = 0;
  for (auto _ : state) tokens = tokenizer->encode(bench_text()).size();
  report(state, tokens);
}
BENCHMARK(BM_EncodeWarm)->Unit(benchmark::kMillisecond);

void BM_Decode(benchmark::State& state) {
  const auto tokenizer = load_tokenizer();
  const auto ids = tokenizer->encode(bench_text());
  for (auto _ : state) benchmark::DoNotOptimize(tokenizer->decode(ids));
  report(state, ids.size());
}
BENCHMARK(BM_Decode)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace fathom
