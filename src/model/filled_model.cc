#include "model/filled_model.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "base/check.h"
#include "base/random.h"
#include "cache/index_key_row.h"
#include "cache/latent_row.h"
#include "model/layer_options.h"

namespace fathom {
namespace {

constexpr CacheFormat kFormat = CacheFormat::kBF16;

Checkpoint dummy_checkpoint(std::string_view config) {
  std::string folder = (std::filesystem::temp_directory_path() / "fathom-bench-XXXXXX").string();
  FATHOM_CHECK(mkdtemp(folder.data()) != nullptr, "no folder {}", folder);
  std::ofstream(folder + "/config.json") << config;
  auto checkpoint = Checkpoint::open_dummy(folder);
  std::filesystem::remove_all(folder);
  FATHOM_CHECK(checkpoint.has_value(), "{}", checkpoint.error().message);
  return std::move(*checkpoint);
}

int64_t pages_of(int64_t tokens) { return (tokens + kPageSize - 1) / kPageSize; }

}  // namespace

FilledModel::FilledModel(std::string_view config, const AttentionPolicy& policy, int64_t tokens,
                         int64_t rows, ThreadPool& pool)
    : FilledModel(dummy_checkpoint(config), policy, tokens, rows, pool) {}

FilledModel::FilledModel(const Checkpoint& checkpoint, const AttentionPolicy& policy,
                         int64_t tokens, int64_t rows, ThreadPool& pool)
    : stream_(pool) {
  ModelOptions options;
  options.max_rows = rows;
  options.attention = policy;
  LoadOptions load;
  load.show_progress = false;
  auto loaded = DeepSeekModel::load(checkpoint, options, load, stream_);
  FATHOM_CHECK(loaded.has_value(), "{}", loaded.error().message);
  model_ = std::move(*loaded);
  auto cache = LatentCache::allocate(latent_layout(config(), kFormat), config().num_layers,
                                     pages_of(tokens), 0, index_key_layout(config(), kFormat));
  FATHOM_CHECK(cache.has_value(), "{}", cache.error().message);
  cache_ = std::move(*cache);
  fill_cache();
}

double FilledModel::step(int64_t context, int64_t rows, int64_t sequences) {
  const int64_t pages = pages_of(context + rows);
  FATHOM_CHECK(pages * sequences <= cache_.num_pages(), "{} pages, {} are needed",
               cache_.num_pages(), pages * sequences);
  ForwardBatch batch;
  batch.query_start = {0};
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    for (int64_t i = 0; i < rows; ++i) {
      batch.token_ids.push_back(static_cast<int32_t>(
          random_bits(1, static_cast<uint64_t>(sequence), static_cast<uint64_t>(context + i)) %
          128));
      batch.positions.push_back(static_cast<int32_t>(context + i));
    }
    batch.query_start.push_back(static_cast<int32_t>((sequence + 1) * rows));
    batch.context_lens.push_back(static_cast<int32_t>(context));
    batch.logit_rows.push_back(static_cast<int32_t>((sequence + 1) * rows - 1));
  }
  batch.max_pages = static_cast<int32_t>(pages);
  batch.block_tables.resize(static_cast<size_t>(pages * sequences));
  std::iota(batch.block_tables.begin(), batch.block_tables.end(), 0);
  std::vector<float> logits(static_cast<size_t>(sequences * config().vocab_size));
  const auto begin = std::chrono::steady_clock::now();
  model_->forward(batch, cache_, TensorView(logits.data(), {sequences, config().vocab_size}));
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

int64_t FilledModel::cache_bytes_per_token() const {
  return cache_.layout().row_bytes() * config().num_layers;
}

void FilledModel::fill_cache() {
  const LatentLayout& layout = cache_.layout();
  for (int64_t layer = 0; layer < config().num_layers; ++layer) {
    const LatentPages pages = cache_.layer(layer);
    const bool has_keys = cache_.index_key_layout().has_value();
    stream_.pool().parallel_for(pages.num_pages, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> values(static_cast<size_t>(layout.latent_dim + layout.rope_dim));
      for (int64_t page = begin; page < end; ++page) {
        for (int64_t slot = 0; slot < kPageSize; ++slot) {
          const auto seed = static_cast<uint64_t>((layer << 32) + page * kPageSize + slot);
          for (size_t i = 0; i < values.size(); ++i) {
            values[i] = static_cast<float>(2 * random_uniform(seed, 0, i) - 1);
          }
          encode_row(layout, values.data(), values.data() + layout.latent_dim,
                     pages.row(page, slot));
          if (!has_keys) continue;
          const IndexKeyPages keys = cache_.index_keys(layer);
          encode_index_key(keys.layout, values.data() + 7, keys.row(page, slot));
        }
      }
    });
  }
}

}  // namespace fathom
