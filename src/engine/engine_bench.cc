// Host time per step of the engine alone, in us, with a runner that computes nothing: decode steps
// of 1, 16 and 256 sequences, and of them the planning of 8 lanes with 128 sequences each. Targets:
// 10 us for one sequence, 200 us for 256, 400 us for planning 8 lanes.
#include <benchmark/benchmark.h>

#include <atomic>
#include <deque>
#include <future>

#include "engine/batch_builder.h"
#include "engine/engine.h"
#include "engine/fake_tokenizer.h"
#include "engine/lanes.h"
#include "engine/logits_runner.h"

namespace fathom {
namespace {

class NullRunner : public LogitsRunner {
 public:
  explicit NullRunner(int64_t vocab_size, int num_lanes = 1)
      : vocab_size_(vocab_size), num_lanes_(num_lanes) {
    logits_.assign(static_cast<size_t>(256 * vocab_size), 0);
    // A different letter in each row, for greedy sampling.
    for (int64_t row = 0; row < 256; ++row) logits_[row * vocab_size + 'a' + row % 26] = 1;
  }
  int64_t vocab_size() const override { return vocab_size_; }
  int64_t max_model_len() const override { return 1 << 20; }
  int64_t num_pages() const override { return 1 << 17; }
  int num_lanes() const override { return num_lanes_; }
  Result<ConstTensorView> forward(std::span<const ForwardBatch> lanes) override {
    const ForwardBatch& batch = lanes.front();
    return ConstTensorView(logits_.data(), {std::ssize(batch.logit_rows), vocab_size_});
  }

 private:
  int64_t vocab_size_;
  int num_lanes_;
  std::vector<float> logits_;
};

// One iteration is a load of `sequences` requests with `kSteps` tokens each. Its time is that from
// the engine's first step to its last, per step.
void decode(benchmark::State& state, bool with_text, int64_t vocab_size) {
  constexpr int64_t kSteps = 4000;
  const int64_t sequences = state.range(0);
  auto engine =
      std::move(*Engine::create({.max_num_seqs = 256}, std::make_unique<NullRunner>(vocab_size),
                                with_text ? fake_tokenizer() : nullptr));
  for (auto _ : state) {
    std::promise<void> done;
    std::atomic<int64_t> left = sequences;
    std::atomic<double> seconds = 0;
    for (int64_t i = 0; i < sequences; ++i) {
      Request request{.id = {}, .prompt_ids = {1, 2, 3, 4, 5, 6, 7, 8}, .sampling = {}};
      request.sampling.temperature = 0;
      request.sampling.max_tokens = kSteps;
      if (with_text) request.sampling.stop = {"</end>", "\n\nUser:"};
      benchmark::DoNotOptimize(engine->submit(std::move(request), [&](const Event& event) {
        if (!event.last) return;
        seconds = std::max<double>(seconds, event.timings.decode_seconds());
        if (--left == 0) done.set_value();
      }));
    }
    done.get_future().wait();
    state.SetIterationTime(seconds / (kSteps - 1));
  }
}

void decode_ids(benchmark::State& state) { decode(state, false, 300); }
void decode_text(benchmark::State& state) { decode(state, true, 300); }
void decode_text_8192(benchmark::State& state) { decode(state, true, 8192); }

// Schedules and builds decode steps of `lanes` lanes with 128 sequences each, whose contexts grow
// from 500 tokens on and cross a page now and then.
void plan_lanes(benchmark::State& state) {
  constexpr int64_t kOfEach = 128, kPrompt = 500, kSteps = 2000;
  const auto num_lanes = static_cast<int>(state.range(0));
  NullRunner runner(300, num_lanes);
  const EngineOptions options{.max_num_seqs = kOfEach, .max_batched_tokens = kOfEach * 512};
  Lanes lanes(options, runner, std::vector<std::unique_ptr<PageStore>>(num_lanes));
  std::deque<std::unique_ptr<Sequence>> sequences;
  for (int64_t i = 0; i < num_lanes * kOfEach; ++i) {
    auto& sequence = sequences.emplace_back(std::make_unique<Sequence>());
    sequence->lane = static_cast<int>(i % num_lanes);
    sequence->arrival = static_cast<uint64_t>(i + 1);
    sequence->prompt_len = kPrompt + i % 64;
    sequence->max_len = kPrompt + 64 + 2 * kSteps;
    for (int64_t t = 0; t < sequence->prompt_len; ++t) {
      sequence->tokens.push_back(static_cast<int32_t>((t * 7 + i) % 290));
    }
    sequence->tokens.reserve(static_cast<size_t>(sequence->max_len));
    sequence->prefix = lanes.chain(0, "");
    lanes.add(*sequence);
  }
  StepPlan plan;
  BatchBuilder builder;
  const SampleOptions greedy = {.temperature = 0};
  const std::vector<SampleRow> rows(sequences.size(), SampleRow{.options = &greedy});
  int64_t step = 0;
  const auto run = [&] {
    lanes.schedule(plan, /*with_drafts=*/true);
    benchmark::DoNotOptimize(builder.build(plan, rows));
    lanes.advance(plan);
  };
  const auto add_tokens = [&] {
    for (const StepEntry& entry : plan.entries) {
      if (entry.samples) entry.sequence->tokens.push_back(static_cast<int32_t>(step % 290));
    }
    ++step;
  };
  do {  // the prompts
    run();
    add_tokens();
  } while (std::ssize(plan.entries) < num_lanes * kOfEach || plan.entries[0].num_tokens > 1);
  for (auto _ : state) {
    run();
    state.PauseTiming();
    add_tokens();
    state.ResumeTiming();
  }
  for (const auto& sequence : sequences) lanes.finish(*sequence);
}
BENCHMARK(plan_lanes)->Arg(1)->Arg(8)->Unit(benchmark::kMicrosecond)->Iterations(2000);

#define LOADS \
  Arg(1)->Arg(16)->Arg(256)->UseManualTime()->Unit(benchmark::kMicrosecond)->Iterations(5)
BENCHMARK(decode_ids)->LOADS;
BENCHMARK(decode_text)->LOADS;
BENCHMARK(decode_text_8192)->LOADS;

}  // namespace
}  // namespace fathom
