#include "convert/calibration.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <thread>

#include "base/check.h"
#include "base/math.h"
#include "base/progress.h"
#include "cache/latent_row.h"
#include "model/deepseek.h"
#include "model/layer_options.h"

namespace fathom::mla {
namespace {

// Adds the rows of one window to the moments of a layer.
class MomentSums {
 public:
  MomentSums(const ModelConfig& config, int64_t num_layers)
      : config_(config), table_(rope_table(config)), width_(2 * config.kv_lora_rank) {
    sums_.assign(static_cast<size_t>(num_layers), Matrix::Zero(width_, width_));
  }

  // The window's rows are in the cache's pages 0, 1, …
  void add(const LatentCache& cache, int64_t tokens) {
    count_ += tokens;
    Eigen::MatrixXd rows(width_, tokens);
    for (size_t layer = 0; layer < sums_.size(); ++layer) {
      const LatentPages pages = cache.layer(static_cast<int64_t>(layer));
      for (int64_t token = 0; token < tokens; ++token) read_row(pages, token, rows.col(token));
      sums_[layer].noalias() += rows * rows.transpose();
    }
  }

  std::vector<Matrix> means() && {
    for (Matrix& sum : sums_) sum /= static_cast<double>(std::max<int64_t>(1, count_));
    return std::move(sums_);
  }

 private:
  // A cache row is [values ; rotated keys]; column is [keys as before rotation ; values].
  template <typename Column>
  void read_row(const LatentPages& pages, int64_t token, Column column) const {
    const int64_t dim = config_.kv_lora_rank, head_dim = config_.gqa->head_dim, half = head_dim / 2;
    std::vector<float> values(static_cast<size_t>(dim)), keys(values.size());
    decode_row(pages.layout, pages.row(token / kPageSize, token % kPageSize), values.data(),
               keys.data());
    std::vector<float> cos_sin(static_cast<size_t>(head_dim));
    table_.compute(static_cast<int32_t>(token), cos_sin.data());
    for (int64_t i = 0; i < dim; ++i) column[dim + i] = values[static_cast<size_t>(i)];
    for (int64_t head = 0; head < dim; head += head_dim) {
      for (int64_t i = 0; i < half; ++i) {
        const double cosine = cos_sin[static_cast<size_t>(2 * i)];
        const double sine = cos_sin[static_cast<size_t>(2 * i + 1)];
        const double a = keys[static_cast<size_t>(head + i)];
        const double b = keys[static_cast<size_t>(head + i + half)];
        column[head + i] = a * cosine + b * sine;
        column[head + i + half] = b * cosine - a * sine;
      }
    }
  }

  const ModelConfig& config_;
  const RopeTable table_;
  const int64_t width_;
  std::vector<Matrix> sums_;
  int64_t count_ = 0;
};

// -log of the probability that softmax gives to an entry.
double negative_log_likelihood(std::span<const float> logits, int32_t id) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - largest);
  return largest + std::log(sum) - logits[static_cast<size_t>(id)];
}

ForwardBatch one_window(std::span<const int32_t> ids) {
  const auto tokens = static_cast<int32_t>(ids.size());
  ForwardBatch batch;
  batch.token_ids.assign(ids.begin(), ids.end());
  batch.positions.resize(ids.size());
  std::iota(batch.positions.begin(), batch.positions.end(), 0);
  batch.logit_rows = batch.positions;
  batch.query_start = {0, tokens};
  batch.context_lens = {0};
  batch.max_pages = static_cast<int32_t>(ceil_div(tokens, static_cast<int32_t>(kPageSize)));
  batch.block_tables.resize(static_cast<size_t>(batch.max_pages));
  std::iota(batch.block_tables.begin(), batch.block_tables.end(), 0);
  return batch;
}

}  // namespace

Result<Calibration> calibrate(const Checkpoint& checkpoint, std::span<const int32_t> ids,
                              const CalibrationOptions& options) {
  FATHOM_CHECK(ids.size() >= 2, "{} tokens", ids.size());
  const ModelConfig& config = checkpoint.config();
  const int64_t window = std::min(kWindowTokens, config.max_position);
  ThreadPool pool(options.num_threads > 0
                      ? options.num_threads
                      : std::max(1, static_cast<int>(std::thread::hardware_concurrency())));
  const Stream stream(pool);
  ModelOptions model_options;
  model_options.compute = options.compute;
  model_options.max_rows = window;
  model_options.attention = cpu_attention_policy();
  LoadOptions load;
  load.num_threads = options.num_threads;
  load.show_progress = options.show_progress;
  FATHOM_TRY(const auto model, DeepSeekModel::load(checkpoint, model_options, load, stream));
  const CacheFormat format =
      options.compute == DType::kF32 ? CacheFormat::kF32 : CacheFormat::kBF16;
  FATHOM_TRY(const LatentCache cache,
             LatentCache::allocate(latent_layout(config, format), config.num_layers,
                                   ceil_div(window, int64_t{kPageSize})));
  std::optional<MomentSums> moments;
  if (config.gqa) moments.emplace(config, config.num_layers);
  std::vector<float> logits(static_cast<size_t>(window * config.vocab_size));

  Calibration result;
  const int64_t windows =
      std::min(kMostWindows, ceil_div(static_cast<int64_t>(ids.size()), window));
  std::optional<Progress> progress;
  if (options.show_progress) progress.emplace("Calibrating", windows, Progress::Unit::kItems);
  for (int64_t w = 0; w < windows; ++w) {
    const auto first = static_cast<size_t>(w * window);
    const auto own = ids.subspan(first, std::min(static_cast<size_t>(window), ids.size() - first));
    const auto tokens = static_cast<int64_t>(own.size());
    model->forward(one_window(own), cache, TensorView(logits.data(), {tokens, config.vocab_size}));
    for (int64_t t = 0; t + 1 < tokens; ++t) {
      const auto row = std::span(logits).subspan(static_cast<size_t>(t * config.vocab_size),
                                                 static_cast<size_t>(config.vocab_size));
      result.loss += negative_log_likelihood(row, own[static_cast<size_t>(t + 1)]);
      ++result.tokens;
    }
    if (moments) moments->add(cache, tokens);
    if (progress) progress->add(1);
  }
  result.loss /= static_cast<double>(std::max<int64_t>(1, result.tokens));
  if (moments) result.moments = std::move(*moments).means();
  return result;
}

}  // namespace fathom::mla
