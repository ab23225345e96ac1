// The MTP layer of the bundled model on the GPU: its logits against float32 on the CPU, beside the
// main model's, after every kind of step, and drafts through the engine. Run from the repository's
// root.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "cache/latent_layout.h"
#include "chat/format.h"
#include "chat/prompt_ids.h"
#include "device/cuda/device_array.h"
#include "e2e/forced_answers.h"
#include "e2e/gpu_deviation.h"
#include "e2e/gpu_fixture.h"
#include "engine/model_runner.h"
#include "model/deepseek.h"
#include "model/deepseek_cuda.h"
#include "model/kept_states.h"
#include "model/layer_options.h"

namespace fathom {
namespace {

constexpr int64_t kPages = 96;
constexpr int32_t kSequencePages = 6;
constexpr int64_t kMostRows = 1024;

// A model with its MTP layer and a cache, on either device. Logits are [logit rows, vocab].
class MtpModel {
 public:
  virtual ~MtpModel() = default;
  virtual std::vector<float> forward(const ForwardBatch& batch) = 0;
  virtual std::vector<float> draft(const ForwardBatch& batch, std::span<const int32_t> states) = 0;
};

class OnCpu : public MtpModel {
 public:
  OnCpu(const Checkpoint& checkpoint, DType compute, CacheFormat format)
      : pool_(0), stream_(pool_) {
    ModelOptions options;
    options.compute = compute;
    options.max_rows = kMostRows;
    LoadOptions load;
    load.show_progress = false;
    auto loaded = DeepSeekModel::load(checkpoint, options, load, stream_, /*with_mtp=*/true);
    FATHOM_CHECK(loaded.has_value(), "{}", loaded.error().message);
    model_ = std::move(*loaded);
    const ModelConfig& config = checkpoint.config();
    auto cache =
        LatentCache::allocate(latent_layout(config, format), DeepSeekModel::cache_layers(config),
                              kPages, DeepSeekModel::state_bytes(config, compute));
    FATHOM_CHECK(cache.has_value(), "{}", cache.error().message);
    cache_ = std::move(*cache);
  }
  std::vector<float> forward(const ForwardBatch& batch) override {
    std::vector<float> logits(logits_of(batch));
    model_->forward(batch, cache_,
                    TensorView(logits.data(), {std::ssize(batch.logit_rows), vocab()}));
    return logits;
  }
  std::vector<float> draft(const ForwardBatch& batch, std::span<const int32_t> states) override {
    std::vector<float> logits(logits_of(batch));
    model_->draft(batch, states, cache_,
                  TensorView(logits.data(), {std::ssize(batch.logit_rows), vocab()}));
    return logits;
  }

 private:
  int64_t vocab() const { return model_->config().vocab_size; }
  size_t logits_of(const ForwardBatch& batch) const {
    return batch.logit_rows.size() * static_cast<size_t>(vocab());
  }

  ThreadPool pool_;
  Stream stream_;
  std::unique_ptr<DeepSeekModel> model_;
  LatentCache cache_;
};

class OnGpu : public MtpModel {
 public:
  OnGpu(const Checkpoint& checkpoint, StoredFp8 stored, CacheFormat format) {
    const ModelConfig& config = checkpoint.config();
    auto model = cuda::DeepSeekModel::load(checkpoint,
                                           {.max_rows = kMostRows,
                                            .max_logit_rows = kMostRows,
                                            .most_keys = 2048,
                                            .stored_fp8 = stored,
                                            .cache_format = format,
                                            .with_mtp = true},
                                           {.show_progress = false});
    FATHOM_CHECK(model.has_value(), "{}", model.error().message);
    model_ = std::move(*model);
    const int64_t part = latent_layout(config, format).page_bytes();
    const int64_t parts = gpu_page_parts(config.num_layers, config.hidden, part, true);
    memory_ = cuda::DeviceArray<std::byte>(kPages * parts * part);
    cuda::check(cudaMemset(memory_.data(), 0xFF, memory_.bytes()), "poisoning");  // NaN
    cache_ = {format, memory_.data(), kPages, part, parts};
    const cuda::StepLimits limits = {
        .heads = config.num_heads,
        .num_multiprocessors = model_->num_multiprocessors(),
        .shape = {config.kv_lora_rank, config.qk_rope_dim, config.qk_nope_dim, config.v_dim},
        .policy = gpu_attention_policy(),
        .most_keys = 2048,
        .page_stride = parts,
        .with_mtp = true};
    planner_.emplace(limits);
    draft_planner_.emplace(cuda::draft_limits(limits));
  }
  std::vector<float> forward(const ForwardBatch& batch) override {
    planner_->plan(batch, batch.num_rows(), layout_);
    const cuda::DeviceArray<std::byte> arrays(layout_.memory);
    model_->forward(layout_, arrays.data(), nullptr, cache_, nullptr);
    return logits(batch);
  }
  std::vector<float> draft(const ForwardBatch& batch, std::span<const int32_t> states) override {
    draft_planner_->plan_draft(batch, states, 0, layout_);
    const cuda::DeviceArray<std::byte> arrays(layout_.memory);
    model_->draft(layout_, arrays.data(), nullptr, cache_, nullptr);
    return logits(batch);
  }

 private:
  std::vector<float> logits(const ForwardBatch& batch) const {
    const auto vocab = static_cast<size_t>(model_->config().vocab_size);
    std::vector<float> out(batch.logit_rows.size() * vocab);
    cuda::check(
        cudaMemcpy2D(out.data(), vocab * sizeof(float), model_->logits(),
                     static_cast<size_t>(model_->logits_stride()) * sizeof(float),
                     vocab * sizeof(float), batch.logit_rows.size(), cudaMemcpyDeviceToHost),
        "copying logits");
    return out;
  }

  std::unique_ptr<cuda::DeepSeekModel> model_;
  cuda::DeviceArray<std::byte> memory_;
  cuda::CacheMemory cache_;
  std::optional<cuda::StepPlanner> planner_, draft_planner_;
  cuda::StepLayout layout_;
};

// The rows' distributions, as far as deviation() reads them.
void append(const std::vector<float>& logits, int64_t vocab, std::vector<SampledToken>& to) {
  for (auto row = logits.begin(); row != logits.end(); row += vocab) {
    std::vector<int32_t> order(static_cast<size_t>(vocab));
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + 20, order.end(),
                      [&](int32_t a, int32_t b) { return row[a] > row[b]; });
    double sum = 0;
    for (int64_t i = 0; i < vocab; ++i) sum += std::exp(double{row[i]} - row[order[0]]);
    SampledToken token;
    token.id = order[0];
    for (size_t i = 0; i < 20; ++i) {
      token.top.emplace_back(order[i],
                             static_cast<float>(row[order[i]] - row[order[0]] - std::log(sum)));
    }
    to.push_back(std::move(token));
  }
}

struct Trace {
  std::vector<std::vector<SampledToken>> main, first_drafts, later_drafts;
};

// Rows of some sequences, each with the pages that its number gives it.
struct Rows {
  explicit Rows(const std::vector<std::vector<int32_t>>& texts) : texts_(texts) {
    batch.query_start = {0};
    batch.max_pages = kSequencePages;
  }
  // ids[begin, end) of a text, the last `drafts` of which are drafts; `logits`: of all rows, or of
  // the last one alone.
  void add(size_t text, int32_t begin, int32_t end, int32_t mtp_len, int32_t drafts,
           bool all_logits) {
    for (int32_t position = begin; position < end; ++position) {
      // A draft's row has another token than the text.
      const bool is_wrong = position >= end - drafts;
      const int32_t id = texts_[text][static_cast<size_t>(position)];
      if (all_logits || position + 1 == end) {
        batch.logit_rows.push_back(static_cast<int32_t>(batch.token_ids.size()));
      }
      batch.token_ids.push_back(is_wrong ? 3 + (id + 17) % 8000 : id);
      batch.positions.push_back(position);
    }
    batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
    batch.context_lens.push_back(begin);
    batch.prompt_lens.push_back(0);
    batch.mtp_lens.push_back(mtp_len);
    batch.num_drafts.push_back(drafts);
    for (int32_t page = 0; page < kSequencePages; ++page) {
      batch.block_tables.push_back((static_cast<int32_t>(text) * kSequencePages + page) * 37 %
                                   static_cast<int32_t>(kPages));
    }
  }

  ForwardBatch batch;

 private:
  const std::vector<std::vector<int32_t>>& texts_;
};

// Prompts in chunks, then windows of four rows of which 0 to 3 drafts turn out right (the text
// decides), each followed by a draft of the next token and one more from the layer's own state.
Trace run(MtpModel& model, const std::vector<std::vector<int32_t>>& texts, int64_t vocab) {
  Trace trace;
  for (auto* part : {&trace.main, &trace.first_drafts, &trace.later_drafts}) part->resize(1);
  const size_t count = texts.size();
  std::vector<int32_t> done(count, 0);
  const auto append_main = [&](const std::vector<float>& logits) {
    append(logits, vocab, trace.main[0]);
  };
  // Prompts of 1, 2, 66, 131, … tokens, whole or in two chunks.
  for (const bool is_second : {false, true}) {
    Rows rows(texts);
    for (size_t t = 0; t < count; ++t) {
      const auto length = static_cast<int32_t>(t < 2 ? 1 + t : 1 + 65 * (t - 1));
      const int32_t cut = t % 2 == 0 ? length : std::max(1, length / 3);
      const int32_t end = is_second ? length : cut;
      if (end == done[t]) continue;
      rows.add(t, done[t], end, done[t], 0, true);
      done[t] = end;
    }
    append_main(model.forward(rows.batch));
  }
  std::vector<int32_t> mtp_len = done;
  for (int round = 0; round < 14; ++round) {
    // Drafts: rows for the tokens without one, up to the newest, `done`.
    Rows known(texts), next(texts);
    for (size_t t = 0; t < count; ++t) {
      known.add(t, mtp_len[t], done[t] + 1, mtp_len[t], 0, round % 2 == 0);
      mtp_len[t] = done[t] + 1;
    }
    append(model.draft(known.batch, {}), vocab, trace.first_drafts[0]);
    std::vector<int32_t> states;
    for (size_t t = 0; t < count; ++t) {
      // The last logit row of each sequence.
      const int32_t end = known.batch.query_start[t + 1];
      const auto& wanted = known.batch.logit_rows;
      states.push_back(
          static_cast<int32_t>(std::find(wanted.begin(), wanted.end(), end - 1) - wanted.begin()));
      next.add(t, done[t] + 1, done[t] + 2, 0, 1, true);
    }
    append(model.draft(next.batch, states), vocab, trace.later_drafts[0]);
    Rows window(texts);
    for (size_t t = 0; t < count; ++t) {
      const int32_t accepted = static_cast<int32_t>(t + static_cast<size_t>(round)) % 4;
      // Some steps have no drafts, and one does without the MTP layer's row before it.
      const int32_t drafts = round % 5 == 4 ? 0 : 3;
      window.add(t, done[t], done[t] + 1 + drafts, mtp_len[t], drafts - std::min(drafts, accepted),
                 true);
      // What is counted as drafts are all of them.
      window.batch.num_drafts.back() = drafts;
      done[t] += 1 + std::min(drafts, accepted);
    }
    append_main(model.forward(window.batch));
  }
  return trace;
}

struct Form {
  StoredFp8 stored = StoredFp8::kKept;
  CacheFormat format = CacheFormat::kBF16;
};

class GpuMtp : public testing::TestWithParam<Form> {};

// Main logits and drafts alike: bounds as GpuRunner.IsNearToFloat32 has them for the main model's.
TEST_P(GpuMtp, LogitsAreNearToFloat32) {
  const auto [stored, format] = GetParam();
  const Checkpoint& checkpoint = bundled_checkpoint();
  const int64_t vocab = checkpoint.config().vocab_size;
  std::mt19937 random(7);
  std::vector<std::vector<int32_t>> texts;
  for (size_t t = 0; t < 6; ++t) {
    std::vector<int32_t> ids;
    while (ids.size() < kSequencePages * kPageSize) {
      const auto prompt = random_prompt(random);
      ids.insert(ids.end(), prompt.begin(), prompt.end());
    }
    ids.resize(kSequencePages * kPageSize);
    texts.push_back(std::move(ids));
  }
  OnCpu right_model(checkpoint, DType::kF32, CacheFormat::kF32),
      near_model(checkpoint, DType::kBF16, format);
  OnGpu gpu_model(checkpoint, stored, format);
  const Trace right = run(right_model, texts, vocab), near = run(near_model, texts, vocab),
              gpu = run(gpu_model, texts, vocab);
  const bool is_bf16 = stored == StoredFp8::kExpandedToBF16;
  const auto compare = [&](const auto& field, const char* what) {
    const Deviation cpu = deviation(near.*field, right.*field, what),
                    its = deviation(gpu.*field, right.*field, what);
    EXPECT_LE(its.logprobs, is_bf16 ? 1.8 * cpu.logprobs : 0.32) << what;
    EXPECT_LE(its.other_tokens, is_bf16 ? 1.8 * cpu.other_tokens + 0.02 : 0.22) << what;
  };
  compare(&Trace::main, "main logits");
  compare(&Trace::first_drafts, "first drafts");
  compare(&Trace::later_drafts, "later drafts");
}

INSTANTIATE_TEST_SUITE_P(Forms, GpuMtp,
                         testing::Values(Form{StoredFp8::kExpandedToBF16, CacheFormat::kBF16},
                                         Form{StoredFp8::kKept, CacheFormat::kBF16},
                                         Form{StoredFp8::kExpandedToBF16, CacheFormat::kFp8Scaled},
                                         Form{StoredFp8::kKept, CacheFormat::kE4M3}));

GpuRunnerOptions drafting(int64_t drafts) {
  GpuRunnerOptions options = gpu_options();
  options.max_drafts = drafts;
  return options;
}

EngineOptions always(int64_t drafts, EngineOptions options = {}) {
  options.max_drafts = drafts;
  options.adapts_drafts = false;
  return options;
}

// Of the drafts in an engine's windows of one, the share that was right.
double acceptance(const Engine& engine) {
  const SpeculationStats stats = engine.stats().speculation;
  EXPECT_GT(stats.drafts, 200);
  return static_cast<double>(stats.accepted_tokens) / static_cast<double>(stats.drafts);
}

// Sums, with what docs/speculation.md has for such on the CPU, 0.993, and as the CPU has these.
TEST(GpuDrafts, FirstDraftsOfSumsAreAsRightAsOnTheCpu) {
  std::mt19937 random(31);
  std::vector<Request> requests;
  for (int i = 0; i < 100; ++i) {
    Conversation conversation;
    conversation.messages.push_back(plain_message(
        Role::kUser, fmt::format("Compute {} + {}.", random() % 1000, random() % 1000)));
    const auto prompt = render(ChatFormat::kV3, conversation);
    ASSERT_TRUE(prompt.has_value());
    Request request;
    request.prompt_ids = encode_prompt(*bundled_tokenizer(), *prompt);
    request.sampling.temperature = 0;
    request.sampling.max_tokens = 40;
    requests.push_back(std::move(request));
  }
  auto on_device = make_engine(drafting(1), always(1));
  answers(*on_device, requests, true);
  ModelRunnerOptions cpu;
  cpu.max_total_tokens = kGpuTestTokens;
  cpu.load.show_progress = false;
  cpu.max_drafts = 1;
  auto runner = ModelRunner::create(bundled_checkpoint(), cpu);
  ASSERT_TRUE(runner.has_value()) << runner.error().message;
  EngineOptions engine = always(1);
  engine.max_num_seqs = 64;
  engine.max_queued_tokens = 1 << 24;
  engine.eos_ids = {1};
  auto on_host = Engine::create(engine, std::move(*runner), bundled_tokenizer());
  ASSERT_TRUE(on_host.has_value()) << on_host.error().message;
  answers(**on_host, requests, true);
  const double gpu = acceptance(*on_device), host = acceptance(**on_host);
  std::printf("first drafts accepted: %.4f, on the CPU %.4f\n", gpu, host);
  EXPECT_GE(gpu, 0.97);
  EXPECT_NEAR(gpu, host, 0.015);
}

// Each row of a window against float32, as without drafts; with preemption, chunks, prefixes and
// pages in host memory, which carry the layer's rows and states: acceptance does not fall.
TEST(GpuDrafts, EveryRowIsAsFloat32HasIt) {
  std::mt19937 random(32);
  const auto requests = random_requests(random, 60);
  // As GpuEngineProducts has them in e4m3.
  const ForcedLimits limits{.row = 4.5, .mean = 0.12};
  const auto share = [](const Engine& engine) {
    const SpeculationStats stats = engine.stats().speculation;
    return static_cast<double>(stats.accepted_per_pos[0]) / static_cast<double>(stats.drafts);
  };
  auto plain = make_engine(drafting(3), always(3));
  expect_as_forced(requests, answers(*plain, requests, true), limits);
  GpuRunnerOptions small = drafting(3);
  small.max_total_tokens = 40 * kPageSize;
  small.max_batched_tokens = 150;
  auto crowded = make_engine(small, always(3, {.kv_offload_bytes = 64 << 20, .preempt_every = 7}));
  for (int time = 0; time < 2; ++time) {
    expect_as_forced(requests, answers(*crowded, requests, true), limits);
  }
  EXPECT_GT(crowded->stats().preemptions, 5);
  EXPECT_GT(crowded->stats().prefix_hits, 0);
  EXPECT_EQ(crowded->stats().pages_used, 0);
  std::printf("first drafts accepted: %.4f, %.4f with few pages\n", share(*plain), share(*crowded));
  EXPECT_GE(share(*crowded), share(*plain) - 0.02);
}

// Drafts that adapt, in two lanes on one device.
TEST(GpuDrafts, LanesAndPolicy) {
  std::mt19937 random(33);
  const auto requests = random_requests(random, 80);
  GpuRunnerOptions options = ranks(1, 2, drafting(3));
  auto engine = make_engine(options, {.max_drafts = 3, .adapts_drafts = true});
  expect_as_forced(requests, answers(*engine, requests, true), {.row = 4.5, .mean = 0.12});
  EXPECT_EQ(engine->stats().pages_used, 0);
}

// ---- measurements: V2-Lite's shape with random weights, requests behind prompts of 1,024 tokens

const Checkpoint& lite_checkpoint() {
  static const Checkpoint opened = [] {
    auto result = Checkpoint::open_dummy("bench/models/v2-lite-mtp");
    FATHOM_CHECK(result.has_value(), "{}", result.error().message);
    return std::move(*result);
  }();
  return opened;
}

std::unique_ptr<Engine> lite_engine(int64_t drafts, bool adapts, int64_t sequences) {
  GpuRunnerOptions options = drafting(drafts);
  options.max_batched_tokens = 4096;
  options.max_prompt_logit_rows = EngineOptions().max_prompt_logit_rows;
  options.max_num_seqs = sequences;
  options.max_total_tokens = sequences * 1792;
  EngineOptions engine{.max_num_seqs = sequences,
                       .max_batched_tokens = 4096,
                       .max_queued_tokens = 1 << 24,
                       .prefix_caching = false,
                       .max_drafts = drafts,
                       .adapts_drafts = adapts};
  auto made = Engine::create(engine, on_gpu(options, lite_checkpoint()), nullptr);
  FATHOM_CHECK(made.has_value(), "{}", made.error().message);
  return std::move(*made);
}

// Tokens a second of `batch` requests at once, each of so many tokens behind its first 16.
double tokens_a_second(Engine& engine, int batch, int64_t tokens, float temperature) {
  const auto seconds = [&](int64_t count) {
    std::mt19937 random(5);
    std::vector<Request> requests;
    for (int i = 0; i < batch; ++i) {
      Request request;
      for (int token = 0; token < 1024; ++token) {
        request.prompt_ids.push_back(static_cast<int32_t>(random() % 100000));
      }
      request.sampling.temperature = temperature;
      request.sampling.seed = random();
      request.sampling.max_tokens = count;
      request.sampling.ignore_eos = true;
      requests.push_back(std::move(request));
    }
    const auto begun = std::chrono::steady_clock::now();
    answers(engine, requests, true);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  };
  const double short_s = seconds(16);
  return static_cast<double>(batch * tokens) / (seconds(16 + tokens) - short_s);
}

// Without drafts, adapting and always.
TEST(GpuDrafts, DISABLED_TokensASecond) {
  struct Way {
    const char* name;
    int64_t drafts;
    bool adapts;
  };
  for (const Way& way :
       {Way{"without", 0, true}, Way{"up to 3", 3, true}, Way{"always 1", 1, false},
        Way{"without", 0, true}, Way{"up to 3", 3, true}}) {
    const auto engine = lite_engine(way.drafts, way.adapts, 64);
    for (const int batch : {1, 16, 64}) {
      tokens_a_second(*engine, batch, 48, 1);
      const double rate = tokens_a_second(*engine, batch, 256, 1);
      const SpeculationStats stats = engine->stats().speculation;
      std::printf("%s, %d sequences: %.1f tokens/s; %ld windows so far, %ld drafts accepted\n",
                  way.name, batch, rate, static_cast<long>(stats.drafts),
                  static_cast<long>(stats.accepted_tokens));
      std::fflush(stdout);
    }
  }
}

// Greedy, where random weights accept no draft: what adapting costs, in turns with an engine
// without the layer.
TEST(GpuDrafts, DISABLED_CostOfAdapting) {
  const auto plain = lite_engine(0, false, 16), adapting = lite_engine(3, true, 16);
  for (const int batch : {1, 4, 16}) {
    std::vector<double> ratios;
    for (int turn = 0; turn <= 5; ++turn) {
      const double without = tokens_a_second(*plain, batch, 512, 0);
      const SpeculationStats before = adapting->stats().speculation;
      const double with = tokens_a_second(*adapting, batch, 512, 0);
      const SpeculationStats stats = adapting->stats().speculation;
      std::printf(
          "%d sequences: %.1f and %.1f tokens/s (%.4f); %ld windows, %ld drafts accepted%s\n",
          batch, without, with, with / without, static_cast<long>(stats.drafts - before.drafts),
          static_cast<long>(stats.accepted_tokens - before.accepted_tokens),
          turn == 0 ? ", the first" : "");
      std::fflush(stdout);
      if (turn > 0) ratios.push_back(with / without);
    }
    std::ranges::sort(ratios);
    std::printf("%d sequences: median %.4f, %.4f to %.4f\n", batch, ratios[ratios.size() / 2],
                ratios.front(), ratios.back());
    EXPECT_GE(ratios[ratios.size() / 2], 0.98);
  }
}

}  // namespace
}  // namespace fathom
