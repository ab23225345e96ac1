#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "base/json.h"
#include "base/log.h"
#include "base/math.h"
#include "checkpoint/four_bit_layout.h"
#include "checkpoint/four_bit_tensors.h"
#include "checkpoint/hub_cache.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_index.h"
#include "checkpoint/tensor_names.h"
#include "checkpoint/weight_names.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

// A large model's config.json has 2 KB, more with a long list of unquantized layers.
constexpr int64_t kMaxConfigBytes = 16 << 20;
// The index of DeepSeek-V3 has 9 MB.
constexpr int64_t kMaxIndexBytes = 256 << 20;
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// The error for a directory without safetensors, depending on what it contains instead.
Status no_weights(const std::string& directory) {
  std::set<std::string> names;
  std::error_code failure;
  for (fs::directory_iterator it(directory, failure), end; !failure && it != end;
       it.increment(failure)) {
    names.insert(it->path().filename().string());
  }
  for (const std::string& name : names) {
    const std::string extension = fs::path(name).extension().string();
    if (extension == ".gguf") {
      return {Code::kInvalidArgument,
              fmt::format("{}/{}: GGUF is another engine's format; Fathom reads the original "
                          "safetensors checkpoint",
                          directory, name)};
    }
    if (extension == ".bin" || extension == ".pt" || extension == ".pth") {
      return {Code::kInvalidArgument,
              fmt::format("{}/{}: a pickled checkpoint can run code when it is read, so Fathom "
                          "reads safetensors only; convert it or take a safetensors revision",
                          directory, name)};
    }
    if (extension == ".safetensors") {
      return {Code::kNotFound, fmt::format("{}: there is {} but neither {} nor {} (incomplete "
                                           "download?)",
                                           directory, name, kSingle, kIndex)};
    }
  }
  return {Code::kNotFound,
          fmt::format("{}: neither {} nor {} is there", directory, kSingle, kIndex)};
}

bool exists(const std::string& path) {
  std::error_code failure;
  // A dangling or circular link exists; opening it gives the precise error.
  return fs::exists(fs::symlink_status(path, failure));
}

}  // namespace

bool TensorEntry::has_shape(const std::vector<int64_t>& wanted) const {
  if (shape == wanted || (shape.empty() && wanted == std::vector<int64_t>{1})) return true;
  return wanted.size() == 1 && shape.size() == 2 && shape[0] == 1 && shape[1] == wanted[0];
}

const TensorEntry* Checkpoint::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

bool Checkpoint::has_weight(std::string_view name) const {
  if (find(name) != nullptr) return true;
  constexpr std::string_view kWeight = ".weight";
  if (!config_.quantization.is_four_bit() || !name.ends_with(kWeight)) return false;
  name.remove_suffix(kWeight.size());
  return find(std::string(name) + std::string(four_bit_codes_suffix(config_.quantization))) !=
         nullptr;
}

const std::string& Checkpoint::file_of(const TensorEntry& entry) const {
  return dummy_ ? directory_ : files_[static_cast<size_t>(entry.file)];
}

Result<> Checkpoint::read_configs(const std::string& model) {
  FATHOM_TRY(directory_, resolve_model(model));
  const std::string path = directory_ + "/config.json";
  FATHOM_TRY(const std::string text, read_text_file(path, kMaxConfigBytes));
  FATHOM_TRY(config_, parse_model_config(text, path));
  const std::string defaults_path = directory_ + "/generation_config.json";
  if (exists(defaults_path)) {
    FATHOM_TRY(const std::string defaults, read_text_file(defaults_path, kMaxConfigBytes));
    FATHOM_TRY(defaults_, parse_generation_config(defaults, defaults_path, config_.vocab_size));
  }
  if (defaults_.eos_ids.empty()) defaults_.eos_ids = config_.eos_ids;
  return {};
}

Result<> Checkpoint::read_shard(const std::string& name) {
  const std::string path = directory_ + "/" + name;
  FATHOM_TRY(SafetensorsFile shard, read_safetensors_file(path));
  const int file = static_cast<int>(files_.size());
  files_.push_back(path);
  while (!shard.tensors.empty()) {
    auto node = shard.tensors.extract(shard.tensors.begin());
    SafetensorsEntry& entry = node.mapped();
    TensorEntry stored{entry.dtype, std::move(entry.shape), file, shard.data_offset + entry.begin,
                       entry.end - entry.begin};
    const auto [place, added] = tensors_.try_emplace(without_prefix(node.key()), std::move(stored));
    if (!added) {
      return invalid("{}: tensor {:?} is also in {}", path, place->first, file_of(place->second));
    }
  }
  return {};
}

Result<> Checkpoint::read_shards() {
  if (exists(directory_ + "/" + kSingle)) return read_shard(kSingle);
  const std::string index_path = directory_ + "/" + kIndex;
  if (!exists(index_path)) return tl::unexpected<Status>(no_weights(directory_));
  FATHOM_TRY(const std::string text, read_text_file(index_path, kMaxIndexBytes));
  FATHOM_TRY(const SafetensorsIndex index, parse_safetensors_index(text, index_path));
  std::set<std::string_view> shards;
  for (const auto& [tensor, shard] : index) shards.insert(shard);
  for (const std::string_view shard : shards) {
    if (!exists(fmt::format("{}/{}", directory_, shard))) {
      return not_found("{}: names the shard {:?}, which is not there (incomplete download?)",
                       index_path, shard);
    }
  }
  for (const std::string_view shard : shards) {
    FATHOM_RETURN_IF_ERROR(read_shard(std::string(shard)));
  }
  // Each tensor must be exactly where the index says. This detects a mixture of two downloads.
  std::set<std::string> indexed;
  for (const auto& [stored_name, shard] : index) {
    const std::string name = without_prefix(stored_name);
    indexed.insert(name);
    const TensorEntry* entry = find(name);
    if (entry == nullptr) {
      return invalid("{}: tensor {:?} is said to be in {}, which does not hold it", index_path,
                     name, shard);
    }
    const std::string& path = file_of(*entry);
    if (fs::path(path).filename() != shard) {
      return invalid("{}: tensor {:?} is said to be in {}, it is in {}", index_path, name, shard,
                     path);
    }
  }
  if (indexed.size() != tensors_.size()) {
    for (const auto& [name, entry] : tensors_) {
      if (!indexed.contains(name)) {
        return invalid("{}: tensor {:?} is not in the index {}", file_of(entry), name, kIndex);
      }
    }
  }
  return {};
}

std::optional<std::string> Checkpoint::missing_mtp_tensor() const {
  const std::string prefix = fmt::format("{}{}.", tensor_names::kLayers, config_.num_layers);
  std::optional<std::string> missing;
  WeightNames(config_).for_each_weight([&](const PublishedTensor& tensor) {
    if (tensor.group != WeightGroup::kMtp || has_weight(tensor.name)) return true;
    if (tensor.name == prefix + std::string(tensor_names::kMtpEmbedding) ||
        tensor.name == prefix + std::string(tensor_names::kMtpHead) ||
        !tensor.name.starts_with(prefix)) {
      return true;
    }
    missing = tensor.name;
    return false;
  });
  return missing;
}

Result<> Checkpoint::check_names() const {
  const WeightNames names(config_);
  // Some files have the embedding once more where it is the head, too.
  const auto is_copied_head = [&](std::string_view name) {
    return config_.tied_embeddings && name == tensor_names::kHead;
  };
  std::string missing, missing_mtp;
  // Which scales must exist depends on each weight's stored type; the loader checks it.
  names.for_each_weight([&](const PublishedTensor& tensor) {
    if (has_weight(tensor.name)) return true;
    if (tensor.group == WeightGroup::kMtp) {
      missing_mtp = tensor.name;  // MTP tensors come last, so nothing else can be missing
      return false;
    }
    missing = tensor.name;
    return false;
  });
  if (!missing.empty()) {
    return invalid("{}: tensor {:?}, which config.json calls for, is in none of the {} file(s)",
                   directory_, missing, files_.size());
  }
  if (!missing_mtp.empty()) {
    log_warning("{}: tensor {:?} is missing: there is no multi-token prediction with this model",
                directory_, missing_mtp);
  }
  int64_t unexpected = 0;
  std::string first;
  for (const auto& [name, entry] : tensors_) {
    if (is_ignored_tensor(name) || names.classify(name) || is_copied_head(name)) continue;
    if (name.ends_with("_proj.bias") || name.ends_with("_proj_with_mqa.bias")) {
      return invalid(
          "{}: tensor {:?} is a bias that config.json does not call for (attention_bias)",
          directory_, name);
    }
    if (++unexpected == 1) first = name;
  }
  if (unexpected > 0 && !config_.is_known_type) {
    return invalid(
        "{}: config.json does not call for tensor {:?}; model_type {:?} is not known, and what it "
        "does with {} such tensors neither",
        directory_, first, config_.model_type.substr(0, 60), unexpected);
  }
  if (unexpected > 0) {
    log_warning("{}: {} tensors that config.json does not call for are not used, such as {:?}",
                directory_, unexpected, first);
  }
  return {};
}

// Checks shapes before anything is planned or allocated from the sizes in config.json: they are
// credible only if the weights have them too. The loader checks the shapes of scales, which depend
// on the stored form.
Result<> Checkpoint::check_shapes() const {
  Result<> checked;
  WeightNames(config_).for_each_weight([&](const PublishedTensor& tensor) {
    if (tensor.group == WeightGroup::kMtp) return true;
    if (tensor.shape.size() == 2) {
      const auto four_bit = find_four_bit(*this, tensor.name, tensor.shape[0], tensor.shape[1]);
      if (!four_bit) checked = tl::unexpected<Status>(four_bit.error());
      if (!four_bit || *four_bit) return checked.has_value();
    }
    const TensorEntry* entry = find(tensor.name);
    if (entry == nullptr || entry->has_shape(tensor.shape)) return true;
    checked = invalid("{}: tensor {:?} has shape [{}], config.json calls for [{}]", file_of(*entry),
                      tensor.name, fmt::join(entry->shape, ", "), fmt::join(tensor.shape, ", "));
    return false;
  });
  return checked;
}

Result<Checkpoint> Checkpoint::open(const std::string& model) {
  Checkpoint checkpoint;
  FATHOM_RETURN_IF_ERROR(checkpoint.read_configs(model));
  FATHOM_RETURN_IF_ERROR(checkpoint.read_shards());
  FATHOM_RETURN_IF_ERROR(checkpoint.check_names());
  FATHOM_RETURN_IF_ERROR(checkpoint.check_shapes());
  return checkpoint;
}

Result<Checkpoint> Checkpoint::open_dummy(const std::string& model,
                                          std::optional<int64_t> num_layers) {
  Checkpoint checkpoint;
  checkpoint.dummy_ = true;
  FATHOM_RETURN_IF_ERROR(checkpoint.read_configs(model));
  if (num_layers) {
    ModelConfig& config = checkpoint.config_;
    if (*num_layers < 1 || *num_layers > config.num_layers) {
      return invalid("--num-hidden-layers is {}, {} has {}", *num_layers, checkpoint.directory_,
                     config.num_layers);
    }
    config.num_layers = *num_layers;
    config.first_dense_layers = std::min(config.first_dense_layers, *num_layers);
    config.num_mtp_layers = 0;
  }
  for (const std::string& ignored : checkpoint.config_.quantization.ignored) {
    if (ignored.starts_with("re:")) {
      return invalid(
          "{}/config.json: quantization_config ignores {:?}; dummy weights need plain "
          "names there",
          checkpoint.directory_, ignored);
    }
  }
  std::string too_large;
  WeightNames(checkpoint.config_).for_each([&](const PublishedTensor& tensor) {
    int64_t bytes = size_of(tensor.dtype);
    for (const int64_t size : tensor.shape) {
      const auto product = checked_mul(bytes, size);
      if (!product) {
        too_large = tensor.name;
        return false;
      }
      bytes = *product;
    }
    checkpoint.tensors_[tensor.name] = {tensor.dtype, tensor.shape, 0, 0, bytes};
    return true;
  });
  if (!too_large.empty()) {
    return invalid("{}/config.json: the size of {:?} exceeds 64 bits", checkpoint.directory_,
                   too_large);
  }
  return checkpoint;
}

}  // namespace fathom
