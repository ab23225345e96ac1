// Times of steps with drafts on the GPU, without sampling and host work: random (dummy) weights, a
// CUDA graph of one step, median of 11 replays. For k drafts a sequence: the step that verifies
// them (1 + k rows a sequence), the first draft step and a later one; the sum is what a window
// takes. The gain at an acceptance a is computed: 1 + a + ... + a^k tokens in that time, over one
// in the time of a step of the model without the MTP layer. "bytes": the same ratio by the bytes of
// weights and keys that are read, with experts drawn uniformly for each row; "floor": by the longer
// of these bytes' time and the multiplications', matrix by matrix.
//
//   mtp_step_cuda_bench [MODEL] [--json]      MODEL: config.json's folder, bench/models/v2-lite-mtp
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "base/math.h"
#include "cache/latent_layout.h"
#include "device/cuda/graph_timer.h"
#include "model/deepseek_cuda.h"
#include "model/gpu_support.h"
#include "model/model_bench_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int32_t kBatches[] = {1, 4, 16, 64, 128};
constexpr int32_t kContext = 1024;
constexpr int64_t kMaxRows = 512, kMostKeys = 128;
constexpr double kAcceptances[] = {0, 0.5, 0.85};

// `count` sequences with so many rows, all with logits, behind kContext tokens.
ForwardBatch batch_of(int32_t count, int32_t rows, bool has_mtp_rows) {
  ForwardBatch batch;
  batch.max_pages = static_cast<int32_t>(ceil_div(kContext + rows, kPageSize));
  batch.query_start.push_back(0);
  for (int32_t s = 0; s < count; ++s) {
    for (int32_t i = 0; i < rows; ++i) {
      batch.logit_rows.push_back(static_cast<int32_t>(batch.token_ids.size()));
      batch.token_ids.push_back(17 + s * rows + i);
      batch.positions.push_back(kContext + i);
    }
    batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
    batch.context_lens.push_back(kContext);
    batch.prompt_lens.push_back(kContext);
    batch.mtp_lens.push_back(has_mtp_rows ? kContext : kContext + 1);
    batch.num_drafts.push_back(rows - 1);
    for (int32_t page = 0; page < batch.max_pages; ++page) {
      batch.block_tables.push_back(s * batch.max_pages + page);
    }
  }
  return batch;
}

// How values are stored and multiplied, at the rates of an H200.
struct Format {
  double value_bytes, flop_per_us;
};
constexpr Format kBf16 = {2, 790e6};
constexpr Format kScaledE4M3 = {1 + 4.0 / (128 * 128), 1300e6};

// The least that a step reads and multiplies, by config: weights of so many layers, the head, and
// keys. us: each matrix takes the longer of both.
struct Least {
  double bytes = 0, us = 0;

  void add(const Format& format, double values, double macs) {
    const double read = values * format.value_bytes;
    bytes += read;
    us += std::max(read / kReadBytesPerUs, 2 * macs / format.flop_per_us);
  }
};

class Floors {
 public:
  explicit Floors(const ModelConfig& config)
      : c_(config), layers_(is_scaled(config) ? kScaledE4M3 : kBf16) {}

  // A step of `rows` rows a sequence and `drafts` draft steps.
  Least of_window(int32_t sequences, int32_t rows, int32_t drafts) const {
    Least least;
    for (int64_t layer = 0; layer < c_.num_layers; ++layer) {
      add_layer(layer, sequences, sequences * rows, least);
    }
    add_matrix(kBf16, c_.vocab_size, c_.hidden, sequences * rows, least);
    for (int32_t draft = 0; draft < drafts; ++draft) {
      add_matrix(kBf16, c_.hidden, 2 * c_.hidden, sequences, least);
      add_layer(c_.num_layers, sequences, sequences, least);
      add_matrix(kBf16, c_.vocab_size, c_.hidden, sequences, least);
    }
    return least;
  }

 private:
  static bool is_scaled(const ModelConfig& config) {
    return config.quantization.kind == QuantizationConfig::Kind::kFp8Block;
  }

  static void add_matrix(const Format& format, int64_t n, int64_t k, int32_t rows, Least& least) {
    const double values = static_cast<double>(n) * static_cast<double>(k);
    least.add(format, values, values * rows);
  }

  void add_layer(int64_t layer, int32_t sequences, int32_t rows, Least& least) const {
    const int64_t q = c_.num_heads * c_.qk_dim(), latent = c_.kv_lora_rank;
    if (c_.q_lora_rank > 0) {
      add_matrix(layers_, c_.q_lora_rank, c_.hidden, rows, least);
      add_matrix(layers_, q, c_.q_lora_rank, rows, least);
    } else {
      add_matrix(layers_, q, c_.hidden, rows, least);
    }
    add_matrix(layers_, c_.latent_dim(), c_.hidden, rows, least);
    add_matrix(layers_, c_.num_heads * c_.qk_nope_dim, latent, rows, least);
    add_matrix(layers_, c_.num_heads * c_.v_dim, latent, rows, least);
    add_matrix(layers_, c_.hidden, c_.num_heads * c_.v_dim, rows, least);
    const double keys = static_cast<double>(kContext) * sequences;
    least.add(kBf16, keys * static_cast<double>(c_.latent_dim()),
              keys * rows / sequences * static_cast<double>(c_.num_heads) *
                  static_cast<double>(c_.latent_dim() + latent));
    if (!c_.is_moe_layer(layer))
      return add_matrix(layers_, 3 * c_.intermediate, c_.hidden, rows, least);
    add_matrix(kBf16, c_.num_experts, c_.hidden, rows, least);
    add_matrix(layers_, 3 * c_.moe_intermediate * c_.num_shared_experts, c_.hidden, rows, least);
    const auto experts = static_cast<double>(c_.num_experts);
    const auto chosen = static_cast<double>(c_.experts_per_token);
    const double read = experts * (1 - std::pow(1 - chosen / experts, rows));
    const double expert = 3 * static_cast<double>(c_.hidden * c_.moe_intermediate);
    least.add(layers_, read * expert, chosen * rows * expert);
  }

  const ModelConfig& c_;
  const Format layers_;
};

// A model and a cache for its steps.
class Bench {
 public:
  Bench(const Checkpoint& checkpoint, bool with_mtp)
      : config_(checkpoint.config()),
        part_{CacheFormat::kBF16, config_.kv_lora_rank, config_.qk_rope_dim},
        parts_(gpu_page_stride(config_, part_.format, with_mtp)),
        num_pages_(kBatches[std::size(kBatches) - 1] * ceil_div(kContext + 4, kPageSize)),
        cache_(random_cache(part_, parts_ * num_pages_)) {
    auto model = DeepSeekModel::load(checkpoint,
                                     {.max_rows = kMaxRows,
                                      .max_logit_rows = kMaxRows,
                                      .most_keys = kMostKeys,
                                      .with_mtp = with_mtp},
                                     {.show_progress = false});
    FATHOM_CHECK(model.has_value(), "{}", model.error().message);
    model_ = std::move(*model);
    limits_ = {
        .heads = config_.num_heads,
        .num_multiprocessors = model_->num_multiprocessors(),
        .shape = {config_.kv_lora_rank, config_.qk_rope_dim, config_.qk_nope_dim, config_.v_dim},
        .policy = {.form = AttentionForm::kAbsorbed},
        .most_keys = kMostKeys,
        .page_stride = parts_,
        .with_mtp = with_mtp};
  }

  // us of a step of `rows` rows a sequence.
  double step(int32_t sequences, int32_t rows, bool has_mtp_rows) {
    StepPlanner planner(limits_);
    StepLayout layout;
    planner.plan(batch_of(sequences, rows, has_mtp_rows), int64_t{sequences} * rows, layout);
    const DeviceArray<std::byte> arrays(layout.memory);
    return time_in_graph(1, [&](int, cudaStream_t stream) {
      model_->forward(layout, arrays.data(), nullptr, cache(), stream);
    });
  }
  // us of a draft step of one row a sequence, from pages' states or from its own.
  double draft(int32_t sequences, bool is_first) {
    StepPlanner planner(draft_limits(limits_));
    StepLayout layout;
    std::vector<int32_t> own;
    for (int32_t s = 0; s < sequences && !is_first; ++s) own.push_back(s);
    planner.plan_draft(batch_of(sequences, 1, false), own, sequences, layout);
    const DeviceArray<std::byte> arrays(layout.memory);
    return time_in_graph(1, [&](int, cudaStream_t stream) {
      model_->draft(layout, arrays.data(), nullptr, cache(), stream);
    });
  }

 private:
  CacheMemory cache() const {
    return {part_.format, cache_.data(), num_pages_, part_.page_bytes(), parts_};
  }

  const ModelConfig config_;
  const LatentLayout part_;
  const int64_t parts_, num_pages_;
  const DeviceArray<std::byte> cache_;
  StepLimits limits_;
  std::unique_ptr<DeepSeekModel> model_;
};

double tokens(double acceptance, int drafts) {
  double sum = 1, product = 1;
  for (int i = 0; i < drafts; ++i) sum += product *= acceptance;
  return sum;
}

int run(const Checkpoint& checkpoint, bool json) {
  if (checkpoint.config().num_mtp_layers == 0) {
    std::fprintf(stderr, "%s has no MTP layer\n", checkpoint.directory().c_str());
    return 2;
  }
  std::vector<double> plain;
  {
    Bench without(checkpoint, false);
    for (const int32_t batch : kBatches) plain.push_back(without.step(batch, 1, false));
  }
  Bench bench(checkpoint, true);
  const Floors floors(checkpoint.config());
  std::printf(
      json ? "{\"device\": \"%s\", \"results\": ["
           : "%s\nsequences k  without  verify  first  later  ratio  bytes  floor  gain at 0, "
             "0.5, 0.85\n",
      device_line().c_str());
  const char* separator = "";
  for (size_t i = 0; i < std::size(kBatches); ++i) {
    const int32_t batch = kBatches[i];
    const double first = bench.draft(batch, true), later = bench.draft(batch, false);
    for (int k = 0; k <= kMaxDrafts; ++k) {
      const double verify = bench.step(batch, 1 + k, k == 0);
      const double window = verify + (k > 0 ? first + (k - 1) * later : 0);
      const double ratio = window / plain[i];
      const Least least = floors.of_window(batch, 1 + k, k), one = floors.of_window(batch, 1, 0);
      std::printf(json ? "%s\n  {\"sequences\": %d, \"drafts\": %d, \"without_us\": %.1f, "
                         "\"verify_us\": %.1f, \"first_draft_us\": %.1f, \"later_draft_us\": "
                         "%.1f, \"ratio\": %.4f, \"bytes_ratio\": %.4f, \"floor_ratio\": %.4f, "
                         "\"gain\": ["
                       : "%s%9d %d %8.1f %7.1f %6.1f %6.1f %6.3f %6.3f %6.3f  ",
                  separator, batch, k, plain[i], verify, first, later, ratio,
                  least.bytes / one.bytes, least.us / one.us);
      const char* comma = "";
      for (const double acceptance : kAcceptances) {
        std::printf("%s%.3f", comma, tokens(acceptance, k) / ratio);
        comma = ", ";
      }
      std::printf(json ? "]}" : "\n");
      if (json) separator = ",";
      std::fflush(stdout);
    }
  }
  if (json) std::printf("\n]}\n");
  return 0;
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  return fathom::cuda::model_bench_main(argc, argv, "bench/models/v2-lite-mtp", fathom::cuda::run);
}
