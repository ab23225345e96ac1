#include "e2e/gpu_mtp_trial.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "base/check.h"
#include "cache/latent_layout.h"
#include "device/cuda/device_array.h"
#include "model/deepseek.h"
#include "model/deepseek_cuda.h"
#include "model/gpu_support.h"
#include "model/layer_options.h"

namespace fathom {
namespace {

constexpr int64_t kPages = 96;
constexpr int32_t kSequencePages = 6;
static_assert(kMtpTextTokens == kSequencePages * kPageSize);
constexpr int64_t kMostRows = 1024;

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
    const int64_t layers = DeepSeekModel::cache_layers(config);
    auto cache = LatentCache::allocate(
        latent_layout(config, format), layers, kPages, DeepSeekModel::state_bytes(config, compute),
        index_key_layout(config, format), layers_with_index_keys(config, layers));
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
    AttentionPolicy policy = gpu_attention_policy();
    if (!gpu_takes_multi_head(config)) policy.form = AttentionForm::kAbsorbed;
    const auto sparse = sparse_limits(config, policy);
    auto model = cuda::DeepSeekModel::load(checkpoint,
                                           {.max_rows = kMostRows,
                                            .max_logit_rows = kMostRows,
                                            .most_keys = 2048,
                                            .stored_fp8 = stored,
                                            .cache_format = format,
                                            .sparse = sparse,
                                            .max_length = kMtpTextTokens,
                                            .with_mtp = true},
                                           {.show_progress = false});
    FATHOM_CHECK(model.has_value(), "{}", model.error().message);
    model_ = std::move(*model);
    const int64_t part = latent_layout(config, format).page_bytes();
    const int64_t parts = gpu_page_stride(config, format, true);
    memory_ = cuda::DeviceArray<std::byte>(kPages * parts * part);
    cuda::check(cudaMemset(memory_.data(), 0xFF, memory_.bytes()), "poisoning");  // NaN
    cache_ = {format, memory_.data(), kPages, part, parts};
    const cuda::StepLimits limits = {
        .heads = config.num_heads,
        .num_multiprocessors = model_->num_multiprocessors(),
        .shape = {config.kv_lora_rank, config.qk_rope_dim, config.qk_nope_dim, config.v_dim,
                  /*grouped=*/false, sparse},
        .policy = policy,
        .most_keys = 2048,
        .max_length = kMtpTextTokens,
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

}  // namespace

std::unique_ptr<MtpModel> mtp_on_cpu(const Checkpoint& checkpoint, DType compute,
                                     CacheFormat format) {
  return std::make_unique<OnCpu>(checkpoint, compute, format);
}

std::unique_ptr<MtpModel> mtp_on_gpu(const Checkpoint& checkpoint, StoredFp8 stored,
                                     CacheFormat format) {
  return std::make_unique<OnGpu>(checkpoint, stored, format);
}

MtpTrace run_mtp(MtpModel& model, const std::vector<std::vector<int32_t>>& texts, int64_t vocab,
                 int32_t longer) {
  MtpTrace trace;
  for (auto* part : {&trace.main, &trace.first_drafts, &trace.later_drafts}) part->resize(1);
  const size_t count = texts.size();
  std::vector<int32_t> done(count, 0);
  const auto append_main = [&](const std::vector<float>& logits) {
    append(logits, vocab, trace.main[0]);
  };
  // Prompts whole or in two chunks.
  for (const bool is_second : {false, true}) {
    Rows rows(texts);
    for (size_t t = 0; t < count; ++t) {
      const auto number = static_cast<int32_t>(t);
      const int32_t length = t < 2 ? 1 + number : 1 + longer * (number - 1);
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

}  // namespace fathom
