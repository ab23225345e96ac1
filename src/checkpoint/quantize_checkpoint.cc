#include "checkpoint/quantize_checkpoint.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <optional>
#include <thread>

#include "base/json.h"
#include "base/log.h"
#include "base/math.h"
#include "base/progress.h"
#include "checkpoint/file_reader.h"
#include "checkpoint/file_writer.h"
#include "checkpoint/output_directory.h"
#include "checkpoint/quantize_plan.h"
#include "checkpoint/quantize_record.h"
#include "tensor/quantize_four_bit.h"
#include "tensor/quantize_weight.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

constexpr int kMinThreads = 4;  // some of them wait for the disk
constexpr int kMaxThreads = 32;
constexpr int64_t kMaxConfigBytes = 16 << 20;
constexpr const char* kConfig = "config.json";
constexpr const char* kIndex = "model.safetensors.index.json";

// A part of a tensor that one thread processes at once: bytes of a copied tensor, or rows of a
// quantized one, beginning at a multiple of 128.
struct Piece {
  const PlannedTensor* tensor = nullptr;
  int64_t begin = 0, count = 0;
};

std::vector<Piece> cut_pieces(const PlannedShard& shard, int64_t piece_bytes,
                              int64_t rows_together) {
  std::vector<Piece> pieces;
  for (const PlannedTensor& tensor : shard.tensors) {
    const TensorEntry& source = *tensor.source;
    int64_t total = source.bytes, step = piece_bytes;
    if (tensor.quantize) {
      total = source.shape[0];
      const int64_t row_bytes = source.bytes / total;
      step = std::max<int64_t>(piece_bytes / row_bytes / rows_together, 1) * rows_together;
    }
    for (int64_t begin = 0; begin < total; begin += step) {
      pieces.push_back({&tensor, begin, std::min(step, total - begin)});
    }
  }
  return pieces;
}

// Writes one shard with several threads; the first error stops all of them.
class ShardWork {
 public:
  ShardWork(const Checkpoint& checkpoint, const PlannedShard& shard, const QuantizeOptions& options,
            const std::vector<FileReader>& sources, const FileWriter& file, Progress* progress)
      : checkpoint_(checkpoint),
        format_(options.format),
        sources_(sources),
        file_(file),
        progress_(progress),
        // Groups of four bits lie in one row, blocks of FP8 in 128.
        pieces_(cut_pieces(shard, options.piece_bytes,
                           options.format.is_four_bit() ? 1 : kScaleBlock)) {}

  Result<> run(int num_threads) {
    const auto count = std::min<int64_t>(num_threads, static_cast<int64_t>(pieces_.size()));
    std::vector<std::jthread> threads;
    for (int64_t i = 1; i < count; ++i) threads.emplace_back([this] { work(); });
    work();
    threads.clear();  // joins them
    if (failure_) return tl::unexpected<Status>(*failure_);
    return {};
  }

 private:
  struct Slot {
    std::vector<std::byte> source;
    std::vector<e4m3> values;
    std::vector<float> scales;
    std::vector<uint8_t> codes;
  };

  void work() {
    Slot slot;
    while (!stop_) {
      const size_t index = next_++;
      if (index >= pieces_.size()) return;
      const Piece& piece = pieces_[index];
      const auto done = piece.tensor->quantize ? quantize(piece, slot) : copy(piece, slot);
      if (!done) {
        stop_ = true;
        const std::scoped_lock lock(failing_);
        if (!failure_) failure_ = done.error();
        return;
      }
    }
  }

  Result<> read(const Piece& piece, int64_t offset, int64_t bytes, Slot& slot) const {
    const TensorEntry& source = *piece.tensor->source;
    slot.source.resize(static_cast<size_t>(bytes));
    const FileReader& file = sources_[static_cast<size_t>(source.file)];
    if (const auto done = file.read(slot.source.data(), bytes, source.offset + offset); !done) {
      return with_context(fmt::format("tensor {:?}: ", piece.tensor->name), done.error());
    }
    return {};
  }

  Result<> write(const Piece& piece, const void* data, int64_t bytes, int64_t offset) const {
    const auto done = file_.write(data, bytes, offset);
    if (!done) return with_context(fmt::format("tensor {:?}: ", piece.tensor->name), done.error());
    return {};
  }

  Result<> copy(const Piece& piece, Slot& slot) const {
    FATHOM_RETURN_IF_ERROR(read(piece, piece.begin, piece.count, slot));
    FATHOM_RETURN_IF_ERROR(
        write(piece, slot.source.data(), piece.count, piece.tensor->offset + piece.begin));
    if (progress_ != nullptr) progress_->add(piece.count);
    return {};
  }

  Result<> quantize(const Piece& piece, Slot& slot) const {
    const PlannedTensor& tensor = *piece.tensor;
    const int64_t rows = piece.count, cols = tensor.source->shape[1];
    const int64_t row_bytes = cols * size_of(tensor.source->dtype);
    FATHOM_RETURN_IF_ERROR(read(piece, piece.begin * row_bytes, rows * row_bytes, slot));
    const int64_t grid_rows = ceil_div(rows, kScaleBlock), grid_cols = ceil_div(cols, kScaleBlock);
    const ConstTensorView weights(slot.source.data(), tensor.source->dtype, {rows, cols});
    if (format_.is_four_bit()) {
      FATHOM_RETURN_IF_ERROR(quantize_to_four_bits(piece, weights, slot));
      if (progress_ != nullptr) progress_->add(rows * row_bytes);
      return {};
    }
    slot.values.resize(static_cast<size_t>(rows * cols));
    slot.scales.resize(static_cast<size_t>(grid_rows * grid_cols));
    const auto done =
        quantize_weights(weights, format_.scale_form, TensorView(slot.values.data(), {rows, cols}),
                         TensorView(slot.scales.data(), {grid_rows, grid_cols}), piece.begin);
    if (!done) {
      return with_context(
          fmt::format("{}: tensor {:?} ", checkpoint_.file_of(*tensor.source), tensor.name),
          done.error());
    }
    FATHOM_RETURN_IF_ERROR(
        write(piece, slot.values.data(), rows * cols, tensor.offset + piece.begin * cols));
    FATHOM_RETURN_IF_ERROR(
        write(piece, slot.scales.data(), 4 * grid_rows * grid_cols,
              tensor.scales_offset + 4 * (piece.begin / kScaleBlock) * grid_cols));
    if (progress_ != nullptr) progress_->add(rows * row_bytes);
    return {};
  }

  // Scales are bf16, or a byte with the exponent (e8m0).
  Result<> quantize_to_four_bits(const Piece& piece, const ConstTensorView& weights,
                                 Slot& slot) const {
    const PlannedTensor& tensor = *piece.tensor;
    const int64_t rows = weights.size(0), cols = weights.size(1),
                  groups = cols / format_.group_cols;
    slot.codes.resize(static_cast<size_t>(rows * cols / 2));
    slot.scales.resize(static_cast<size_t>(rows * groups));
    if (const auto done = quantize_four_bit(weights, format_.code(), format_.group_cols, slot.codes,
                                            slot.scales, piece.begin);
        !done) {
      return with_context(
          fmt::format("{}: tensor {:?} ", checkpoint_.file_of(*tensor.source), tensor.name),
          done.error());
    }
    FATHOM_RETURN_IF_ERROR(write(piece, slot.codes.data(), std::ssize(slot.codes),
                                 tensor.offset + piece.begin * cols / 2));
    const int64_t scale_bytes = format_.kind == QuantizeFormat::Kind::kMxfp4 ? 1 : 2;
    slot.source.resize(slot.scales.size() * static_cast<size_t>(scale_bytes));
    for (size_t i = 0; i < slot.scales.size(); ++i) {
      const auto bits = std::bit_cast<uint32_t>(slot.scales[i]);
      if (scale_bytes == 1) {
        slot.source[i] = static_cast<std::byte>(bits >> 23);
      } else {
        const bf16 scale = to_bf16(slot.scales[i]);
        std::memcpy(slot.source.data() + 2 * i, &scale, sizeof scale);
      }
    }
    FATHOM_RETURN_IF_ERROR(write(piece, slot.source.data(), std::ssize(slot.source),
                                 tensor.scales_offset + scale_bytes * piece.begin * groups));
    if (piece.begin > 0 || tensor.shape_offset == 0) return {};
    const int64_t shape[2] = {tensor.source->shape[0], cols};
    return write(piece, shape, sizeof shape, tensor.shape_offset);
  }

  const Checkpoint& checkpoint_;
  const QuantizeFormat format_;
  const std::vector<FileReader>& sources_;
  const FileWriter& file_;
  Progress* const progress_;
  const std::vector<Piece> pieces_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stop_{false};
  std::mutex failing_;
  std::optional<Status> failure_;
};

int threads_for(int wanted) {
  if (wanted > 0) return wanted;
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), kMinThreads,
                    kMaxThreads);
}

Result<> write_shard(const Checkpoint& checkpoint, const PlannedShard& shard,
                     const QuantizeOptions& options, const std::vector<FileReader>& sources,
                     const std::string& path, Progress* progress) {
  FATHOM_TRY(FileWriter file, FileWriter::create(path, shard.bytes));
  FATHOM_RETURN_IF_ERROR(file.write(shard.head.data(), static_cast<int64_t>(shard.head.size()), 0));
  ShardWork work(checkpoint, shard, options, sources, file, progress);
  FATHOM_RETURN_IF_ERROR(work.run(threads_for(options.num_threads)));
  return file.finish();
}

// Whether an earlier run has completed this shard: size and header match. A shard gets its name
// only after its bytes are on disk.
bool is_finished(const PlannedShard& shard, const std::string& path) {
  std::error_code failure;
  if (!fs::exists(path, failure)) return false;
  const auto file = FileReader::open(path);
  std::string head(shard.head.size(), '\0');
  if (file && file->size() == shard.bytes &&
      file->read(head.data(), static_cast<int64_t>(head.size()), 0) && head == shard.head) {
    return true;
  }
  log_warning("{}: is not what this run writes there; it is written anew", path);
  return false;
}

Result<std::vector<FileReader>> open_sources(const Checkpoint& checkpoint) {
  std::vector<FileReader> sources;
  for (const std::string& path : checkpoint.files()) {
    FATHOM_TRY(FileReader file, FileReader::open(path));
    sources.push_back(std::move(file));
  }
  return sources;
}

}  // namespace

Result<QuantizeSummary> quantize_checkpoint(const Checkpoint& checkpoint,
                                            const QuantizeOptions& options) {
  FATHOM_TRY(const QuantizePlan plan,
             plan_quantize(checkpoint, options.format, options.max_shard_bytes));
  const std::string config_path = checkpoint.directory() + "/" + kConfig;
  FATHOM_TRY(const std::string source_config, read_text_file(config_path, kMaxConfigBytes));
  FATHOM_TRY(const std::string config,
             quantized_config(source_config, options.format, config_path));
  FATHOM_TRY(const std::string record, quantize_record(checkpoint, options));
  FATHOM_TRY(OutputDirectory output, OutputDirectory::open(options.output, "quantize", record));
  FATHOM_TRY(const std::vector<FileReader> sources, open_sources(checkpoint));

  QuantizeSummary summary;
  summary.quantized = plan.quantized;
  summary.tensors = static_cast<int64_t>(checkpoint.tensors().size());
  summary.shards = static_cast<int64_t>(plan.shards.size());
  summary.bytes = plan.bytes;
  std::vector<const PlannedShard*> left;
  int64_t left_bytes = 0;
  for (const PlannedShard& shard : plan.shards) {
    summary.source_bytes += shard.source_bytes;
    if (is_finished(shard, output.path(shard.name))) {
      ++summary.kept;
      continue;
    }
    left.push_back(&shard);
    left_bytes += shard.source_bytes;
  }
  {
    std::optional<Progress> progress;
    if (options.show_progress) progress.emplace("Quantising", left_bytes, Progress::Unit::kBytes);
    for (const PlannedShard* shard : left) {
      FATHOM_RETURN_IF_ERROR(write_shard(checkpoint, *shard, options, sources,
                                         output.path(shard->name),
                                         progress ? &*progress : nullptr));
    }
  }
  if (!plan.index.empty()) {
    FATHOM_RETURN_IF_ERROR(write_whole_file(output.path(kIndex), plan.index));
  }
  FATHOM_RETURN_IF_ERROR(copy_small_files(checkpoint, output));
  FATHOM_RETURN_IF_ERROR(write_whole_file(output.path(kConfig), config));
  FATHOM_RETURN_IF_ERROR(output.finish());
  return summary;
}

}  // namespace fathom
