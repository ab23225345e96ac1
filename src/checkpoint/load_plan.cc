#include "checkpoint/load_plan.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

#include "base/check.h"
#include "base/math.h"
#include "base/progress.h"
#include "checkpoint/dummy_weights.h"
#include "checkpoint/file_reader.h"
#include "checkpoint/four_bit_tensors.h"
#include "checkpoint/stored_scales.h"
#include "checkpoint/weight_names.h"
#include "tensor/buffer.h"
#include "tensor/quantize_weight.h"

namespace fathom {
namespace {

// A thread reuses its buffer for the next tensor up to this size: an expert's matrix. Larger
// buffers (the embedding's) are freed.
constexpr int64_t kKeptBuffer = 64 << 20;
// Several reads in flight hide a disk's latency even on fewer cores.
constexpr int kMinThreads = 4;
constexpr int kMaxThreads = 32;

// A request that has passed the checks.
struct Item {
  const TensorRequest* request = nullptr;
  const TensorEntry* entry = nullptr;  // of a four-bit weight, its codes
  StoredScales scales;
  std::optional<FourBitTensors> four_bit;
  int64_t rows = 0;
  int64_t cols = 0;
  bool quantize = false;  // from its stored type to e4m3

  std::vector<const TensorEntry*> entries() const {
    if (four_bit) return four_bit->entries();
    std::vector<const TensorEntry*> all = {entry};
    if (scales.entry != nullptr) all.push_back(scales.entry);
    return all;
  }
};

std::string_view form_of(QuantizationConfig::Kind kind) {
  switch (kind) {
    case QuantizationConfig::Kind::kNone:
      return "not at all";
    case QuantizationConfig::Kind::kFp8Block:
      return "with a scale for each block";
    case QuantizationConfig::Kind::kFp8Tensor:
      return "with one scale a tensor";
    case QuantizationConfig::Kind::kFp8Row:
      return "with a scale for each row";
    default:
      return "in four bits";
  }
  return "?";
}

bool is_wide(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

Result<Item> check_request(const Checkpoint& checkpoint, const TensorRequest& request) {
  FATHOM_CHECK(request.shape.size() == 1 || request.shape.size() == 2, "{} asked with rank {}",
               request.name, request.shape.size());
  if (request.shape.size() == 2) {
    FATHOM_TRY(auto four_bit,
               find_four_bit(checkpoint, request.name, request.shape[0], request.shape[1]));
    if (four_bit) {
      const TensorEntry* const codes = four_bit->codes;
      return Item{&request, codes, {}, std::move(four_bit), request.shape[0], request.shape[1]};
    }
  }
  const TensorEntry* entry = checkpoint.find(request.name);
  if (entry == nullptr) {
    return invalid("{}: tensor {:?} is missing", checkpoint.directory(), request.name);
  }
  const std::string& file = checkpoint.file_of(*entry);
  if (!entry->has_shape(request.shape)) {
    return invalid("{}: tensor {:?} has shape [{}], config.json calls for [{}]", file, request.name,
                   fmt::join(entry->shape, ", "), fmt::join(request.shape, ", "));
  }
  const bool matrix = request.shape.size() == 2;
  if (!is_wide(entry->dtype) && !(matrix && entry->dtype == DType::kF8E4M3)) {
    return invalid(
        "{}: tensor {:?} is stored as {}; {}", file, request.name, name_of(entry->dtype),
        matrix ? "weights are f32, bf16, f16 or e4m3" : "norms and biases are f32, bf16 or f16");
  }
  Item item{&request, entry, {}, {}, matrix ? request.shape[0] : 1, request.shape.back()};
  if (matrix) {
    FATHOM_TRY(item.scales, find_scales(checkpoint, request.name, *entry, item.rows, item.cols));
  }
  return item;
}

// One thread's buffers, for one tensor at a time.
class Slot {
 public:
  Result<std::byte*> values(int64_t bytes, std::string_view name) {
    if (values_.size() < bytes || values_.size() > kKeptBuffer) {
      values_ = Buffer();  // free before allocating
      FATHOM_TRY(values_, Buffer::allocate(bytes, fmt::format("reading tensor {:?}", name)));
    }
    return values_.data();
  }

  std::vector<std::byte> stored_scales;
  std::vector<float> scales;
  std::vector<e4m3> quantized;
  FourBitBuffers four_bit;

 private:
  Buffer values_;
};

// The state of one load_tensors() call. Threads take items in the order of the files; the first
// error stops all of them.
class Loading {
 public:
  Loading(const Checkpoint& checkpoint, const LoadOptions& options, std::vector<Item> items,
          int64_t total_bytes)
      : checkpoint_(checkpoint), options_(options), items_(std::move(items)) {
    if (options.show_progress)
      progress_.emplace("Loading weights", total_bytes, Progress::Unit::kBytes);
  }

  Result<> open_files() {
    files_.resize(checkpoint_.files().size());
    for (const Item& item : items_) {
      if (checkpoint_.is_dummy()) break;
      for (const TensorEntry* entry : item.entries()) {
        auto& file = files_[static_cast<size_t>(entry->file)];
        if (file) continue;
        FATHOM_TRY(FileReader opened, FileReader::open(checkpoint_.file_of(*entry)));
        file.emplace(std::move(opened));
      }
    }
    return {};
  }

  Result<> run() {
    int count = options_.num_threads;
    if (count <= 0) {
      count = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), kMinThreads,
                         kMaxThreads);
    }
    count = static_cast<int>(std::min<int64_t>(count, static_cast<int64_t>(items_.size())));
    std::vector<std::jthread> threads;
    for (int i = 1; i < count; ++i) threads.emplace_back([this] { work(); });
    work();
    threads.clear();  // joins them
    if (failure_) return tl::unexpected<Status>(*failure_);
    return {};
  }

 private:
  void work() {
    Slot slot;
    while (!stop_) {
      const size_t index = next_++;
      if (index >= items_.size()) return;
      if (const auto placed = load(items_[index], slot); !placed) {
        stop_ = true;
        const std::scoped_lock lock(failing_);
        if (!failure_) failure_ = placed.error();
        return;
      }
    }
  }

  Result<> load(const Item& item, Slot& slot) {
    if (item.four_bit) return load_four_bit(item, slot);
    const bool unread = item.request->place_unread != nullptr;
    std::byte* values = nullptr;
    if (!unread) {
      FATHOM_TRY(values, slot.values(item.entry->bytes, item.request->name));
    }
    ScaledMatrix matrix;
    matrix.values = ConstTensorView(values, item.entry->dtype, {item.rows, item.cols});
    if (item.scales.entry != nullptr) {
      slot.scales.resize(static_cast<size_t>(item.scales.grid_rows * item.scales.grid_cols));
      matrix.scales =
          ConstTensorView(slot.scales.data(), {item.scales.grid_rows, item.scales.grid_cols});
      matrix.scale_rows = item.scales.scale_rows;
      matrix.scale_cols = item.scales.scale_cols;
    }
    if (checkpoint_.is_dummy()) {
      fill(item, values, slot);
    } else {
      if (!unread) FATHOM_RETURN_IF_ERROR(read(*item.entry, 0, {values, size_of(*item.entry)}));
      if (item.scales.entry != nullptr) FATHOM_RETURN_IF_ERROR(read_scales(item, slot));
    }
    if (item.quantize) {
      FATHOM_TRY(matrix, quantize(item, matrix.values, slot));
    }
    if (unread) return place_unread(item, matrix);
    if (const auto placed = item.request->place(matrix); !placed) {
      return with_context(item.request->name + ": ", placed.error());
    }
    return {};
  }

  Result<> load_four_bit(const Item& item, Slot& slot) {
    ScaledMatrix matrix;
    if (checkpoint_.is_dummy()) {
      matrix = dummy_four_bit(*item.four_bit, options_.dummy_seed, slot.four_bit);
      add_progress(item.entry->bytes);
    } else {
      const auto read_tensor = [&](const TensorEntry& entry, std::span<std::byte> to) {
        return read(entry, 0, to);
      };
      FATHOM_TRY(matrix, read_four_bit(checkpoint_, *item.four_bit, read_tensor, slot.four_bit));
    }
    if (item.request->place_unread != nullptr) return place_codes(item, matrix, slot);
    if (const auto placed = item.request->place(matrix); !placed) {
      return with_context(item.request->name + ": ", placed.error());
    }
    return {};
  }

  // Codes have been decoded into memory: reading is copying.
  Result<> place_codes(const Item& item, const ScaledMatrix& matrix, const Slot& slot) {
    ScaledMatrix unread = matrix;
    unread.values = ConstTensorView(nullptr, DType::kU8, {item.rows, item.cols});
    const auto read_codes = [&](int64_t first, std::span<std::byte> to) -> Result<> {
      FATHOM_CHECK(first >= 0 && first + std::ssize(to) <= std::ssize(slot.four_bit.codes),
                   "codes {} + {} of {}", first, to.size(), slot.four_bit.codes.size());
      std::memcpy(to.data(), slot.four_bit.codes.data() + first, to.size());
      return {};
    };
    if (const auto placed = item.request->place_unread(unread, read_codes); !placed) {
      return with_context(
          fmt::format("{}: tensor {:?}: ", checkpoint_.file_of(*item.entry), item.request->name),
          placed.error());
    }
    return {};
  }

  Result<> place_unread(const Item& item, const ScaledMatrix& matrix) {
    FATHOM_CHECK(!checkpoint_.is_dummy() && !item.quantize, "{} is not to be read",
                 item.request->name);
    const auto read_values = [&](int64_t first, std::span<std::byte> to) {
      return read(*item.entry, first, to);
    };
    if (const auto placed = item.request->place_unread(matrix, read_values); !placed) {
      return with_context(
          fmt::format("{}: tensor {:?}: ", checkpoint_.file_of(*item.entry), item.request->name),
          placed.error());
    }
    return {};
  }

  Result<ScaledMatrix> quantize(const Item& item, const ConstTensorView& weights, Slot& slot) {
    const int64_t grid_rows = ceil_div(item.rows, kScaleBlock);
    const int64_t grid_cols = ceil_div(item.cols, kScaleBlock);
    slot.quantized.resize(static_cast<size_t>(item.rows * item.cols));
    slot.scales.resize(static_cast<size_t>(grid_rows * grid_cols));
    const TensorView values(slot.quantized.data(), {item.rows, item.cols});
    const TensorView scales(slot.scales.data(), {grid_rows, grid_cols});
    if (const auto done = quantize_weights(weights, ScaleForm::kF32, values, scales); !done) {
      return with_context(
          fmt::format("{}: tensor {:?} ", checkpoint_.file_of(*item.entry), item.request->name),
          done.error());
    }
    return ScaledMatrix{values, scales, kScaleBlock, kScaleBlock};
  }

  void fill(const Item& item, std::byte* values, Slot& slot) {
    fill_dummy(item.request->name, item.entry->dtype, item.cols, options_.dummy_seed,
               {values, static_cast<size_t>(item.entry->bytes)});
    if (item.scales.entry != nullptr) {
      fill_dummy_scales(item.scales.name, item.cols,
                        checkpoint_.config().quantization.scales_are_powers_of_two,
                        options_.dummy_seed, slot.scales);
    }
    add_progress(item.entry->bytes);
  }

  static size_t size_of(const TensorEntry& entry) { return static_cast<size_t>(entry.bytes); }

  // Fills `to` with the tensor's bytes from byte `first` on.
  Result<> read(const TensorEntry& entry, int64_t first, std::span<std::byte> to) {
    const FileReader& file = *files_[static_cast<size_t>(entry.file)];
    FATHOM_CHECK(first >= 0 && first + std::ssize(to) <= entry.bytes, "bytes {} + {} of {}", first,
                 to.size(), entry.bytes);
    for (int64_t done = 0; done < std::ssize(to);) {
      const int64_t bytes = std::min(options_.read_bytes, std::ssize(to) - done);
      FATHOM_RETURN_IF_ERROR(file.read(to.data() + done, bytes, entry.offset + first + done));
      done += bytes;
      add_progress(bytes);
    }
    return {};
  }

  Result<> read_scales(const Item& item, Slot& slot) {
    const TensorEntry& entry = *item.scales.entry;
    slot.stored_scales.resize(size_of(entry));
    FATHOM_RETURN_IF_ERROR(read(entry, 0, slot.stored_scales));
    if (const auto decoded = decode_scales(item.scales, slot.stored_scales, slot.scales);
        !decoded) {
      return with_context(checkpoint_.file_of(entry) + ": ", decoded.error());
    }
    return {};
  }

  void add_progress(int64_t bytes) {
    if (progress_) progress_->add(bytes);
  }

  const Checkpoint& checkpoint_;
  const LoadOptions& options_;
  const std::vector<Item> items_;
  std::vector<std::optional<FileReader>> files_;
  std::optional<Progress> progress_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stop_{false};
  std::mutex failing_;
  std::optional<Status> failure_;
};

}  // namespace

Result<> check_load_options(const Checkpoint& checkpoint, const LoadOptions& options) {
  const QuantizationConfig::Kind kind = checkpoint.config().quantization.kind;
  if (!options.quantize_fp8 || kind == QuantizationConfig::Kind::kNone ||
      kind == QuantizationConfig::Kind::kFp8Block) {
    return {};
  }
  return invalid(
      "{}: the weights are quantised already, {}; they run as they are, and cannot be "
      "quantised again to blocks of {}x{} (leave out --quantization fp8)",
      checkpoint.directory(), form_of(kind), kScaleBlock, kScaleBlock);
}

bool is_quantized_while_loading(const Checkpoint& checkpoint, const LoadOptions& options,
                                bool linear, DType stored) {
  // In an FP8 checkpoint the matrices in wide types are so on purpose.
  return options.quantize_fp8 && linear && is_wide(stored) &&
         checkpoint.config().quantization.kind == QuantizationConfig::Kind::kNone;
}

Result<> check_stored(const Checkpoint& checkpoint) {
  Result<> checked;
  WeightNames(checkpoint.config()).for_each_weight([&](const PublishedTensor& tensor) {
    if (tensor.group == WeightGroup::kMtp) return true;
    const TensorRequest request{tensor.name, tensor.shape};
    const auto item = check_request(checkpoint, request);
    if (!item) checked = tl::unexpected<Status>(item.error());
    return checked.has_value();
  });
  return checked;
}

Result<> load_tensors(const Checkpoint& checkpoint, const std::vector<TensorRequest>& requests,
                      const LoadOptions& options) {
  FATHOM_RETURN_IF_ERROR(check_load_options(checkpoint, options));
  const WeightNames names(checkpoint.config());
  std::vector<Item> items;
  items.reserve(requests.size());
  int64_t total = 0;
  for (const TensorRequest& request : requests) {
    FATHOM_TRY(Item item, check_request(checkpoint, request));
    item.quantize = is_quantized_while_loading(checkpoint, options, names.is_linear(request.name),
                                               item.entry->dtype);
    total += request.part > 0 && !item.four_bit ? request.part * size_of(item.entry->dtype)
                                                : item.entry->bytes;
    if (!checkpoint.is_dummy()) {
      for (const TensorEntry* entry : item.entries()) total += entry->bytes;
      total -= item.entry->bytes;
    }
    items.push_back(std::move(item));
  }
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return std::pair(a.entry->file, a.entry->offset) < std::pair(b.entry->file, b.entry->offset);
  });
  Loading loading(checkpoint, options, std::move(items), total);
  FATHOM_RETURN_IF_ERROR(loading.open_files());
  return loading.run();
}

}  // namespace fathom
