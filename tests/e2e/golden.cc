#include "e2e/golden.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "base/json.h"
#include "base/math.h"
#include "model/layer_options.h"

namespace fathom {

std::map<std::string, GoldenTensor> read_tensors(const std::string& path) {
  const auto text = read_text_file(path, int64_t{1} << 30);
  FATHOM_CHECK(text.has_value(), "{}", text.error().message);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, text->data(), 8);
  const auto header = parse_json(std::string_view(*text).substr(8, header_bytes), path);
  FATHOM_CHECK(header.has_value(), "{}", header.error().message);
  const char* data = text->data() + 8 + header_bytes;
  std::map<std::string, GoldenTensor> tensors;
  for (const auto& [name, entry] : header->as_object()) {
    if (name == "__metadata__") continue;
    GoldenTensor& tensor = tensors[std::string(name)];
    int64_t count = 1;
    for (const json::value& size : entry.at("shape").as_array()) {
      tensor.shape.push_back(size.to_number<int64_t>());
      count *= tensor.shape.back();
    }
    const char* first = data + entry.at("data_offsets").at(0).to_number<int64_t>();
    tensor.values.resize(static_cast<size_t>(count));
    if (entry.at("dtype") == "F32") {
      std::memcpy(tensor.values.data(), first, tensor.values.size() * sizeof(float));
      continue;
    }
    FATHOM_CHECK(entry.at("dtype") == "I32", "{} in {}", name.data(), path);
    for (int64_t i = 0; i < count; ++i) {
      int32_t value = 0;
      std::memcpy(&value, first + i * 4, 4);
      tensor.values[i] = static_cast<float>(value);
    }
  }
  return tensors;
}

std::string goldens_directory() { return FATHOM_SOURCE_DIR "/tests/goldens/"; }
std::string bundled_model() { return FATHOM_SOURCE_DIR "/models/fathom-tiny"; }

ModelHarness::ModelHarness(const std::string& model, const ModelOptions& options,
                           CacheFormat format, int64_t num_pages, bool quantize_fp8,
                           std::optional<IndexKeyFormat> index_keys)
    : pool_(2), stream_(pool_) {
  const auto checkpoint = Checkpoint::open(model);
  FATHOM_CHECK(checkpoint.has_value(), "{}", checkpoint.error().message);
  LoadOptions load;
  load.show_progress = false;
  load.quantize_fp8 = quantize_fp8;
  auto loaded = DeepSeekModel::load(*checkpoint, options, load, stream_);
  FATHOM_CHECK(loaded.has_value(), "{}", loaded.error().message);
  model_ = std::move(*loaded);
  const ModelConfig& config = model_->config();
  auto keys = index_key_layout(config, format);
  if (keys && index_keys) keys->format = *index_keys;
  auto cache = LatentCache::allocate(latent_layout(config, format), config.num_layers, num_pages, 0,
                                     keys, layers_with_index_keys(config, config.num_layers));
  FATHOM_CHECK(cache.has_value(), "{}", cache.error().message);
  cache_ = std::move(*cache);
}

std::vector<std::vector<float>> ModelHarness::run(const std::vector<TestSequence>& sequences) {
  std::memset(cache_.page(0), 0xFF, static_cast<size_t>(cache_.num_pages() * cache_.page_bytes()));
  std::vector<int32_t> free(static_cast<size_t>(cache_.num_pages()));
  std::iota(free.begin(), free.end(), 0);
  std::mt19937 random(11);
  std::shuffle(free.begin(), free.end(), random);

  int32_t max_pages = 1;
  for (const TestSequence& s : sequences) {
    max_pages = std::max(
        max_pages, static_cast<int32_t>(ceil_div(static_cast<int64_t>(s.ids.size()), kPageSize)));
  }
  std::vector<std::vector<int32_t>> tables;
  for (const TestSequence& s : sequences) {
    std::vector<int32_t> table(static_cast<size_t>(max_pages), -1);
    for (int64_t p = 0; p * kPageSize < static_cast<int64_t>(s.ids.size()); ++p) {
      FATHOM_CHECK(!free.empty(), "{} pages are too few for this test", cache_.num_pages());
      table[p] = free.back();
      free.pop_back();
    }
    tables.push_back(std::move(table));
  }

  std::vector<int64_t> done(sequences.size(), 0);
  std::vector<std::vector<float>> all(sequences.size());
  for (size_t step = 0;; ++step) {
    ForwardBatch batch;
    batch.max_pages = max_pages;
    batch.query_start.push_back(0);
    std::vector<size_t> members;
    for (size_t s = 0; s < sequences.size(); ++s) {
      const auto& [ids, chunks] = sequences[s];
      const int64_t left = static_cast<int64_t>(ids.size()) - done[s];
      if (left == 0) continue;
      const int64_t take = std::min(left, chunks[std::min(step, chunks.size() - 1)]);
      for (int64_t i = 0; i < take; ++i) {
        batch.token_ids.push_back(ids[done[s] + i]);
        batch.positions.push_back(static_cast<int32_t>(done[s] + i));
      }
      batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
      batch.context_lens.push_back(static_cast<int32_t>(done[s]));
      batch.block_tables.insert(batch.block_tables.end(), tables[s].begin(), tables[s].end());
      members.push_back(s);
    }
    if (members.empty()) return all;
    batch.logit_rows.resize(batch.token_ids.size());
    std::iota(batch.logit_rows.begin(), batch.logit_rows.end(), 0);
    std::vector<float> logits(batch.token_ids.size() * static_cast<size_t>(vocab()), NAN);
    model_->forward(batch, cache_, TensorView(logits.data(), {batch.num_rows(), vocab()}));
    for (size_t m = 0; m < members.size(); ++m) {
      const int64_t first = batch.query_start[m], last = batch.query_start[m + 1];
      all[members[m]].insert(all[members[m]].end(), logits.begin() + first * vocab(),
                             logits.begin() + last * vocab());
      done[members[m]] += last - first;
    }
  }
}

std::vector<int32_t> ModelHarness::greedy(const std::vector<int32_t>& prompt, int count) {
  const auto length = static_cast<int64_t>(prompt.size());
  ForwardBatch batch;
  batch.token_ids = prompt;
  batch.positions.resize(prompt.size());
  std::iota(batch.positions.begin(), batch.positions.end(), 0);
  batch.query_start = {0, static_cast<int32_t>(length)};
  batch.context_lens = {0};
  batch.max_pages = static_cast<int32_t>(ceil_div(length + count, kPageSize));
  batch.block_tables.resize(static_cast<size_t>(batch.max_pages));
  std::iota(batch.block_tables.rbegin(), batch.block_tables.rend(), 3);
  batch.logit_rows = {static_cast<int32_t>(length - 1)};
  std::vector<int32_t> ids;
  std::vector<float> logits(static_cast<size_t>(vocab()));
  for (int i = 0; i < count; ++i) {
    model_->forward(batch, cache_, TensorView(logits.data(), {1, vocab()}));
    const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
    ids.push_back(static_cast<int32_t>(best));
    const auto position = static_cast<int32_t>(length + i);
    batch.token_ids = {ids.back()};
    batch.positions = {position};
    batch.query_start = {0, 1};
    batch.context_lens = {position};
    batch.logit_rows = {0};
  }
  return ids;
}

}  // namespace fathom
