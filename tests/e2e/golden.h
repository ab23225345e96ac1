// Golden outputs of Hugging Face transformers, as tools/make_goldens.py wrote them, and a harness
// that runs a model on them the way an engine would: paged cache, chunks, batches.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "model/deepseek.h"

namespace fathom {

struct GoldenTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;  // i32 tensors are widened

  const float* row(int64_t i) const { return values.data() + i * shape.back(); }
};

// All tensors (f32 or i32) of one safetensors file.
std::map<std::string, GoldenTensor> read_tensors(const std::string& path);

std::string goldens_directory();
std::string bundled_model();

// One sequence of a batch: how many of its tokens each step takes (the last entry repeats).
struct TestSequence {
  std::vector<int32_t> ids;
  std::vector<int64_t> chunks;
};

// A model with a cache. Pages are handed out in a shuffled order, and the cache is poisoned first.
class ModelHarness {
 public:
  ModelHarness(const std::string& model, const ModelOptions& options, CacheFormat format,
               int64_t num_pages = 64, bool quantize_fp8 = false);

  // Logits of every token of every sequence, [tokens, vocab] each, all sequences advancing together
  // by their own chunks. The sequences' cache rows are overwritten by the next call.
  std::vector<std::vector<float>> run(const std::vector<TestSequence>& sequences);

  // The greedy continuation.
  std::vector<int32_t> greedy(const std::vector<int32_t>& prompt, int count);

  int64_t vocab() const { return model_->config().vocab_size; }

 private:
  ThreadPool pool_;
  Stream stream_;
  std::unique_ptr<DeepSeekModel> model_;
  LatentCache cache_;
};

}  // namespace fathom
