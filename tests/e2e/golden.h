// Golden outputs of Hugging Face transformers, as written by tools/make_goldens.py, and a harness
// that runs a model on them like an engine: paged cache, chunks, batches.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "model/deepseek.h"

namespace fathom {

struct GoldenTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;  // i32 tensors are converted

  const float* row(int64_t i) const { return values.data() + i * shape.back(); }
};

// Reads all tensors (f32 or i32) of one safetensors file.
std::map<std::string, GoldenTensor> read_tensors(const std::string& path);

std::string goldens_directory();
std::string bundled_model();

// One sequence of a batch, and the number of its tokens in each step (the last entry repeats).
struct TestSequence {
  std::vector<int32_t> ids;
  std::vector<int64_t> chunks;
};

// A model with a cache. Pages are assigned in shuffled order from a poisoned cache.
class ModelHarness {
 public:
  // `index_keys`: the format of index keys, where a model has them; none: what goes with `format`.
  ModelHarness(const std::string& model, const ModelOptions& options, CacheFormat format,
               int64_t num_pages = 64, bool quantize_fp8 = false,
               std::optional<IndexKeyFormat> index_keys = {});

  // Returns the logits [tokens, vocab] of each sequence. All sequences advance together by their
  // own chunks. The next call overwrites their cache rows.
  std::vector<std::vector<float>> run(const std::vector<TestSequence>& sequences);

  // Returns the greedy continuation.
  std::vector<int32_t> greedy(const std::vector<int32_t>& prompt, int count);

  int64_t vocab() const { return model_->config().vocab_size; }

 private:
  ThreadPool pool_;
  Stream stream_;
  std::unique_ptr<DeepSeekModel> model_;
  LatentCache cache_;
};

}  // namespace fathom
