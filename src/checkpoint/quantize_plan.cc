#include "checkpoint/quantize_plan.h"

#include <algorithm>
#include <filesystem>
#include <map>

#include "base/json.h"
#include "base/math.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/weight_names.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

using NamedTensor = std::pair<const std::string, TensorEntry>;

bool can_be_quantized(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

Result<> refuse_quantized_source(const Checkpoint& checkpoint) {
  const QuantizationConfig& quantization = checkpoint.config().quantization;
  const std::string config = checkpoint.directory() + "/config.json";
  switch (quantization.kind) {
    case QuantizationConfig::Kind::kNone:
      return {};
    case QuantizationConfig::Kind::kFp8Block:
      return invalid("{}: the model is quantised already, to FP8 with scales by blocks of {}x{}",
                     config, quantization.block_rows, quantization.block_cols);
    case QuantizationConfig::Kind::kFp8Tensor:
      return invalid("{}: the model is quantised already, to FP8 with one scale a tensor", config);
    case QuantizationConfig::Kind::kFp8Row:
      return invalid("{}: the model is quantised already, to FP8 with one scale a row", config);
    default:
      return invalid("{}: the model is quantised already, to four bits", config);
  }
  return {};
}

std::vector<WrittenTensor> written_tensors(const QuantizeFormat& format,
                                           const PlannedTensor& tensor) {
  return written_tensors(format, tensor.name, tensor.source->shape[0], tensor.source->shape[1]);
}

int64_t written_bytes(const QuantizeFormat& format, const PlannedTensor& tensor) {
  if (!tensor.quantize) return tensor.source->bytes;
  int64_t bytes = 0;
  for (const WrittenTensor& written : written_tensors(format, tensor)) bytes += written.bytes;
  return bytes;
}

Result<PlannedTensor> plan_tensor(const Checkpoint& checkpoint, const QuantizeFormat& format,
                                  const WeightNames& names, const NamedTensor& named) {
  const auto& [name, entry] = named;
  PlannedTensor tensor{name, &entry, is_quantized_by(format, names, name)};
  if (!tensor.quantize) return tensor;
  if (!can_be_quantized(entry.dtype)) {
    return invalid("{}: tensor {:?} is stored as {}; f32, bf16 and f16 can be quantised",
                   checkpoint.file_of(entry), name, name_of(entry.dtype));
  }
  if (entry.shape.size() != 2 || entry.bytes == 0) {
    return invalid("{}: tensor {:?} has shape [{}], expected a matrix", checkpoint.file_of(entry),
                   name, fmt::join(entry.shape, ", "));
  }
  if (format.is_four_bit() && entry.shape[1] % format.group_cols != 0) {
    return invalid("{}: tensor {:?} has {} columns, which are not whole groups of {} ({})",
                   checkpoint.file_of(entry), name, entry.shape[1], format.group_cols,
                   name_of(format));
  }
  for (const WrittenTensor& written : written_tensors(format, tensor)) {
    if (written.name == name || checkpoint.find(written.name) == nullptr) continue;
    return invalid("{}: there is a tensor {:?} for a weight that is stored as {}",
                   checkpoint.directory(), written.name, name_of(entry.dtype));
  }
  return tensor;
}

// Computes a shard's offsets and header. Tensors of wider types come first, then by name, as in the
// reference library, so that each is aligned to its type.
void lay_out(const QuantizeFormat& format, PlannedShard& shard) {
  struct Part {
    std::string name;
    DType dtype;
    std::vector<int64_t> shape;
    int64_t bytes;
    int64_t* offset;
  };
  std::vector<Part> parts;
  for (PlannedTensor& tensor : shard.tensors) {
    const TensorEntry& source = *tensor.source;
    shard.source_bytes += source.bytes;
    if (tensor.quantize) {
      for (WrittenTensor& written : written_tensors(format, tensor)) {
        int64_t* const offset = written.role == WrittenTensor::Role::kValues ? &tensor.offset
                                : written.role == WrittenTensor::Role::kScales
                                    ? &tensor.scales_offset
                                    : &tensor.shape_offset;
        parts.push_back({std::move(written.name), written.dtype, std::move(written.shape),
                         written.bytes, offset});
      }
    } else {
      parts.push_back({tensor.name, source.dtype, source.shape, source.bytes, &tensor.offset});
    }
  }
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
    const int64_t width_a = size_of(a.dtype), width_b = size_of(b.dtype);
    return width_a != width_b ? width_a > width_b : a.name < b.name;
  });
  SafetensorsHeader header;
  int64_t end = 0;
  for (Part& part : parts) {
    *part.offset = end;
    end += part.bytes;
    header[part.name] = {part.dtype, std::move(part.shape), *part.offset, end};
  }
  shard.head = safetensors_head(header);
  const auto head_bytes = static_cast<int64_t>(shard.head.size());
  for (Part& part : parts) *part.offset += head_bytes;
  shard.bytes = head_bytes + end;
}

// Fills each shard with consecutive tensors until the next does not fit.
std::vector<PlannedShard> cut_shards(const QuantizeFormat& format,
                                     std::vector<PlannedTensor> tensors, int64_t max_bytes) {
  std::vector<PlannedShard> shards;
  int64_t bytes = 0;
  for (PlannedTensor& tensor : tensors) {
    const int64_t more = written_bytes(format, tensor);
    if (shards.empty() || bytes + more > max_bytes) {
      shards.emplace_back();
      bytes = 0;
    }
    bytes += more;
    shards.back().tensors.push_back(std::move(tensor));
  }
  const size_t count = shards.size();
  for (size_t i = 0; i < count; ++i) {
    shards[i].name = count == 1 ? "model.safetensors"
                                : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, count);
  }
  return shards;
}

std::vector<PlannedShard> mirror_shards(const Checkpoint& checkpoint,
                                        std::vector<PlannedTensor> tensors) {
  std::vector<PlannedShard> shards;
  for (const std::string& path : checkpoint.files()) {
    shards.emplace_back().name = fs::path(path).filename().string();
  }
  for (PlannedTensor& tensor : tensors) {
    shards[static_cast<size_t>(tensor.source->file)].tensors.push_back(std::move(tensor));
  }
  return shards;
}

// model.safetensors.index.json in the layout of published ones.
std::string index_text(const QuantizeFormat& format, const std::vector<PlannedShard>& shards) {
  std::map<std::string, std::string_view> places;
  int64_t total = 0;
  for (const PlannedShard& shard : shards) {
    total += shard.bytes - static_cast<int64_t>(shard.head.size());
    for (const PlannedTensor& tensor : shard.tensors) {
      if (!tensor.quantize) {
        places[tensor.name] = shard.name;
        continue;
      }
      for (const WrittenTensor& written : written_tensors(format, tensor)) {
        places[written.name] = shard.name;
      }
    }
  }
  std::string text = fmt::format(
      "{{\n  \"metadata\": {{\n    \"total_size\": {}\n  }},\n  \"weight_map\": {{\n", total);
  size_t left = places.size();
  for (const auto& [tensor, shard] : places) {
    text += fmt::format("    {}: {}{}\n", json::serialize(json::string(tensor)),
                        json::serialize(json::string(shard)), --left > 0 ? "," : "");
  }
  return text + "  }\n}\n";
}

}  // namespace

Result<QuantizePlan> plan_quantize(const Checkpoint& checkpoint, const QuantizeFormat& format,
                                   int64_t max_shard_bytes) {
  FATHOM_RETURN_IF_ERROR(refuse_quantized_source(checkpoint));
  const WeightNames names(checkpoint.config());
  QuantizePlan plan;
  std::vector<PlannedTensor> tensors;
  for (const NamedTensor& named : checkpoint.tensors()) {
    FATHOM_TRY(PlannedTensor tensor, plan_tensor(checkpoint, format, names, named));
    plan.quantized += tensor.quantize ? 1 : 0;
    tensors.push_back(std::move(tensor));
  }
  if (plan.quantized == 0) {
    return invalid("{}: has none of the weights that {} quantizes{}", checkpoint.directory(),
                   name_of(format), format.is_four_bit() ? ": it has no routed experts" : "");
  }
  std::sort(tensors.begin(), tensors.end(), [](const PlannedTensor& a, const PlannedTensor& b) {
    return std::pair(a.source->file, a.source->offset) <
           std::pair(b.source->file, b.source->offset);
  });
  plan.shards = max_shard_bytes > 0 ? cut_shards(format, std::move(tensors), max_shard_bytes)
                                    : mirror_shards(checkpoint, std::move(tensors));
  for (PlannedShard& shard : plan.shards) {
    lay_out(format, shard);
    plan.bytes += shard.bytes;
  }
  const bool single = plan.shards.size() == 1 && plan.shards[0].name == "model.safetensors";
  if (!single) plan.index = index_text(format, plan.shards);
  return plan;
}

Result<std::string> quantized_config(std::string_view config, const QuantizeFormat& format,
                                     std::string_view source) {
  FATHOM_TRY(const json::value parsed, parse_json(config, source));
  const json::object* object = parsed.if_object();
  if (object == nullptr || object->empty()) {
    return invalid("{}: expected an object with fields", source);
  }
  for (const char* key : {"quantization_config", "compression_config"}) {
    if (const json::value* value = object->if_contains(key)) {
      return invalid("{}: {} is there already, with {}", source, key, brief(*value));
    }
  }
  // Inserted before the last brace, so that all other bytes are unchanged.
  const size_t brace = config.rfind('}');
  const size_t last = config.find_last_not_of(" \t\r\n", brace - 1);
  std::string text(config.substr(0, last + 1));
  return text + quantization_config_text(format);
}

}  // namespace fathom
