#include "convert/convert_checkpoint.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <optional>
#include <thread>

#include "base/json.h"
#include "base/log.h"
#include "base/progress.h"
#include "checkpoint/file_reader.h"
#include "checkpoint/file_writer.h"
#include "checkpoint/load_plan.h"
#include "checkpoint/output_directory.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/tensor_names.h"
#include "convert/attention_weights.h"

namespace fathom::mla {
namespace {

namespace fs = std::filesystem;
using namespace tensor_names;

constexpr int kMostLayersAtOnce = 4;
constexpr int64_t kCopiedBytes = 16 << 20;
constexpr int64_t kMaxConfigBytes = 16 << 20;
constexpr int64_t kMaxReportBytes = 1 << 10;

// A tensor of a new shard: copied from the source, or made here.
struct NewTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  const TensorEntry* source = nullptr;  // copied
  std::string data;                     // otherwise, once it has been made
};

struct NewShard {
  std::string file;
  std::vector<NewTensor> tensors;
  int64_t layer = -1;  // -1: what is outside the layers
};

int64_t bytes_of(const NewTensor& tensor) {
  int64_t bytes = size_of(tensor.dtype);
  for (const int64_t size : tensor.shape) bytes *= size;
  return bytes;
}

// Where each tensor lies in a shard, and the bytes before them.
struct Layout {
  SafetensorsHeader header;
  std::string head;
  int64_t bytes = 0;
};

Layout lay_out(const NewShard& shard) {
  Layout layout;
  int64_t next = 0;
  for (const NewTensor& tensor : shard.tensors) {
    layout.header[tensor.name] = {tensor.dtype, tensor.shape, next, next + bytes_of(tensor)};
    next += bytes_of(tensor);
  }
  layout.head = safetensors_head(layout.header);
  layout.bytes = static_cast<int64_t>(layout.head.size()) + next;
  return layout;
}

std::string layer_prefix(int64_t layer) { return fmt::format("{}{}.", kLayers, layer); }

bool is_converted(std::string_view name) {
  constexpr std::string_view kConverted[] = {kQ, kK, kV, kQBias, kKBias, kVBias};
  return std::any_of(std::begin(kConverted), std::end(kConverted),
                     [&](std::string_view suffix) { return name.ends_with(suffix); });
}

// All shards with their tensors' names and shapes: what is outside the layers, then one a layer.
std::vector<NewShard> plan_shards(const Checkpoint& checkpoint, const MlaShape& shape) {
  const ModelConfig& config = checkpoint.config();
  const int64_t count = config.num_layers + 1;
  std::vector<NewShard> shards(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    NewShard& shard = shards[static_cast<size_t>(i)];
    shard.file = fmt::format("model-{:05d}-of-{:05d}.safetensors", i + 1, count);
    shard.layer = i - 1;
  }
  for (const auto& [name, entry] : checkpoint.tensors()) {
    if (is_converted(name)) continue;
    int64_t layer = -1;
    if (name.starts_with(kLayers)) {
      const char* first = name.data() + kLayers.size();
      std::from_chars(first, name.data() + name.size(), layer);
    }
    if (layer >= config.num_layers) continue;
    shards[static_cast<size_t>(layer + 1)].tensors.push_back(
        {name, entry.dtype, entry.shape, &entry, {}});
  }
  const int64_t wide = shape.head_dim + shape.rope_dim, row = shape.rank + shape.rope_dim;
  for (NewShard& shard : shards) {
    if (shard.layer < 0) continue;
    const std::string prefix = layer_prefix(shard.layer);
    const auto add = [&](std::string_view name, std::string_view like, std::vector<int64_t> sizes) {
      const DType dtype = checkpoint.find(prefix + std::string(like))->dtype;
      shard.tensors.push_back(
          {prefix + std::string(name), dtype, std::move(sizes), nullptr, std::string()});
    };
    add(kQ, kQ, {shape.heads * wide, config.hidden});
    add(kKvA, kK, {row, config.hidden});
    add(kKvB, kV, {shape.heads * 2 * shape.head_dim, shape.rank});
    if (!config.has_qkv_bias) continue;
    add(kQBias, kQBias, {shape.heads * wide});
    add(kKvABias, kKBias, {row});
  }
  return shards;
}

// Reads a layer's projections in double precision, and its input norm.
struct LayerSource {
  GqaAttention attention;
  Vector input_norm;
};

Result<LayerSource> read_layer(const Checkpoint& checkpoint, int64_t layer, int num_threads) {
  const ModelConfig& config = checkpoint.config();
  const std::string prefix = layer_prefix(layer);
  LayerSource source;
  std::vector<TensorRequest> requests;
  const auto checked = [&checkpoint](const std::string& name, bool finite) -> Result<> {
    if (finite) return {};
    return invalid("{}: tensor {:?} has a value that is no finite number",
                   checkpoint.file_of(*checkpoint.find(name)), name);
  };
  const auto matrix = [&](std::string_view name, int64_t rows, Matrix* out) {
    out->resize(rows, config.hidden);
    requests.push_back({.name = prefix + std::string(name),
                        .shape = {rows, config.hidden},
                        .place = [out, checked, full = prefix + std::string(name)](
                                     const ScaledMatrix& stored) -> Result<> {
                          for (int64_t r = 0; r < stored.rows(); ++r) {
                            for (int64_t c = 0; c < stored.cols(); ++c) {
                              (*out)(r, c) = stored.at(r, c);
                            }
                          }
                          return checked(full, out->allFinite());
                        }});
  };
  const auto vector = [&](std::string_view name, int64_t size, Vector* out) {
    out->resize(size);
    requests.push_back({.name = prefix + std::string(name),
                        .shape = {size},
                        .place = [out, checked, full = prefix + std::string(name)](
                                     const ScaledMatrix& stored) -> Result<> {
                          for (int64_t i = 0; i < stored.cols(); ++i) (*out)[i] = stored.at(0, i);
                          return checked(full, out->allFinite());
                        }});
  };
  const int64_t queries = config.num_heads * config.gqa->head_dim, keys = config.kv_lora_rank;
  matrix(kQ, queries, &source.attention.q);
  matrix(kK, keys, &source.attention.k);
  matrix(kV, keys, &source.attention.v);
  vector(kInputNorm, config.hidden, &source.input_norm);
  if (config.has_qkv_bias) {
    vector(kQBias, queries, &source.attention.q_bias);
    vector(kKBias, keys, &source.attention.k_bias);
    vector(kVBias, keys, &source.attention.v_bias);
  }
  LoadOptions options;
  options.show_progress = false;
  options.num_threads = num_threads;
  FATHOM_RETURN_IF_ERROR(load_tensors(checkpoint, requests, options));
  return source;
}

// Values as the tensor stores them.
template <typename Values>
std::string stored(const Values& values, DType dtype) {
  std::string data(static_cast<size_t>(values.size() * size_of(dtype)), '\0');
  for (Eigen::Index i = 0; i < values.size(); ++i) {
    const auto value = static_cast<float>(values.data()[i]);
    char* to = data.data() + i * size_of(dtype);
    if (dtype == DType::kF32) {
      std::memcpy(to, &value, sizeof value);
    } else if (dtype == DType::kBF16) {
      const bf16 rounded = to_bf16(value);
      std::memcpy(to, &rounded, sizeof rounded);
    } else {
      const f16 rounded = to_f16(value);
      std::memcpy(to, &rounded, sizeof rounded);
    }
  }
  return data;
}

// model.safetensors.index.json in the layout of published ones.
std::string index_text(const std::vector<NewShard>& shards) {
  json::object places;
  int64_t total = 0;
  for (const NewShard& shard : shards) {
    for (const NewTensor& tensor : shard.tensors) {
      places[tensor.name] = shard.file;
      total += bytes_of(tensor);
    }
  }
  return json::serialize(
             json::object{{"metadata", {{"total_size", total}}}, {"weight_map", places}}) +
         "\n";
}

// Converts and writes layers, several at once; the first error stops all of them.
class LayerWork {
 public:
  LayerWork(const Checkpoint& checkpoint, const MlaShape& shape, std::span<const Matrix> moments,
            const OutputDirectory& output, Progress* progress)
      : checkpoint_(checkpoint),
        shape_(shape),
        moments_(moments),
        output_(output),
        progress_(progress) {}

  Result<> open_sources() {
    for (const std::string& path : checkpoint_.files()) {
      FATHOM_TRY(FileReader file, FileReader::open(path));
      sources_.push_back(std::move(file));
    }
    return {};
  }

  // Shards without an entry in `reports` are made; their reports are filled in.
  Result<> run(std::vector<NewShard>& shards, std::vector<std::optional<LayerReport>>& reports,
               int num_threads) {
    std::vector<std::jthread> threads;
    const auto work = [&] { make_shards(shards, reports, num_threads > 1 ? 1 : 0); };
    for (int i = 1; i < num_threads; ++i) threads.emplace_back(work);
    work();
    threads.clear();  // joins them
    if (failure_) return tl::unexpected<Status>(*failure_);
    return {};
  }

 private:
  void make_shards(std::vector<NewShard>& shards, std::vector<std::optional<LayerReport>>& reports,
                   int load_threads) {
    while (!stop_) {
      const size_t index = next_++;
      if (index >= shards.size()) return;
      if (reports[index]) continue;
      const auto report = make(shards[index], load_threads);
      if (!report) {
        stop_ = true;
        const std::scoped_lock lock(failing_);
        if (!failure_) failure_ = report.error();
        return;
      }
      reports[index] = *report;
      if (progress_ != nullptr) progress_->add(1);
    }
  }

  Result<LayerReport> make(NewShard& shard, int load_threads) {
    LayerReport report;
    if (shard.layer >= 0) {
      FATHOM_TRY(report, convert_layer(shard, load_threads));
    }
    const Layout layout = lay_out(shard);
    FATHOM_TRY(FileWriter file, FileWriter::create(output_.path(shard.file), layout.bytes));
    const auto head = static_cast<int64_t>(layout.head.size());
    FATHOM_RETURN_IF_ERROR(file.write(layout.head.data(), head, 0));
    for (NewTensor& tensor : shard.tensors) {
      const int64_t offset = head + layout.header.at(tensor.name).begin;
      if (tensor.source != nullptr) {
        FATHOM_RETURN_IF_ERROR(copy(tensor, file, offset));
      } else {
        FATHOM_RETURN_IF_ERROR(file.write(tensor.data.data(), std::ssize(tensor.data), offset));
        tensor.data = std::string();
      }
    }
    FATHOM_RETURN_IF_ERROR(file.finish());
    return report;
  }

  Result<LayerReport> convert_layer(NewShard& shard, int load_threads) {
    FATHOM_TRY(const LayerSource source, read_layer(checkpoint_, shard.layer, load_threads));
    const MlaBasis basis = make_basis(
        shape_, moments_.empty() ? moments_of_weights(source.attention, source.input_norm)
                                 : moments_[static_cast<size_t>(shard.layer)]);
    const MlaAttention made = convert_attention(shape_, basis, source.attention);
    const std::string prefix = layer_prefix(shard.layer);
    for (NewTensor& tensor : shard.tensors) {
      const std::string_view name = std::string_view(tensor.name).substr(prefix.size());
      if (name == kQ) tensor.data = stored(made.q, tensor.dtype);
      if (name == kKvA) tensor.data = stored(made.kv_a, tensor.dtype);
      if (name == kKvB) tensor.data = stored(made.kv_b, tensor.dtype);
      if (name == kQBias) tensor.data = stored(made.q_bias, tensor.dtype);
      if (name == kKvABias) tensor.data = stored(made.kv_a_bias, tensor.dtype);
    }
    const LayerReport report{basis.rope_energy, basis.latent_energy};
    FATHOM_RETURN_IF_ERROR(
        write_whole_file(output_.path(report_name(shard.layer)),
                         fmt::format("{} {}\n", report.rope_energy, report.latent_energy)));
    return report;
  }

  Result<> copy(const NewTensor& tensor, const FileWriter& file, int64_t offset) const {
    const TensorEntry& source = *tensor.source;
    std::vector<std::byte> piece(static_cast<size_t>(std::min(kCopiedBytes, source.bytes)));
    for (int64_t done = 0; done < source.bytes; done += kCopiedBytes) {
      const int64_t bytes = std::min(kCopiedBytes, source.bytes - done);
      const FileReader& from = sources_[static_cast<size_t>(source.file)];
      FATHOM_RETURN_IF_ERROR(from.read(piece.data(), bytes, source.offset + done));
      FATHOM_RETURN_IF_ERROR(file.write(piece.data(), bytes, offset + done));
    }
    return {};
  }

 public:
  // A finished layer's report, until the run has ended.
  static std::string report_name(int64_t layer) { return fmt::format(".layer-{}", layer); }

 private:
  const Checkpoint& checkpoint_;
  const MlaShape& shape_;
  const std::span<const Matrix> moments_;
  const OutputDirectory& output_;
  Progress* const progress_;
  std::vector<FileReader> sources_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stop_{false};
  std::mutex failing_;
  std::optional<Status> failure_;
};

// The report of a shard that an earlier run has completed: its size and header match, and a layer's
// report is there. A shard gets its name only after its bytes are on disk.
std::optional<LayerReport> finished(const NewShard& shard, const OutputDirectory& output) {
  const std::string path = output.path(shard.file);
  std::error_code failure;
  if (!fs::exists(path, failure)) return std::nullopt;
  const Layout layout = lay_out(shard);
  const auto file = FileReader::open(path);
  std::string head(layout.head.size(), '\0');
  if (!file || file->size() != layout.bytes || !file->read(head.data(), std::ssize(head), 0) ||
      head != layout.head) {
    log_warning("{}: is not what this run writes there; it is written anew", path);
    return std::nullopt;
  }
  LayerReport report;
  if (shard.layer < 0) return report;
  const auto text =
      read_text_file(output.path(LayerWork::report_name(shard.layer)), kMaxReportBytes);
  if (!text) return std::nullopt;
  const char* const end = text->data() + text->size();
  const auto first = std::from_chars(text->data(), end, report.rope_energy);
  if (first.ec != std::errc() || first.ptr == end) return std::nullopt;
  const auto second = std::from_chars(first.ptr + 1, end, report.latent_energy);
  return second.ec == std::errc() ? std::optional(report) : std::nullopt;
}

Result<std::string> convert_record(const Checkpoint& checkpoint, const MlaShape& shape,
                                   const ConvertOptions& options) {
  std::string text = fmt::format(
      "fathom convert, form 1\nrank {}\nrope-dim {}\nfreqfold {}\ncalibration {}\n", shape.rank,
      shape.rope_dim, shape.fold, options.calibration.empty() ? "none\n" : options.calibration);
  std::vector<std::string> paths = checkpoint.files();
  paths.insert(paths.begin(), checkpoint.directory() + "/config.json");
  for (const std::string& path : paths) {
    FATHOM_TRY(const std::string line, describe_file(path));
    text += line;
  }
  return text;
}

}  // namespace

Result<std::string> converted_config(std::string_view config, const ModelConfig& source,
                                     const MlaShape& shape, std::string_view name) {
  FATHOM_TRY(json::value parsed, parse_json(config, name));
  if (!parsed.is_object()) return invalid("{}: expected an object with fields", name);
  json::object& object = parsed.get_object();
  for (const char* field :
       {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "auto_map"}) {
    object.erase(field);
  }
  object["architectures"] = json::array{"DeepseekV3ForCausalLM"};
  object["model_type"] = "deepseek_v3";
  object["num_key_value_heads"] = shape.heads;
  object["q_lora_rank"] = nullptr;
  object["kv_lora_rank"] = shape.rank;
  object["qk_nope_head_dim"] = shape.head_dim;
  object["v_head_dim"] = shape.head_dim;
  object["qk_rope_head_dim"] = shape.rope_dim;
  object["head_dim"] = shape.rope_dim;
  if (shape.rope_heads() > 1) object["qk_rope_heads"] = shape.rope_heads();
  object["qk_latent_layernorm"] = false;
  object["attention_bias"] = source.has_qkv_bias;
  object["rope_interleave"] = true;
  object["first_k_dense_replace"] = source.num_layers;  // no layer has experts
  return json::serialize(parsed) + "\n";
}

Result<ConvertSummary> convert_checkpoint(const Checkpoint& checkpoint, const MlaShape& shape,
                                          std::span<const Matrix> moments,
                                          const ConvertOptions& options) {
  const std::string config_path = checkpoint.directory() + "/config.json";
  FATHOM_TRY(const std::string source_config, read_text_file(config_path, kMaxConfigBytes));
  FATHOM_TRY(const std::string config,
             converted_config(source_config, checkpoint.config(), shape, config_path));
  std::vector<NewShard> shards = plan_shards(checkpoint, shape);
  FATHOM_TRY(const std::string record, convert_record(checkpoint, shape, options));
  FATHOM_TRY(OutputDirectory output, OutputDirectory::open(options.output, "convert", record));

  ConvertSummary summary;
  std::vector<std::optional<LayerReport>> reports;
  for (const NewShard& shard : shards) {
    reports.push_back(finished(shard, output));
    summary.kept += reports.back() && shard.layer >= 0 ? 1 : 0;
    for (const NewTensor& tensor : shard.tensors) summary.bytes += bytes_of(tensor);
  }
  for (const auto& [name, entry] : checkpoint.tensors()) summary.source_bytes += entry.bytes;
  {
    const int64_t left = std::count(reports.begin(), reports.end(), std::nullopt);
    std::optional<Progress> progress;
    if (options.show_progress) progress.emplace("Converting", left, Progress::Unit::kItems);
    LayerWork work(checkpoint, shape, moments, output, progress ? &*progress : nullptr);
    FATHOM_RETURN_IF_ERROR(work.open_sources());
    const auto cores = static_cast<int>(std::thread::hardware_concurrency());
    FATHOM_RETURN_IF_ERROR(work.run(
        shards, reports,
        options.num_threads > 0 ? options.num_threads : std::clamp(cores, 1, kMostLayersAtOnce)));
  }
  FATHOM_RETURN_IF_ERROR(
      write_whole_file(output.path("model.safetensors.index.json"), index_text(shards)));
  FATHOM_RETURN_IF_ERROR(copy_small_files(checkpoint, output));
  for (const NewShard& shard : shards) {
    if (shard.layer < 0) continue;
    summary.layers.push_back(*reports[static_cast<size_t>(shard.layer + 1)]);
    std::error_code ignored;
    fs::remove(output.path(LayerWork::report_name(shard.layer)), ignored);
  }
  FATHOM_RETURN_IF_ERROR(write_whole_file(output.path("config.json"), config));
  FATHOM_RETURN_IF_ERROR(output.finish());
  return summary;
}

}  // namespace fathom::mla
