#include "model/weights_cuda.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "checkpoint/four_bit_tensors.h"
#include "checkpoint/stored_scales.h"
#include "checkpoint/tensor_names.h"
#include "device/cuda/device_context.h"
#include "model/upload_plan.h"
#include "model/weight_upload_cuda.h"

namespace fathom::cuda {
namespace {

// Default number of threads: they only read and copy, and 8 nearly saturate the page cache.
constexpr int kLoadingThreads = 8;

Result<float> read_number(const ScaledMatrix& matrix, const ReadValues& read) {
  std::array<std::byte, sizeof(float)> bytes;
  const DType type = matrix.values.dtype();
  FATHOM_RETURN_IF_ERROR(read(0, std::span(bytes).first(static_cast<size_t>(size_of(type)))));
  ScaledMatrix number;
  number.values = ConstTensorView(bytes.data(), type, {1, 1});
  return number.at(0, 0);
}

// The part of a matrix whose values are not in memory.
ScaledMatrix slice(ScaledMatrix matrix, const TensorPart& part) {
  matrix.values =
      ConstTensorView(nullptr, matrix.values.dtype(), {part.rows.count, part.cols.count});
  matrix.scale_row = part.rows.first;
  matrix.scale_col = part.cols.first;
  return matrix;
}

// A rank's uploads.
struct RankUploads {
  UploadPlan plan;
  DeviceContext& device;
};

// Carries the plans of all ranks out.
class WeightLoader {
 public:
  WeightLoader(const Checkpoint& checkpoint, const LoadOptions& options)
      : checkpoint_(checkpoint), options_(options) {}

  Result<> load(std::deque<RankUploads>& ranks) {
    if (!checkpoint_.is_dummy()) return read(ranks);
    for (RankUploads& rank : ranks) FATHOM_RETURN_IF_ERROR(make_up(rank));
    return {};
  }

 private:
  Result<> read(std::deque<RankUploads>& ranks) {
    std::vector<TensorRequest> requests;
    for (RankUploads& rank : ranks) {
      for (const Upload& upload : rank.plan.uploads) {
        const TensorPart& part = upload.part;
        requests.push_back({.name = part.name,
                            .shape = shape_of(part),
                            .part = part.rows.count * part.cols.count});
        requests.back().place_unread = [this, &rank, &upload](const ScaledMatrix& matrix,
                                                              const ReadValues& read_values) {
          return run(
              rank, upload,
              {.matrix = slice(matrix, upload.part), .part = upload.part, .read = read_values});
        };
        if (upload.place.type == DType::kF8E4M3) request_input_scale(upload, &requests);
      }
    }
    FATHOM_RETURN_IF_ERROR(check_load_options(checkpoint_, options_));
    LoadOptions options = options_;
    options.quantize_fp8 = false;  // the device quantizes
    if (options.num_threads == 0) options.num_threads = kLoadingThreads;
    return load_tensors(checkpoint_, requests, options);
  }

  static std::vector<int64_t> shape_of(const TensorPart& part) {
    if (part.is_vector) return {part.num_cols};
    return {part.num_rows, part.num_cols};
  }

  // X.input_scale beside X.weight, if the checkpoint's quantization is static and the tensor
  // exists.
  void request_input_scale(const Upload& upload, std::vector<TensorRequest>* requests) {
    if (!checkpoint_.config().quantization.static_activations) return;
    const std::string& weight = upload.part.name;
    const std::string name =
        weight.substr(0, weight.rfind('.')) + std::string(tensor_names::kInputScale);
    if (checkpoint_.find(name) == nullptr) return;
    requests->push_back({.name = name, .shape = {1}});
    requests->back().place_unread = [this, matrix = upload.matrix](
                                        const ScaledMatrix& stored,
                                        const ReadValues& read_values) -> Result<> {
      FATHOM_TRY(const float scale, read_number(stored, read_values));
      if (!std::isfinite(scale) || scale <= 0) {
        return invalid("holds {}; a scale is a positive number", scale);
      }
      const std::scoped_lock lock(mutex_);
      matrix->input_scale = std::max(matrix->input_scale, scale);
      return {};
    };
  }

  // Fills dummy weights on the device: the host's threads are ten times slower.
  Result<> make_up(RankUploads& rank) {
    std::vector<float> scales;
    FourBitBuffers buffers;
    for (const Upload& upload : rank.plan.uploads) {
      const TensorPart& part = upload.part;
      FATHOM_TRY(const auto four_bit,
                 find_four_bit(checkpoint_, part.name, part.num_rows, part.num_cols));
      if (four_bit) {
        const ScaledMatrix matrix = dummy_four_bit_scales(*four_bit, options_.dummy_seed, buffers);
        FATHOM_RETURN_IF_ERROR(
            run(rank, upload,
                {.matrix = slice(matrix, part),
                 .part = part,
                 .dummy = dummy_values(part.name, part.num_cols, options_.dummy_seed)}));
        continue;
      }
      const TensorEntry& entry = *checkpoint_.find(part.name);
      ScaledMatrix matrix;
      matrix.values = ConstTensorView(nullptr, entry.dtype, {part.num_rows, part.num_cols});
      if (entry.dtype == DType::kF8E4M3) {
        FATHOM_TRY(const StoredScales stored,
                   find_scales(checkpoint_, part.name, entry, part.num_rows, part.num_cols));
        scales.resize(static_cast<size_t>(stored.grid_rows * stored.grid_cols));
        fill_dummy_scales(stored.name, part.num_cols,
                          checkpoint_.config().quantization.scales_are_powers_of_two,
                          options_.dummy_seed, scales);
        matrix.scales = ConstTensorView(scales.data(), {stored.grid_rows, stored.grid_cols});
        matrix.scale_rows = stored.scale_rows;
        matrix.scale_cols = stored.scale_cols;
      }
      FATHOM_RETURN_IF_ERROR(
          run(rank, upload,
              {.matrix = slice(matrix, part),
               .part = part,
               .dummy = dummy_values(part.name, part.num_cols, options_.dummy_seed)}));
    }
    return {};
  }

  // Uploads on the calling thread. A device error ends a loading thread like any other error.
  Result<> run(RankUploads& rank, const Upload& upload, const WeightSource& source) {
    try {
      std::unique_ptr<WeightUpload> staging;
      {
        const std::scoped_lock lock(mutex_);
        auto& idle = idle_[rank.device.device()];
        if (!idle.empty()) {
          staging = std::move(idle.back());
          idle.pop_back();
        }
      }
      rank.device.make_current();
      if (!staging) staging = std::make_unique<WeightUpload>();
      FATHOM_RETURN_IF_ERROR(staging->copy(source, upload.place));
      if (upload.split) staging->split(*upload.split);
      const std::scoped_lock lock(mutex_);
      idle_[rank.device.device()].push_back(std::move(staging));
      return {};
    } catch (const DeviceError& failure) {
      return error(Code::kInternal, "{}", failure.what());
    }
  }

  const Checkpoint& checkpoint_;
  const LoadOptions options_;
  std::mutex mutex_;  // guards what is idle, and input scales
  // Idle uploads per device, not per rank: streams of later ranks take the hardware queues that
  // these leave, and with more streams than a device has queues two ranks could share one
  // (peer_group.h).
  std::map<int, std::vector<std::unique_ptr<WeightUpload>>> idle_;
};

// Routed and shared experts have the same x, which is quantized once.
void share_input_scales(ModelTensors& weights) {
  for (LayerWeights& layer : weights.layers) {
    float& routed = layer.experts.gate_up.input_scale;
    float& shared = layer.shared.gate_up.input_scale;
    routed = shared = std::max(routed, shared);
  }
}

}  // namespace

int64_t weight_bytes(const ModelSpec& spec, std::span<const LayerForms> forms) {
  return plan_upload(spec, forms, nullptr).bytes;
}

Result<std::vector<ModelWeights>> load_weights(const Checkpoint& checkpoint,
                                               std::span<const WeightsOfRank> ranks,
                                               const LoadOptions& options) {
  const DeviceContext& before = DeviceContext::current();
  std::vector<ModelWeights> all(ranks.size());
  std::deque<RankUploads> uploads;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const WeightsOfRank& rank = ranks[i];
    rank.device.make_current();
    all[i].memory = DeviceArray<std::byte>(weight_bytes(rank.spec, rank.forms));
    uploads.push_back({plan_upload(rank.spec, rank.forms, all[i].memory.data()), rank.device});
  }
  const auto loaded = WeightLoader(checkpoint, options).load(uploads);
  before.make_current();
  if (!loaded) return tl::unexpected(loaded.error());
  for (size_t i = 0; i < ranks.size(); ++i) {
    share_input_scales(*uploads[i].plan.tensors);
    static_cast<ModelTensors&>(all[i]) = std::move(*uploads[i].plan.tensors);
  }
  return all;
}

}  // namespace fathom::cuda
