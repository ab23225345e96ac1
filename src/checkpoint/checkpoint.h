// A published checkpoint on disk: its configuration, and the location of each tensor's bytes.
//
// open() reads only config.json and the safetensors headers, and checks all of it: names, dtypes,
// shapes, offsets, gaps, overlaps. Immutable afterwards; any thread may read it.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "checkpoint/generation_config.h"
#include "checkpoint/model_config.h"
#include "tensor/dtype.h"

namespace fathom {

struct TensorEntry {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  int file = 0;        // index into Checkpoint::files()
  int64_t offset = 0;  // first byte in the file
  int64_t bytes = 0;

  // Whether the stored shape is compatible: a vector may be stored as a matrix with one row, a
  // scalar without dimensions.
  bool has_shape(const std::vector<int64_t>& wanted) const;
};

class Checkpoint {
 public:
  // Opens `model`, a directory or a Hugging Face id in the local hub cache. Errors name the file.
  static Result<Checkpoint> open(const std::string& model);

  // Opens without weights on disk (--load-format dummy): only config.json is read, and the tensors
  // are those of the published form of such a model. files() is empty. With num_layers the model
  // has only that many layers and no MTP layer, which gives a large model's shapes in a small
  // machine's memory.
  static Result<Checkpoint> open_dummy(const std::string& model,
                                       std::optional<int64_t> num_layers = std::nullopt);

  const std::string& directory() const { return directory_; }
  const ModelConfig& config() const { return config_; }
  const GenerationDefaults& generation_defaults() const { return defaults_; }
  // The first tensor of the MTP layer that is missing; its copies of the embedding and the head may
  // be. config().num_mtp_layers > 0.
  std::optional<std::string> missing_mtp_tensor() const;
  bool is_dummy() const { return dummy_; }
  const std::vector<std::string>& files() const { return files_; }
  const std::map<std::string, TensorEntry, std::less<>>& tensors() const { return tensors_; }
  const TensorEntry* find(std::string_view name) const;

  // Whether the weight "X.weight" is stored under its name or in four bits under others.
  bool has_weight(std::string_view name) const;

  // The path of an entry's file, or the directory for a dummy checkpoint. For error messages.
  const std::string& file_of(const TensorEntry& entry) const;

 private:
  Result<> read_configs(const std::string& model);
  Result<> read_shards();
  Result<> read_shard(const std::string& name);
  Result<> check_names() const;
  Result<> check_shapes() const;

  std::string directory_;
  ModelConfig config_;
  GenerationDefaults defaults_;
  bool dummy_ = false;
  std::vector<std::string> files_;
  std::map<std::string, TensorEntry, std::less<>> tensors_;
};

}  // namespace fathom
